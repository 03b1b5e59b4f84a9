"""Builds the traced class from any connector class and writes a record per callback. The only code on the hot path."""

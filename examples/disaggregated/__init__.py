"""Disaggregated serving over a store: a prefill engine saves, a decode engine loads."""

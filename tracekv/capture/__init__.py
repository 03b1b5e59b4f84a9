"""Builds the traced class from any connector class and writes a record per callback. The only code on the hot path."""

from __future__ import annotations

from tracekv.capture.classes import implemented_callbacks, side_of, trace
from tracekv.capture.session import flush, shutdown

__all__ = ["flush", "implemented_callbacks", "shutdown", "side_of", "trace"]

"""tracekv: observability-first tracing for KV cache connectors of LLM inference engines."""

from __future__ import annotations

from tracekv._version import __version__
from tracekv.capture import flush, trace
from tracekv.reporting import drop, lookup, prefetch, store_operation, transfer

__all__ = ["__version__", "drop", "flush", "lookup", "prefetch", "store_operation", "trace", "transfer"]

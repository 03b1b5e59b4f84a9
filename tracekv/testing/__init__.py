"""What connector authors import in their own tests: the contract kit, wrappers, and assertions over what was recorded.

Importing this package imports nothing heavy; its names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekv.testing.contract import ConnectorContract
    from tracekv.testing.journals import Recorded, journal_of, recorded
    from tracekv.testing.kit import Kit
    from tracekv.testing.schedules import random_schedules
    from tracekv.testing.stories import matrix
    from tracekv.testing.wrappers import with_fault, with_io_counted, with_latency, wrapped

_HOMES = {
    "ConnectorContract": "contract",
    "Kit": "kit",
    "Recorded": "journals",
    "journal_of": "journals",
    "matrix": "stories",
    "random_schedules": "schedules",
    "recorded": "journals",
    "with_fault": "wrappers",
    "with_io_counted": "wrappers",
    "with_latency": "wrappers",
    "wrapped": "wrappers",
}

__all__ = [
    "ConnectorContract",
    "Kit",
    "Recorded",
    "journal_of",
    "matrix",
    "random_schedules",
    "recorded",
    "with_fault",
    "with_io_counted",
    "with_latency",
    "wrapped",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

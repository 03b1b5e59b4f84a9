"""tracekv_fsspec: a persistent KV cache connector on any fsspec URL.

``Scheduler`` and ``Worker`` are what a runtime constructs; ``Settings`` is what it can be told; ``diagnose`` says
whether it works here. Importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekv_fsspec.diagnosis import diagnose
    from tracekv_fsspec.scheduler import Scheduler
    from tracekv_fsspec.settings import Settings
    from tracekv_fsspec.worker import Worker

_HOME_OF = {"Scheduler": "scheduler", "Settings": "settings", "Worker": "worker", "diagnose": "diagnosis"}

__all__ = ["Scheduler", "Settings", "Worker", "diagnose"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)

"""What a connector is: base classes, the runtime's records, the cache layout, and the ranks.

Where TensorRT-LLM is importable its own types stand here, so that ``isinstance`` and ``type(x).m is Base.m`` hold for the
engine; elsewhere tracekv's, of the same shape. Differences between versions are absorbed by :mod:`tracekv.contract.reading`.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from tracekv.contract import _base, _layout, _types
from tracekv.contract._layout import BAD_PAGE_INDEX, valid_page_slots
from tracekv.contract._types import LlmRequest
from tracekv.contract.enqueue import on_enqueue
from tracekv.contract.runtime import Runtime, UnknownRuntime, current_runtime, use_runtime

_PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"
#: Newer versions keep the connector in a package of its own (contract.md section 3).
_CONNECTOR_PATHS = (f"{_PYEXECUTOR}.connectors.kv_cache_connector", f"{_PYEXECUTOR}.kv_cache_connector")
_LAYOUT_PATH = f"{_PYEXECUTOR}.connectors.kv_cache_layout"


def _import_first(*paths: str) -> ModuleType | None:
    for path in paths:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            # A missing parent or the module itself: try the other path. Anything else is a broken installation.
            if not (error.name and path.startswith(error.name)):
                raise
    return None


if TYPE_CHECKING:
    from tracekv.contract._base import KvCacheConnectorScheduler, KvCacheConnectorWorker
    from tracekv.contract._layout import (
        KvCacheBufferRef,
        KvCacheLayerGroupLayout,
        KvCacheLayout,
        KvCacheRegion,
    )
    from tracekv.contract._types import RequestData, SchedulerOutput
else:
    _theirs = _import_first(*_CONNECTOR_PATHS) if importlib.util.find_spec("tensorrt_llm") else None
    _connector = _theirs or _base
    _records = _theirs or _types
    _layouts = (_import_first(_LAYOUT_PATH) if _theirs else None) or _layout

    KvCacheConnectorScheduler = _connector.KvCacheConnectorScheduler
    KvCacheConnectorWorker = _connector.KvCacheConnectorWorker
    RequestData = _records.RequestData
    SchedulerOutput = _records.SchedulerOutput
    KvCacheBufferRef = _layouts.KvCacheBufferRef
    KvCacheRegion = _layouts.KvCacheRegion
    KvCacheLayerGroupLayout = _layouts.KvCacheLayerGroupLayout
    KvCacheLayout = _layouts.KvCacheLayout

__all__ = [
    "BAD_PAGE_INDEX",
    "KvCacheBufferRef",
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "KvCacheLayerGroupLayout",
    "KvCacheLayout",
    "KvCacheRegion",
    "LlmRequest",
    "RequestData",
    "Runtime",
    "SchedulerOutput",
    "UnknownRuntime",
    "current_runtime",
    "on_enqueue",
    "use_runtime",
    "valid_page_slots",
]

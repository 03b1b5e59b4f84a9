"""The names and types of ``tensorrt_llm`` that connectors import, so that they run here unchanged, without a GPU.

.. code-block:: python

   with fake_trtllm.installed():
       from some_package.trtllm import Scheduler, Worker

Types only, and our own: base classes, records and layout are :mod:`tracekv.contract`'s, so the reference executor drives what
inherits them; nothing here does what TensorRT-LLM does. Where TensorRT-LLM is installed this refuses to stand in its place.

Source: contract.md sections 3 and 7 (what connectors in the wild import).
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tracekv import contract
from tracekv.contract import UnknownRuntime, current_runtime
from tracekv.harness import bringup
from tracekv.harness.requests import Batch, Request, RequestState

_PYEXECUTOR = "tensorrt_llm._torch.pyexecutor"
#: Says on the module that it is ours.
_MARK = "__tracekv_fake__"


def _rank() -> int:
    try:
        return current_runtime().rank
    except UnknownRuntime:
        return 0


def _world() -> int:
    try:
        return current_runtime().world
    except UnknownRuntime:
        return 1


class KvCacheConnectorConfig:
    """What ``llm_args.kv_connector_config`` holds; ``server_url`` is for connectors with a server of their own."""

    def __init__(self, **fields: Any) -> None:
        self.connector: str | None = None
        self.connector_module = ""
        self.connector_scheduler_class = ""
        self.connector_worker_class = ""
        self.server_url: str | None = None
        vars(self).update(fields)


class KvCacheConnectorManager:
    """The base class of the bindings; nothing calls it here."""


def get_draft_token_length(request: Any) -> int:
    """Draft tokens of a request."""
    return len(getattr(request, "py_draft_tokens", None) or ())


def _names() -> dict[str, dict[str, Any]]:
    """``module -> its names``."""
    connector = {
        name: getattr(contract, name)
        for name in ("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "RequestData", "SchedulerOutput")
    }
    layout = {
        name: getattr(contract, name)
        for name in (
            "KvCacheBufferRef",
            "KvCacheLayerGroupLayout",
            "KvCacheLayout",
            "KvCacheRegion",
            "valid_page_slots",
        )
    }
    log = logging.getLogger("tensorrt_llm")
    levels = {name: getattr(log, name) for name in ("debug", "info", "warning", "error")}
    mpi = {"mpi_rank": _rank, "mpi_world_size": _world}
    arguments = {
        "KvCacheConfig": bringup.KvCacheConfig,
        "KvCacheConnectorConfig": KvCacheConnectorConfig,
        "TorchLlmArgs": bringup.LlmArgs,
    }
    return {
        "tensorrt_llm": {**mpi, "__version__": "0"},
        "tensorrt_llm._utils": mpi,
        "tensorrt_llm.logger": {**levels, "logger": log},
        "tensorrt_llm._torch": {},
        _PYEXECUTOR: {},
        f"{_PYEXECUTOR}.connectors": {},
        f"{_PYEXECUTOR}.connectors.kv_cache_connector": connector,
        f"{_PYEXECUTOR}.connectors.kv_cache_layout": layout,
        f"{_PYEXECUTOR}.kv_cache_connector": connector,  # where versions up to 1.1 have it
        f"{_PYEXECUTOR}.llm_request": {"LlmRequest": Request, "get_draft_token_length": get_draft_token_length},
        f"{_PYEXECUTOR}.scheduler": {"ScheduledRequests": Batch},
        "tensorrt_llm.bindings": {"LlmRequestState": RequestState},
        "tensorrt_llm.bindings.internal": {},
        "tensorrt_llm.bindings.internal.batch_manager": {
            "KvCacheConnectorManager": KvCacheConnectorManager,
            "LlmRequest": Request,
        },
        "tensorrt_llm.llmapi": arguments,
        "tensorrt_llm.llmapi.llm_args": arguments,
        "tensorrt_llm.runtime": {},
        "tensorrt_llm.runtime.kv_cache_manager_v2": {"BAD_PAGE_INDEX": contract.BAD_PAGE_INDEX},
    }


def is_installed() -> bool:
    """The fake stands in ``sys.modules``."""
    return hasattr(sys.modules.get("tensorrt_llm"), _MARK)


def install() -> None:
    """Put the modules into ``sys.modules``, for the rest of the process. :mod:`tracekv.contract` keeps its own types.

    Raises:
        RuntimeError: TensorRT-LLM itself is installed.
    """
    if is_installed():
        return
    if "tensorrt_llm" in sys.modules or importlib.util.find_spec("tensorrt_llm") is not None:
        raise RuntimeError("tracekv: TensorRT-LLM is installed here; its own types are used, and no fake is needed")
    for name, attributes in _names().items():
        module = ModuleType(name, "A stand-in of tracekv.testing.fake_trtllm: types only.")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(attributes)
        setattr(module, _MARK, True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def remove() -> None:
    """Take the modules out again. What was imported meanwhile keeps the types that it has."""
    if is_installed():
        for name in _names():
            sys.modules.pop(name, None)


@contextmanager
def installed() -> Iterator[None]:
    """The modules for the time of a block."""
    install()
    try:
        yield
    finally:
        remove()

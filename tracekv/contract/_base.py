"""The two base classes of a connector, of the same behaviour as TensorRT-LLM's own.

Source: contract.md sections 1.1 and 1.2; the injected stubs and the folds follow golden scenarios j.*.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from tracekv.contract._layout import KvCacheLayout
from tracekv.contract._types import LlmRequest, SchedulerOutput

if TYPE_CHECKING:
    import torch

#: The per-layer-group form of a callback -> the flat form that it may replace.
FLAT_FORM_OF = {
    "update_state_after_alloc_by_layer_group": "update_state_after_alloc",
    "request_finished_by_layer_group": "request_finished",
    "register_kv_cache_layout": "register_kv_caches",
}


def _inject_stubs(cls: type[Any]) -> None:
    """Make a class instantiable that defines only the per-layer-group form of a pair.

    The flat method that it leaves abstract becomes a stub that raises NotImplementedError when it is reached.
    """
    for grouped, flat in FLAT_FORM_OF.items():
        method = getattr(cls, grouped, None)
        if method is None or getattr(method, "__module__", None) == __name__:
            continue
        if getattr(getattr(cls, flat, None), "__isabstractmethod__", False):
            setattr(cls, flat, _stub(grouped, flat))


def _stub(grouped: str, flat: str) -> Callable[..., NoReturn]:
    def stub(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} implements {grouped}, not {flat}: this runtime calls the flat form"
        )

    stub.__name__ = flat
    stub.__qualname__ = f"_stub.{flat}"
    return stub


class KvCacheConnectorWorker(ABC):
    """Moves KV on every rank. Called on the executor's thread, except for the constructor.

    Args:
        llm_args: The engine's arguments; None outside an engine.

    Source: contract.md section 1.1.
    """

    #: Opt-in to attention data parallelism; read from the class.
    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any = None) -> None:
        self._llm_args = llm_args
        self._metadata: object | None = None
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _inject_stubs(cls)

    def bind_connector_meta(self, metadata: object) -> None:
        """Receive what the leader's ``build_connector_meta`` returned; once per scheduled pass."""
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        """The metadata bound last. On idle iterations that is a past pass's."""
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """A callable to run after each forward, on its stream, or None.

        Asked before the caches are registered; the callable also runs for warm-up batches.
        """
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the pool of a single-pool cache, ``[num_blocks, num_layers, kv_factor, block_size]``."""

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Take the pools of a cache that describes itself by layer group.

        Default: forwards the single-pool view to :meth:`register_kv_caches`; raises NotImplementedError where
        several groups or regions leave no such view.
        """
        tensor = layout.as_single_pool_tensor()
        if tensor is None:
            regions = [len(group.regions) for group in layout.groups]
            raise NotImplementedError(
                f"{type(self).__name__} does not implement register_kv_cache_layout, and this KV cache has "
                f"{len(layout.groups)} layer groups with {regions} regions, which is not a single tensor"
            )
        self.register_kv_caches(tensor)

    @abstractmethod
    def start_load_kv(self, stream: torch.cuda.Stream) -> None:
        """Start the loads of this pass. Work enqueued on ``stream`` is ordered before the forward."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """Return (or make ``stream`` wait) only when layer ``layer_idx`` is loaded. Eager passes only."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream) -> None:
        """Called after layer ``layer_idx`` has run. Eager passes only."""

    @abstractmethod
    def wait_for_save(self, stream: torch.cuda.Stream) -> None:
        """End of the forward: every page named in this pass's metadata is still valid here."""

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Answer ``(finished saving, finished loading)``; called in every iteration, idle ones too.

        The arguments are the ids announced since the last call. An id may be returned once, after it was given.
        """


class KvCacheConnectorScheduler(ABC):
    """Decides what is loaded and saved; lives on the leader rank only, with attention data parallelism on every rank.

    Args:
        llm_args: The engine's arguments; None outside an engine.

    Source: contract.md section 1.2.
    """

    #: Opt-in to attention data parallelism; read from the class.
    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any = None) -> None:
        self._llm_args = llm_args
        super().__init__()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _inject_stubs(cls)

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Plan the pass; the (picklable) answer reaches every rank's ``bind_connector_meta``."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: LlmRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Answer ``(offered_tokens, is_async)`` beyond ``num_computed_tokens``; once per allocation.

        An offered token counts as computed from here on: there is no way to report a failed load.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Learn the page slots of the first chunk (V2) or the whole prompt (V1)."""

    def update_state_after_alloc_by_layer_group(
        self, request: LlmRequest, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """The per-layer-group form; by default folds one group to the flat form."""
        self.update_state_after_alloc(request, self._fold(block_ids_by_layer_group, "update_state_after_alloc"))

    @abstractmethod
    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Answer True to keep the pages until ``get_finished`` returned the id on every rank."""

    def request_finished_by_layer_group(
        self, request: LlmRequest, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """The per-layer-group form; by default folds one group to the flat form."""
        return self.request_finished(request, self._fold(cache_block_ids_by_layer_group, "request_finished"))

    def wait_for_initialization(self) -> None:  # noqa: B027  # a hook with a default, as in the runtime
        """Last step of bring-up, on the leader, after the worker of this process knows its caches."""

    def _fold(self, ids_by_layer_group: list[list[int]], flat: str) -> list[int]:
        if len(ids_by_layer_group) != 1:
            raise NotImplementedError(
                f"{type(self).__name__} does not implement {flat}_by_layer_group, and this KV cache has "
                f"{len(ids_by_layer_group)} layer groups"
            )
        return ids_by_layer_group[0]

"""The connector manager: the runtime's only way to a connector pair, with the verbs and quirks of the real one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

from tracekv.contract import KvCacheConnectorScheduler, SchedulerOutput
from tracekv.harness.collectives import Collectives, OneRank
from tracekv.harness.deltas import DeltaReports, PageLists
from tracekv.harness.requests import Batch, Request, RequestState

_log = logging.getLogger("tracekv.harness")

_GROUPED_FORMS = ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group")


class Transfers:
    """Requests whose asynchronous save or load is at one stage."""

    def __init__(self) -> None:
        self.saving: dict[int, Request] = {}
        self.loading: dict[int, Request] = {}

    def __bool__(self) -> bool:
        return bool(self.saving or self.loading)

    def take_all(self, other: Transfers) -> None:
        """Move everything of another stage into this one."""
        self.saving.update(other.saving)
        self.loading.update(other.loading)
        other.saving, other.loading = {}, {}


class KvCacheConnectorManager:
    """One rank's manager.

    Args:
        worker: This rank's worker.
        scheduler: The scheduler, on the leader (rank 0) only; with attention data parallelism on every rank.
        enable_attention_dp: Every rank serves requests of its own: it asks its own scheduler, no rank waits for another, and
            dummies are kept from the connector.
        collectives: How the ranks talk; one rank by default.
        current_stream: What the per-layer hooks hand over.
        calls: Counts every call made to the connector as ``"scheduler.NAME"`` or ``"worker.NAME"``.

    Source: contract.md sections 1.4 to 1.7; contract-v2.md sections 4 and 11.
    """

    def __init__(
        self,
        worker: Any,
        scheduler: Any,
        *,
        enable_attention_dp: bool = False,
        collectives: Collectives | None = None,
        current_stream: Callable[[], Any] = lambda: None,
        calls: Counter[str] | None = None,
    ) -> None:
        self._ranks: Collectives = collectives or OneRank()
        is_leader = enable_attention_dp or self._ranks.rank == 0
        assert (scheduler is not None) == is_leader, (
            "A scheduler is required on rank 0 and nowhere else (attention DP: on all)"
        )
        if enable_attention_dp:
            self.validate_attention_dp(scheduler, worker)
        self.enable_attention_dp = enable_attention_dp
        self.worker = worker
        self.scheduler = scheduler
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._current_stream = current_stream
        self._reports = DeltaReports()
        self._output: SchedulerOutput | None = None
        #: Honoured tokens of this pass; every build clears them, whoever is in it (golden l.commit_then_other_build).
        self.external_loads: dict[int, int] = {}
        #: Registered in this pass, not yet named to ``get_finished``.
        self.new_async_requests = Transfers()
        #: Named to the worker, not yet returned by it.
        self.pending_async_requests = Transfers()
        #: Returned by this rank's worker, not yet by every rank's.
        self.local_finished_async_requests = Transfers()
        #: Loads that completed; such a request isn't asked again until it has finished, not even after a replay.
        self.finished_async_loading_requests: dict[int, Request] = {}

    # -- calls to the connector -------------------------------------------------------------------------------------

    def call(self, side: Literal["scheduler", "worker"], method: str, *args: Any) -> Any:
        """Call the connector, counted."""
        bound = getattr(self.scheduler if side == "scheduler" else self.worker, method)
        self.calls[f"{side}.{method}"] += 1
        return bound(*args)

    def _from_leader(self, method: str, *args: Any) -> Any:
        """What the scheduler answers, on every rank; its own one's with attention data parallelism."""
        if self.enable_attention_dp:
            return self.call("scheduler", method, *args)
        return self._ranks.broadcast(self.call("scheduler", method, *args) if self._is_leader else None)

    @property
    def _is_leader(self) -> bool:
        return self.scheduler is not None

    def _is_hidden(self, request: Request) -> bool:
        """Only attention data parallelism keeps dummies from the connector here; otherwise its callers do."""
        return self.enable_attention_dp and request.is_dummy_request

    # -- bring-up -----------------------------------------------------------------------------------------------------

    @staticmethod
    def validate_attention_dp(scheduler: Any, worker: Any) -> None:
        """NotImplementedError unless both classes have ``supports_attention_dp = True``, exactly."""
        if not all(getattr(type(half), "supports_attention_dp", None) is True for half in (scheduler, worker)):
            raise NotImplementedError(
                "The connector must declare supports_attention_dp = True, on its scheduler class and on its worker class, to be "
                "used with attention data parallelism: each rank then serves requests of its own."
            )

    def missing_layer_group_forms(self) -> list[str]:
        """The per-layer-group forms that the scheduler's class leaves at the base's default.

        Looks at the type only, and at identity with the base: a class that doesn't inherit it always passes.
        """
        missing = [name for name in _GROUPED_FORMS if self._is_base_form(name)] if self._is_leader else []
        if self.enable_attention_dp:
            return missing
        answer: list[str] = self._ranks.broadcast(missing)
        return answer

    def _is_base_form(self, name: str) -> bool:
        return getattr(type(self.scheduler), name, None) is getattr(KvCacheConnectorScheduler, name)

    def reject_flat_only_scheduler(self, num_layer_groups: int) -> None:
        """NotImplementedError where several layer groups meet a scheduler that lacks a per-layer-group form."""
        if num_layer_groups <= 1:
            return
        if missing := self.missing_layer_group_forms():
            raise NotImplementedError(
                f"This KV cache has {num_layer_groups} layer groups, and {self._scheduler_name} does not implement "
                f"{' and '.join(missing)}. A page slot is scoped to its layer group: implement both per-layer-group forms."
            )

    def warn_flat_scheduler_under_swa(self, window: int | None) -> None:
        """Say that a scheduler with flat forms will meet -1 where its one layer group has a window."""
        if window is not None and self.missing_layer_group_forms() and self._is_leader:
            _log.warning(
                "The KV connector scheduler %s takes flat block ids, and all layers attend to a window of %d tokens: "
                "blocks that left it are listed as BAD_PAGE_INDEX. Filter the lists with valid_page_slots.",
                self._scheduler_name,
                window,
            )

    @property
    def _scheduler_name(self) -> str:
        return type(self.scheduler).__qualname__ if self._is_leader else "the leader's scheduler"

    def wait_for_initialization(self) -> None:
        """Last step of bring-up; the leader's scheduler only."""
        if self._is_leader:
            self.call("scheduler", "wait_for_initialization")

    # -- prepare ------------------------------------------------------------------------------------------------------

    def should_add_sequence(self, request: Request) -> bool:
        """False after a completed asynchronous load: its pages are in place, it isn't asked again."""
        return request.request_id not in self.finished_async_loading_requests

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Query and commit in one (V1): everything that is offered is honoured."""
        if request.is_generation_only_request():
            raise RuntimeError("Connector API is not supported for generation-only requests")
        offered, is_async = self.query_num_new_matched_tokens(request, num_computed_tokens)
        self.commit_new_matched_tokens(request, offered, is_async)
        return offered

    def query_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Ask the scheduler, without any effect here.

        Raises:
            RuntimeError: The answer is asynchronous and has no tokens.
        """
        if self._is_hidden(request):
            return 0, False
        offered, is_async = self._from_leader("get_num_new_matched_tokens", request, num_computed_tokens)
        if offered == 0 and is_async:
            raise RuntimeError("load_kv_async must be False when get_num_new_matched_tokens answers 0 tokens")
        return offered, is_async

    def commit_new_matched_tokens(self, request: Request, honoured: int, is_async: bool) -> None:
        """Take ``honoured`` tokens as computed; an asynchronous load is registered even if none is."""
        if self._is_hidden(request):
            return
        self.external_loads[request.request_id] = honoured
        request.py_num_connector_matched_tokens = honoured
        if is_async:
            self.new_async_requests.loading[request.request_id] = request

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], by_layer_group: list[list[int]] | None = None
    ) -> None:
        """Tell the scheduler the pages, in the per-layer-group form if there is a list of lists. Not collective."""
        if not self._is_leader or self._is_hidden(request):
            return
        if by_layer_group:
            self.call("scheduler", "update_state_after_alloc_by_layer_group", request, by_layer_group)
        else:
            self.call("scheduler", "update_state_after_alloc", request, block_ids)

    def build_scheduler_output(self, batch: Batch, cache: PageLists) -> None:
        """Put together what the next :meth:`handle_metadata` hands over; parked requests are left out."""
        shown = batch.without_dummies() if self.enable_attention_dp else batch
        self._output = self._reports.build(shown, cache, self.new_async_requests.loading, self.external_loads)
        if self.enable_attention_dp:
            self._output.attention_dp_rank = self._ranks.rank
        self.external_loads = {}

    def report(self, batch: Batch, cache: PageLists) -> None:
        """Put together what a batch is, and hand it over at once."""
        self.build_scheduler_output(batch, cache)
        self.handle_metadata()

    def set_scheduler_output(self, output: SchedulerOutput) -> None:
        """Hand over an output that was built elsewhere."""
        self._output = output

    def cancel_load(self, request: Request, start: int, end: int) -> None:
        """Tell the scheduler, if it wants to know, that tokens ``[start, end)`` of its offer are not going to be loaded."""
        self._tell("cancel_load", request, start, end)

    def request_reset(self, request: Request) -> None:
        """Tell the scheduler, if it wants to know, that the request begins anew."""
        self._tell("request_reset", request)

    def _tell(self, method: str, request: Request, *numbers: int) -> None:
        # Neither is in the base class: both are looked for on the object (contract.md section 1.2).
        if self._is_leader and not self._is_hidden(request) and callable(getattr(self.scheduler, method, None)):
            self.call("scheduler", method, request, *numbers)

    def reset_request_state(self, request: Request) -> None:
        """Forget what was reported of a request whose allocation was destroyed. Asynchronous transfers stay as they are."""
        self._reports.reset(request.request_id)
        self.external_loads.pop(request.request_id, None)

    # -- start --------------------------------------------------------------------------------------------------------

    def handle_metadata(self) -> None:
        """Metadata from the leader to every rank's worker; nothing without a pending output."""
        if self._output is None:
            return
        metadata = self._from_leader("build_connector_meta", self._output)
        self._output = None  # only now: a build that raised keeps it
        self.call("worker", "bind_connector_meta", metadata)

    def take_scheduled_requests_pending_load(self, batch: Batch) -> None:
        """Park the requests whose asynchronous load was just committed: they leave the batch."""
        loading = self.new_async_requests.loading
        for request in batch.context:
            if request.request_id in loading:
                loading[request.request_id] = request  # the batch's object, whichever the query saw
                request.state = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        batch.chunking = [request for request in batch.chunking if request.request_id not in loading]
        batch.last_chunk = [request for request in batch.last_chunk if request.request_id not in loading]

    # -- forward ------------------------------------------------------------------------------------------------------

    def layer_pre_hook(self, layer: Any, *_: Any) -> None:
        """Before a decoder layer."""
        self.call("worker", "wait_for_layer_load", layer.layer_idx, self._current_stream())

    def layer_post_hook(self, layer: Any, *_: Any) -> None:
        """After a decoder layer."""
        self.call("worker", "save_kv_layer", layer.layer_idx, self._current_stream())

    # -- finish -------------------------------------------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: list[int], by_layer_group: list[list[int]] | None = None
    ) -> Any:
        """Announce a finished request; a true answer keeps its pages until every rank returned the id.

        Returns:
            The scheduler's answer, unchanged.
        """
        if self._is_hidden(request):
            return False
        if by_layer_group:
            answer = self._from_leader("request_finished_by_layer_group", request, by_layer_group)
        else:
            answer = self._from_leader("request_finished", request, block_ids)
        self.finished_async_loading_requests.pop(request.request_id, None)
        if self.enable_attention_dp:
            self.reset_request_state(request)
        if answer:
            self.new_async_requests.saving[request.request_id] = request
            request.state = RequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return answer

    def get_finished(self) -> list[Request]:
        """Poll the worker; an id completes once every rank has returned it.

        Returns:
            Requests whose save completed: their pages may go.

        Raises:
            KeyError: The worker returned an id that isn't pending. Ids before it in the list are lost.
        """
        announced = self.new_async_requests
        args = (list(announced.saving), list(announced.loading))
        self.pending_async_requests.take_all(announced)
        saved, loaded = self.call("worker", "get_finished", *args)
        pending, local = self.pending_async_requests, self.local_finished_async_requests
        local.saving.update(_extract(pending.saving, saved))
        local.loading.update(_extract(pending.loading, loaded))

        mine = (list(local.saving), list(local.loading))
        everywhere = [mine] if self.enable_attention_dp else self._ranks.allgather(mine)
        done_saving = set.intersection(*(set(each[0]) for each in everywhere))
        done_loading = set.intersection(*(set(each[1]) for each in everywhere))
        # Sorted, since every rank frees pages in this order, and the leader's page slots count on every rank.
        for request_id in sorted(done_loading):
            request = local.loading.pop(request_id)
            request.state = RequestState.CONTEXT_INIT
            self.finished_async_loading_requests[request_id] = request
        return [local.saving.pop(request_id) for request_id in sorted(done_saving)]

    def get_pending_transfer_requests(self) -> list[Request]:
        """Requests with an asynchronous transfer at any stage."""
        stages = (self.new_async_requests, self.pending_async_requests, self.local_finished_async_requests)
        return [request for stage in stages for table in (stage.saving, stage.loading) for request in table.values()]

    def has_pending_transfers(self, request: Request) -> bool:
        """The request has an asynchronous transfer at any stage."""
        return any(other.request_id == request.request_id for other in self.get_pending_transfer_requests())


def _extract(pending: dict[int, Request], ids: Iterable[int]) -> dict[int, Request]:
    return {request_id: pending.pop(request_id) for request_id in ids}

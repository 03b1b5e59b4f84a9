"""Drives a connector with recorded callbacks: the same requests, pages and order, without a model.

Which tokens exist, which pages a request has and when it runs is as recorded. What depends on the connector's answers is not: how
much of its offer is honoured, where a load begins, what ``get_finished`` is given. A request that is parked here and wasn't then waits
for its load in passes of its own; one that was parked then and isn't now is reported in the pass of its query.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tracekv.capture.classes import implemented_callbacks, trace
from tracekv.capture.replay import DEFAULT_BLOCK_TOKENS
from tracekv.connectors import Connector
from tracekv.contract import RequestData, SchedulerOutput
from tracekv.harness import bringup
from tracekv.harness.collectives import OneRank
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import RequestState
from tracekv.harness.stream import HostStream
from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    CancelLoadCall,
    FinishCall,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    QueryCall,
    Record,
    ReplayBuild,
    ReplayEnd,
    ReplayPrompt,
    RequestResetCall,
)
from tracekv.journal.vocabulary import Callback
from tracekv.testing.replay_caches import make_caches, registration
from tracekv.testing.replay_recording import Life, LookAhead
from tracekv.testing.replay_requests import Live, make_request
from tracekv.testing.replay_tokens import PseudoTokens

#: How long a load or a save that is under way may take.
WAIT_S = 10.0
#: Of consecutive idle polls, how many are made.
_MOST_IDLE_POLLS = 16
_PAIRS = struct.Struct("=qq")


class ReplayError(msgspec.Struct, frozen=True):
    """What a callback raised, or what the runtime would have raised at its answer."""

    life: int
    callback: str
    request_id: int | None
    error: str
    message: str


class _Manager(KvCacheConnectorManager):
    """Notes what a callback raises, by the callback's name."""

    raised: tuple[str, Exception] | None = None

    def call(self, side: Literal["scheduler", "worker"], method: str, *args: Any) -> Any:
        try:
            return super().call(side, method, *args)
        except Exception as error:
            self.raised = method, error
            raise


@dataclass
class Driver:
    """Drives one life.

    Attributes:
        most_bytes: What the caches may take.
        errors: What went wrong, in order.
        has_shared_rows: The caches were too large: all page slots lie in the same memory.
    """

    life: Life
    number: int
    tokens: PseudoTokens
    most_bytes: int
    errors: list[ReplayError] = field(default_factory=list)
    has_shared_rows: bool = False
    _ahead: LookAhead = field(init=False)
    _memory: list[Any] = field(default_factory=list, init=False)
    _manager: _Manager = field(init=False)
    _after_forward: Callable[[], None] | None = field(default=None, init=False)
    _block_tokens: int = field(default=DEFAULT_BLOCK_TOKENS, init=False)
    _groups: int = field(default=1, init=False)
    _stream: HostStream = field(default_factory=lambda: HostStream("replay"), init=False)
    _live: dict[int, Live] = field(default_factory=dict, init=False)
    _prompts: dict[int, tuple[ReplayPrompt, ReplayEnd | None]] = field(default_factory=dict, init=False)
    _early: list[Live] = field(default_factory=list, init=False)

    def drive(self, connector: Connector, after_each: Callable[[], None]) -> None:
        """Construct the pair, call it through the life, end it. ``after_each`` is called between callbacks."""
        self._ahead = self.life.look_ahead()
        if not self._bring_up(connector):
            return
        for index, record in enumerate(self.life.records):
            self._one(index, record)
            after_each()
        self._wait_until(lambda: not self._manager.get_pending_transfer_requests(), "get_finished", None)
        for half in (self._manager.scheduler, self._manager.worker):
            if callable(getattr(half, "shutdown", None)):
                self._safely("shutdown", None, half.shutdown)
        after_each()

    # -- bring-up ------------------------------------------------------------------------------------------------------

    def _bring_up(self, connector: Connector) -> bool:
        start, caches = self.life.start, make_caches(self.life, self.most_bytes)
        self._memory = caches.memory
        self.has_shared_rows = caches.has_shared_rows
        assert self.life.register is not None
        self._block_tokens = start.tokens_per_block or self.life.register.tokens_per_block or DEFAULT_BLOCK_TOKENS
        config = bringup.KvCacheConfig(
            tokens_per_block=self._block_tokens,
            enable_block_reuse=True if start.has_block_reuse is None else start.has_block_reuse,
            enable_partial_reuse=bool(start.has_partial_reuse),
            use_kv_cache_manager_v2=self.life.is_v2,
        )
        takes_layout = Callback.REGISTER_KV_CACHE_LAYOUT in implemented_callbacks(connector.worker)
        method, registered = registration(caches, takes_layout=takes_layout)
        pair = trace(connector.scheduler), trace(connector.worker)
        halves = self._safely(
            "__init__", None, lambda: bringup.construct(*pair, bringup.LlmArgs(kv_cache_config=config))
        )
        if halves is None:
            return False
        scheduler, worker = halves
        self._manager = _Manager(worker, scheduler, collectives=OneRank(pickled=True))
        self._groups = len(caches.layout.groups) if caches.layout else 1

        def register() -> bool:
            self._after_forward = bringup.forward_pass_callable(worker, self._manager.calls)
            if self.life.is_v2:
                self._manager.reject_flat_only_scheduler(self._groups)
            self._manager.call("worker", method, registered)
            self._manager.wait_for_initialization()
            return True

        return bool(self._safely(method, None, register))

    # -- the records ---------------------------------------------------------------------------------------------------

    def _one(self, index: int, record: Record) -> None:
        if isinstance(record, ReplayPrompt):
            self._prompts[record.request_id] = record, self._ahead.ends[index]
        elif isinstance(record, QueryCall):
            self._query(index, record)
        elif isinstance(record, AllocCall):
            self._alloc(index, record)
        elif isinstance(record, BuildCall):
            self._build(index, record)
        elif isinstance(record, LayerHooks):
            self._hooks(record)
        elif isinstance(record, FinishCall):
            self._finish(record)
        elif isinstance(record, FinishedCall):
            self._poll()
        elif isinstance(record, IdlePolls):
            for _ in range(min(record.count, _MOST_IDLE_POLLS)):
                self._poll()
        elif isinstance(record, CancelLoadCall):
            self._optional("cancel_load", record.request_id, record.start, record.end)
        elif isinstance(record, RequestResetCall):
            self._optional("request_reset", record.request_id)
        elif isinstance(record, Call) and record.callback == Callback.START_LOAD_KV:
            self._worker("start_load_kv", self._stream)
        elif isinstance(record, Call) and record.callback == Callback.WAIT_FOR_SAVE:
            if self._after_forward is not None:
                self._safely("forward_pass_callable", None, self._after_forward)
            self._worker("wait_for_save", self._stream)

    def _query(self, index: int, query: QueryCall) -> None:
        live = self._begin(query.request_id)
        request, live.start, live.report = live.request, query.computed_tokens, self._ahead.reports.get(index)
        request.lora_task_id, request.client_id = query.lora_id, query.client_id
        request.begin_at(query.computed_tokens, request.prompt_len - query.computed_tokens)
        answer = self._safely(
            "get_num_new_matched_tokens",
            query.request_id,
            lambda: self._manager.query_num_new_matched_tokens(request, query.computed_tokens),
        )
        offered, live.is_async = answer or (0, False)
        end = live.report.end if live.report is not None else request.prompt_len
        # Only what the recorded pass has pages for can be honoured: to the last whole block before its end (contract-v2.md 1.3).
        tokens_per_block = self._block_tokens
        most = end - 1 if end >= request.prompt_len else (end - 1) // tokens_per_block * tokens_per_block
        live.honoured = max(0, min(offered if isinstance(offered, int) else 0, most - live.start))
        request.honoured_tokens = live.honoured
        self._manager.commit_new_matched_tokens(request, live.honoured, live.is_async)
        if live.is_async:
            request.state = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        elif query.is_async and live.report is not None:
            live.is_early = True
            self._early.append(live)

    def _alloc(self, index: int, alloc: AllocCall) -> None:
        following = self.life.records[index + 1] if index + 1 < len(self.life.records) else None
        if isinstance(following, ReplayPrompt) and following.request_id == alloc.request_id:
            self._prompts[alloc.request_id] = following, self._ahead.ends[index + 1]
        live = self._live.get(alloc.request_id) or self._begin(alloc.request_id)
        flat, by_group = self._lists(alloc.pages)
        self._safely(
            "update_state_after_alloc",
            alloc.request_id,
            lambda: self._manager.update_state_after_alloc(live.request, flat, by_group),
        )

    def _build(self, index: int, build: BuildCall) -> None:
        following = self.life.records[index + 1] if index + 1 < len(self.life.records) else None
        more = following if isinstance(following, ReplayBuild) else None
        output = SchedulerOutput()
        for live in self._early:
            assert live.report is not None
            output.new_requests.append(self._report(live, live.report.build, live.report.position, None, is_new=True))
        self._early = []
        for position, request_id in enumerate(build.request_ids):
            live = self._live.get(request_id) or self._begin(request_id)
            is_first = live.report is not None and live.report.build is build
            if is_first and live.is_early:
                continue  # reported already
            if is_first and live.is_async:
                self._await_load(live)
            is_new = position < build.new_requests
            reports = output.new_requests if is_new else output.cached_requests
            reports.append(self._report(live, build, position, more, is_new=is_new))
        self._hand_over(output)

    def _report(
        self, live: Live, build: BuildCall, position: int, more: ReplayBuild | None, *, is_new: bool
    ) -> RequestData:
        count = 1
        if more is not None:
            count = more.new_tokens[position]
        elif position < len(build.prompt_tokens):
            count = build.prompt_tokens[position]
        if is_new:
            live.reported = 0
        new_tokens = live.report_more(count, self.tokens)
        computed, scheduled = build.computed_positions[position], build.scheduled_tokens[position]
        if live.report is not None and live.report.build is build:
            computed = live.start + (live.honoured if live.is_async else 0)
            scheduled = live.report.end - live.start - live.honoured
        pages: list[list[int]] = next(
            (lists for place, lists in build.pages if place == position), [[] for _ in range(self._groups)]
        )
        flat, by_group = self._lists(pages)
        hashes = next((chain for place, chain in more.block_hashes if place == position), []) if more else []
        priorities = next((given for place, given in more.priorities if place == position), None) if more else None
        return RequestData(
            request_id=live.request.request_id,
            new_tokens=new_tokens,
            new_block_ids=flat,
            computed_position=computed,
            num_scheduled_tokens=scheduled,
            block_hashes=hashes,
            priorities=priorities,
            cache_salt=live.request.cache_salt,
            new_block_ids_by_layer_group=by_group or [],
        )

    def _finish(self, finish: FinishCall) -> None:
        live = self._live.get(finish.request_id) or self._begin(finish.request_id)
        live.grow_to(len(live.tokens))
        live.request.state = RequestState.GENERATION_COMPLETE
        flat, by_group = self._lists(finish.pages)
        self._safely(
            "request_finished",
            finish.request_id,
            lambda: self._manager.request_finished(live.request, flat, by_group),
        )
        self._live.pop(finish.request_id, None)

    def _hooks(self, hooks: LayerHooks) -> None:
        """In the order in which they were entered."""
        calls = []
        for method, pairs in (("wait_for_layer_load", hooks.waits), ("save_kv_layer", hooks.saves)):
            for layer, (started, _) in enumerate(_PAIRS.iter_unpack(pairs)):
                if started:
                    calls.append((started, method, layer))
        for _, method, layer in sorted(calls):
            self._worker(method, layer, self._stream)

    # -- what they share -----------------------------------------------------------------------------------------------

    def _begin(self, request_id: int) -> Live:
        prompt, end = self._prompts.get(request_id, (None, None))
        live = self._live[request_id] = make_request(request_id, prompt, end, self.tokens)
        return live

    def _lists(self, pages: list[list[int]]) -> tuple[list[int], list[list[int]] | None]:
        pages = [list(slots) for slots in pages] or [[]]
        return (pages[0] if len(pages) == 1 else []), (pages if self.life.is_v2 else None)

    def _hand_over(self, output: SchedulerOutput) -> None:
        self._manager.set_scheduler_output(output)
        self._safely("build_connector_meta", None, self._manager.handle_metadata)

    def _await_load(self, live: Live) -> None:
        """A parked request runs when its load is over."""
        request_id = live.request.request_id
        if request_id not in self._manager.finished_async_loading_requests:
            self._hand_over(SchedulerOutput())
            self._worker("start_load_kv", self._stream)
        self._wait_until(
            lambda: request_id in self._manager.finished_async_loading_requests, "get_finished", request_id
        )

    def _wait_until(self, is_over: Callable[[], bool], callback: str, request_id: int | None) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_over():
            if time.monotonic() > deadline:
                waiting = [request.request_id for request in self._manager.get_pending_transfer_requests()]
                self.errors.append(
                    ReplayError(
                        self.number, callback, request_id, "NeverFinished", f"not returned in {WAIT_S:.0f} s: {waiting}"
                    )
                )
                return
            if not self._poll():
                return
            time.sleep(0.0005)

    def _poll(self) -> bool:
        return self._safely("get_finished", None, self._manager.get_finished) is not None

    def _worker(self, method: str, *args: Any) -> None:
        self._safely(method, None, lambda: self._manager.call("worker", method, *args))

    def _optional(self, method: str, request_id: int, *args: Any) -> None:
        live = self._live.get(request_id)
        if live is not None and callable(getattr(self._manager.scheduler, method, None)):
            self._safely(method, request_id, lambda: self._manager.call("scheduler", method, live.request, *args))

    def _safely(self, callback: str, request_id: int | None, call: Callable[[], Any]) -> Any:
        """The answer; None where the connector or the runtime's own check raised, which is noted."""
        try:
            return call()
        except Exception as error:
            manager: _Manager | None = getattr(self, "_manager", None)
            if manager is not None and manager.raised is not None and manager.raised[1] is error:
                callback = manager.raised[0]
            self.errors.append(ReplayError(self.number, callback, request_id, type(error).__name__, str(error)[:500]))
            return None

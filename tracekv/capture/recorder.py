"""One per traced instance: notes when a callback was entered and left, and writes what it carried.

Nothing in here may reach the engine: each method that runs after the inner call is an instrument, guarded as a whole; one that
fails is removed and reported once, and its callback goes on bare. Arguments are read, never kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import xxhash

from tracekv.capture import answers
from tracekv.capture.budget import HOOK_NS
from tracekv.capture.describers import plan_of
from tracekv.capture.envelope import Envelope
from tracekv.capture.hooks import hooks
from tracekv.capture.instruments import instrument
from tracekv.capture.session import Session
from tracekv.capture.tally import CallTally
from tracekv.contract import reading
from tracekv.journal.current import current
from tracekv.journal.layout import detail_of
from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CancelLoadCall,
    FinishCall,
    FinishedCall,
    ForwardCallableCall,
    GroupFacts,
    IdlePolls,
    LayerHooks,
    QueryCall,
    Record,
    RegionFacts,
    RegisterCall,
    RequestResetCall,
    TracingReduced,
)

#: Idle polls are told at least this often, so that a reader sees that the loop still turns.
_IDLE_FLUSH_NS = 1_000_000_000


class Recorder:
    """Entered and left by the wrappers of one traced instance, on the engine's thread.

    Attributes:
        removed: Names of instruments that failed.
        steps: Passes built so far (leader only).
        run_id: 16 bytes; made by the leader, learnt by the others from the first envelope.
        tokens_per_block: The engine's argument, for V1, whose tensor doesn't tell; 0 where it isn't known.
    """

    __slots__ = (
        "__weakref__",
        "_budget",
        "_engine_thread",
        "_idle",
        "_in_progress",
        "_inside",
        "_is_off",
        "_journal",
        "_session",
        "_tally",
        "removed",
        "run_id",
        "steps",
        "tokens_per_block",
    )  # fmt: skip

    def __init__(self, session: Session, run_id: bytes = b"") -> None:
        self._session = session
        self._journal = session.journal
        self._budget = session.budget
        self._tally = CallTally()
        self._is_off = False
        self._inside = session.inside
        self._in_progress = session.journal.in_progress
        self.removed: set[str] = set()
        self.steps = 0
        self.tokens_per_block = 0
        self.run_id = run_id
        self._engine_thread = 0
        self._idle: IdlePolls | None = None
        session.recorders.add(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A pickled or deeply copied instance of a traced class records nothing."""
        return type(None), ()

    def enter(self, code: int) -> int:
        """The time at which a callback of the loop is entered, or 0 where the call isn't the runtime's.

        A call made inside another callback, or on a thread that isn't the executor's, is the connector's own.
        """
        ident = get_ident()
        if self._is_off or (ident != self._engine_thread and not self._adopt(ident)):
            return 0
        return self.enter_bring_up(code)

    def enter_step(self, code: int) -> int:
        """As :meth:`enter`, for the callback with which a step begins in this process."""
        try:
            self._begin_step(perf_counter_ns())
        except Exception as error:
            self.remove("step", error)
        return self.enter(code)

    def _begin_step(self, now_ns: int) -> None:
        if "step" in self.removed:
            return
        wants_off = detail_of(self._journal.at_step(now_ns)) == "off"
        is_changed = self._budget.changes_at(now_ns)
        if is_changed:
            share, limit = round(self._budget.share * 1e6), self._budget.limit_ppm
            self._session.tell_budget(TracingReduced(now_ns, self._budget.is_reduced, share, limit))
        if is_changed or wants_off is not self._is_off:
            hooks.is_off = wants_off or self._budget.is_reduced
            if hooks.is_off:
                self.flush_hooks()
                hooks.pause()
            if wants_off is not self._is_off:
                self._is_off = wants_off
                if self._session.switches(wants_off):
                    self.write(TracingReduced(now_ns, hooks.is_off, 0, 0, wants_off))

    def enter_bring_up(self, code: int) -> int:
        """As :meth:`enter`, for the callbacks of bring-up, which may come on another thread than the loop's."""
        inside = self._inside
        ident = get_ident()
        if ident in inside:
            return 0
        inside.add(ident)
        hooks.waits = hooks.saves = None
        started = perf_counter_ns()
        self._in_progress[1] = started
        self._in_progress[0] = code
        return started

    def leave(self) -> None:
        """The callback entered last on this thread is left."""
        self._inside.discard(get_ident())
        self._in_progress[0] = 0
        hooks.resume()

    def _adopt(self, ident: int) -> bool:
        # The loop's thread is known from its first callback; the loop may move only when that thread has ended.
        if self._engine_thread and any(thread.ident == self._engine_thread for thread in threading.enumerate()):
            return False
        self._engine_thread = ident
        self._journal.claim_engine_thread()
        return True

    def remove(self, instrument: str, error: Exception) -> None:
        """Take a failed instrument out and report it once."""
        self.removed.add(instrument)
        self._session.fault(instrument, error)

    def learn_engine(self, llm_args: object) -> None:
        """Take from the engine's arguments what no callback tells."""
        try:
            self.tokens_per_block = reading.tokens_per_block(llm_args) or 0
        except Exception as error:
            self.remove("engine arguments", error)

    def enclose(self, metadata: object) -> object:
        """The leader's metadata as it travels: bare where no traced worker of this process could open an envelope."""
        return Envelope(metadata, self.run_id, self.steps) if self._session.workers else metadata

    def hand_out(self, caches: Any) -> Any:
        """What the inner connector is given where the runtime registers ``caches``: the very same object."""
        return caches

    def write(self, record: Record) -> None:
        """Append to the journal, after the idle polls and counts that came before."""
        idle, self._idle = self._idle, None
        if idle is not None:
            self._journal.write(idle)
        if self._tally and not self._budget.is_reduced:
            self._journal.write(self._tally.take(current.step, perf_counter_ns()))
        self._journal.write(record)

    def write_rest(self) -> None:
        """At the session's end: the idle polls and counts that no record came after."""
        idle, self._idle = self._idle, None
        if idle is not None:
            self._journal.write(idle)
        if self._tally:
            self._journal.write(self._tally.take(current.step, perf_counter_ns()))

    # -- instruments: (code, started, ended, facts of the callback) ------------------------------------------------

    @instrument
    def simple(self, code: int, started: int, ended: int) -> None:
        """A callback with nothing to add."""
        self.write(Call(code, started, ended, current.step, None))

    @instrument
    def raised(self, code: int, started: int, ended: int, error: BaseException) -> None:
        """The inner connector raised."""
        self.flush_hooks()
        self.write(Call(code, started, ended, current.step, type(error).__qualname__))

    @instrument
    def query(self, code: int, started: int, ended: int, request: Any, computed: int, answer: Any) -> None:
        """``get_num_new_matched_tokens``."""
        offered, is_async, odd = answers.offer(answer)
        salt = reading.cache_salt(request)
        try:
            images = reading.multimodal_digest(request)
        except reading.UnreadableRequest:
            images = "unreadable"
        self.write(
            QueryCall(
                code, started, ended, current.step, None,
                request_id=request.request_id,
                client_id=reading.client_id(request),
                prompt_tokens=reading.prompt_length(request),
                computed_tokens=computed,
                offered_tokens=offered,
                is_async=is_async,
                answer=odd,
                salt_digest=None if salt is None else xxhash.xxh3_64_digest(salt.encode()),
                multimodal_digest=None if images is None else xxhash.xxh3_64_digest(images.encode()),
                lora_id=reading.lora_id(request),
            )
        )  # fmt: skip

    @instrument
    def alloc(self, code: int, started: int, ended: int, request: Any, pages: list[list[int]]) -> None:
        """``update_state_after_alloc`` and its per-layer-group form."""
        honoured, is_never_asked = reading.honoured_tokens(request), reading.is_never_asked(request)
        self.write(
            AllocCall(code, started, ended, current.step, None, request.request_id, honoured, pages, is_never_asked)
        )

    @instrument
    def build(self, code: int, started: int, ended: int, output: Any, metadata: object) -> None:
        """``build_connector_meta``; the step is the one that begins with it."""
        new = output.new_requests
        requests = [*new, *output.cached_requests]
        # Comprehensions throughout, which newer Pythons run in place: a step has hundreds of decoding requests.
        growing = [
            place for place, data in enumerate(requests) if data.new_block_ids or data.new_block_ids_by_layer_group
        ]
        pages = [(place, ids) for place in growing if any(ids := reading.new_block_ids(requests[place]))]
        self.write(
            BuildCall(
                code, started, ended, current.step, None,
                new_requests=len(new),
                request_ids=[data.request_id for data in requests],
                computed_positions=[data.computed_position for data in requests],
                scheduled_tokens=[data.num_scheduled_tokens for data in requests],
                prompt_tokens=[len(data.new_tokens) for data in new],
                pages=pages,
                has_metadata=answers.has_content(metadata),
            )
        )  # fmt: skip
        for planned in plan_of(metadata, self._session.page_bytes, current.step, started, ended):
            self.write(planned)

    @instrument
    def finish(self, code: int, started: int, ended: int, request: Any, pages: list[list[int]], answer: Any) -> None:
        """``request_finished`` and its per-layer-group form."""
        odd = None if isinstance(answer, bool) else type(answer).__name__
        record = FinishCall(code, started, ended, current.step, None, request.request_id, bool(answer), odd, pages)
        self.write(record)

    @instrument
    def bind(self, code: int, started: int, ended: int, envelope: Envelope | None) -> None:
        """``bind_connector_meta``."""
        if envelope is not None and envelope.run_id != self.run_id:
            self.run_id = envelope.run_id
            self._session.join_run(envelope.run_id)
        size, digest = (envelope.nbytes, envelope.digest) if envelope else (None, None)
        self.write(BindCall(code, started, ended, current.step, None, envelope is not None, size, digest))

    @instrument
    def register(
        self, code: int, started: int, ended: int, view: Callable[[Any], reading.LayoutView], caches: Any
    ) -> None:
        """``register_kv_caches`` and ``register_kv_cache_layout``."""
        layout = view(caches)
        layers = [layer for group in layout.groups for layer in group.layer_ids]
        hooks.reach(max(layers, default=-1) + 1)
        groups = [
            GroupFacts(
                group.layer_group_id, group.window_size, list(group.layer_ids), group.num_slots, group.bytes_per_page,
                [RegionFacts(region.size, region.stride, region.num_slots) for region in group.regions],
            )
            for group in layout.groups
        ]  # fmt: skip
        self._session.page_bytes = {group.layer_group_id: group.bytes_per_page for group in layout.groups}
        block = layout.tokens_per_block or self.tokens_per_block
        self.write(RegisterCall(code, started, ended, current.step, None, block, layout.dtype, groups))

    @instrument
    def forward_callable(self, code: int, started: int, ended: int, given: object) -> None:
        """``register_forward_pass_callable``."""
        self.write(ForwardCallableCall(code, started, ended, current.step, None, bool(given)))

    @instrument
    def end_pass(self, code: int, started: int, ended: int) -> None:
        """``wait_for_save``, which closes the pass's layer hooks."""
        self.flush_hooks()
        self.write(Call(code, started, ended, current.step, None))

    @instrument
    def cancel_load(self, code: int, started: int, ended: int, request: Any, start: int, end: int) -> None:
        """``cancel_load`` of newer runtimes."""
        self.write(CancelLoadCall(code, started, ended, current.step, None, answers.request_id(request), start, end))

    @instrument
    def request_reset(self, code: int, started: int, ended: int, request: Any) -> None:
        """``request_reset`` of newer runtimes."""
        self.write(RequestResetCall(code, started, ended, current.step, None, answers.request_id(request)))

    @instrument
    def finished(self, code: int, started: int, ended: int, saving: list[int], loading: list[int], answer: Any) -> None:
        """``get_finished`` that was given ids or returned some."""
        saved, loaded, odd = answers.finished_ids(answer)
        self.write(FinishedCall(code, started, ended, current.step, None, saving, loading, saved, loaded, odd))

    @instrument
    def idle_poll(self, code: int, started: int, ended: int) -> None:
        """``get_finished`` with nothing in and nothing out: summed up, written with the next record or after a second."""
        took = ended - started
        idle = self._idle
        if idle is None:
            self._idle = IdlePolls(current.step, 1, took, took, started, ended)
            return
        idle.count += 1
        idle.sum_ns += took
        idle.max_ns = max(idle.max_ns, took)
        idle.last_ended_ns = ended
        if ended - idle.first_started_ns > _IDLE_FLUSH_NS:
            self._idle = None
            self._journal.write(idle)

    # -- when tracing costs too much ---------------------------------------------------------------------------------

    def count(self, code: int, started: int, ended: int) -> None:
        """Count a call instead of recording it."""
        if self._tally.add(code, started, ended):
            self._journal.write(self._tally.take(current.step, ended))

    # -- what several calls share ----------------------------------------------------------------------------------

    def flush_hooks(self) -> None:
        """Write the layer hooks since the last pass and clear their slots."""
        waits_used, saves_used = hooks.used
        none = hooks.cleared
        # Compared as bytes: a memoryview compares element by element.
        waits, saves = waits_used.tobytes(), saves_used.tobytes()
        if waits != none or saves != none:
            waits_used[:] = none
            saves_used[:] = none
            self.write(LayerHooks(current.step, waits, saves, True))
            self._budget.spent_ns += len(none) // 8 * HOOK_NS

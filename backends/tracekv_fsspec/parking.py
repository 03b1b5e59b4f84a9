"""Parked requests (``OFFER=async``): promised before their bytes are in memory, held by the runtime until they are.

A promise of this kind can't be taken back under TensorRT-LLM, so staging is tried again until it works or its time is up; the ranks
read what became of it from the arena's table of parked tickets. Pins are kept until the request is reported again; for the case that
it never is (it was cancelled, and that is never announced), they are given back some time after its ticket was staged.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from tracekv.journal.vocabulary import MissReason
from tracekv_fsspec.arena import Arena
from tracekv_fsspec.arena_tables import Parked, ParkedTable
from tracekv_fsspec.reader import Priority, Reader
from tracekv_fsspec.tickets import Ticket

_log = logging.getLogger("tracekv.fsspec")

#: Pins of a staged ticket whose request isn't reported again within this time are given back; it is then staged anew.
PINS_S = 60.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(eq=False)
class _Run:
    """Blocks of a parked request.

    Attributes:
        number: Of its ticket, in the table.
        reason: Why the last try failed.
        due: When its next try, or the end of its pins, is.
    """

    number: int
    ticket: Ticket
    deadline: float
    due: float
    is_staged: bool = False
    pause_s: float = _FIRST_PAUSE_S
    reason: MissReason | None = None


class Parking:
    """Stages what parked requests were promised. Called on the executor's thread; works on a thread of its own.

    Args:
        seconds: How long one is tried.
        on_retry: Called before another try: what is gone may have come back elsewhere.
    """

    def __init__(
        self, reader: Reader, arena: Arena, table: ParkedTable, seconds: float, on_retry: Callable[[], None]
    ) -> None:
        self._reader = reader
        self._arena = arena
        self._table = table
        self._seconds = seconds
        self._on_retry = on_retry
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def park(self, ticket: Ticket) -> int | None:
        """Take over the ticket of a run that is going to be promised whole, and see to it that it is staged.

        Returns:
            Its number in the table; None where it can't be promised: parked runs would take more than half of the arena.
        """
        with self._lock:
            parked_blocks = sum(len(run.ticket.keys) for run in self._runs.values())
            if parked_blocks + len(ticket.keys) > self._arena.slots_per_shard // 2:
                return None
            number = self._table.open()
            if number is None:
                return None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tracekv-parking", daemon=True)
                self._thread.start()
            deadline = monotonic() + self._seconds
            self._runs[number] = _Run(number, ticket, deadline, deadline)
        self._reader.when_done(ticket, lambda: self._events.put(number))
        return number

    def claim(self, number: int) -> Ticket | None:
        """The ticket of a request that is reported again, with the pins of its whole run; None where it has to be staged anew."""
        with self._lock:
            run = self._runs.pop(number, None)
            if run is None:
                return None
            if not run.is_staged:  # the runtime didn't wait for it
                self._table.set(number, Parked.FORGOTTEN)
                self._reader.cancel(run.ticket)
                return None
            self._table.set(number, Parked.FORGOTTEN)
            return run.ticket

    def forget(self, number: int) -> None:
        """Nobody will ask for a parked run."""
        with self._lock:
            run = self._runs.pop(number, None)
            if run is not None:
                self._table.set(number, Parked.FORGOTTEN)
                self._give_up(run)

    def close(self, seconds: float) -> None:
        """Stop; what is pending has failed."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(seconds)
        with self._lock:
            for run in self._runs.values():
                if not run.is_staged:
                    self._table.set(run.number, Parked.FAILED)

    def _run(self) -> None:
        while True:
            try:
                number = self._events.get(timeout=self._until_due())
            except queue.Empty:
                number = -1
            if number is None:
                return
            try:
                with self._lock:
                    self._look_at(number)
            except Exception:
                _log.exception("tracekv: staging for a parked request failed in an unforeseen way")

    def _until_due(self) -> float | None:
        with self._lock:
            due = min((run.due for run in self._runs.values()), default=None)
        return None if due is None else max(0.001, due - monotonic())

    def _look_at(self, number: int) -> None:
        now = monotonic()
        for run in list(self._runs.values()):
            if run.is_staged:
                if run.due <= now:
                    del self._runs[run.number]
                    self._give_up(run)
            elif run.ticket.outstanding:
                run.due = max(run.due, now + _LONGEST_PAUSE_S)  # the reader's own deadlines end it
            elif run.ticket.staged_blocks() == len(run.ticket.keys):
                self._reader.take(run.ticket)
                run.is_staged = True
                run.due = now + PINS_S
                self._table.set(run.number, Parked.STAGED)
            elif run.number == number and run.due > now and run.reason is None:
                self._plan_retry(run, now)
            elif run.due <= now:
                self._retry(run, now)

    def _plan_retry(self, run: _Run, now: float) -> None:
        run.reason = run.ticket.reason()
        run.due = min(now + run.pause_s, run.deadline)
        run.pause_s = min(_LONGEST_PAUSE_S, run.pause_s * 2)
        self._on_retry()

    def _retry(self, run: _Run, now: float) -> None:
        if now >= run.deadline:
            del self._runs[run.number]
            self._table.set(run.number, Parked.FAILED)
            self._give_up(run)
            _log.error(
                "tracekv: blocks that were promised to parked request %s can't be had (%s) after %.0f s of trying",
                run.ticket.request_id,
                run.reason.value if run.reason else "unknown",
                self._seconds,
            )
            return
        before, run.reason = run.ticket, None
        # Staged anew before the old pins go, so that nothing of it is evicted in between.
        run.ticket = self._reader.stage(
            before.keys,
            before.start,
            request_id=before.request_id,
            priority=Priority.WAITED,
            skipped=before.skipped,
        )
        run.due = run.deadline
        self._reader.leave(before)
        self._reader.when_done(run.ticket, lambda: self._events.put(run.number))

    def _give_up(self, run: _Run) -> None:
        if not run.is_staged:
            self._reader.cancel(run.ticket)
            return
        for shard, numbers in run.ticket.pinned(run.ticket.start, run.ticket.start + run.ticket.taken).items():
            self._arena.unpin_run(shard, numbers)

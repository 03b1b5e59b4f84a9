"""Attention data parallelism: no rank computes without the others, and none of them fails or waits alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tracekv.harness.cache import PagedCache
from tracekv.harness.collectives import Collectives
from tracekv.harness.ending import Requests
from tracekv.harness.requests import Batch, Request, RequestState

_log = logging.getLogger("tracekv.harness")

_POLL_S = 0.001
_TIMED_OUT = "Timed out"


@dataclass(frozen=True)
class Deadlines:
    """How long ranks of attention data parallelism wait for the connector's transfers.

    Attributes:
        transfer_s: For a transfer, from the pass on in which it was begun.
        grace_s: For one whose request was cancelled, and for all of them once the engine is to shut down, from then on; never
            longer than ``transfer_s`` gives it.
        clock: Seconds, on a clock that doesn't go back.

    Source: contract.md sections 1.5, 1.6 and 7 (that there are deadlines, and what ends a wait); a cancelled transfer's second of
    grace is in upstream's tests of attention data parallelism (#19164, #19369). The length of ``transfer_s`` is a guess.
    """

    transfer_s: float = 60.0
    grace_s: float = 1.0
    clock: Callable[[], float] = time.monotonic


class DataParallelPass:
    """What ranks with requests of their own agree on in a pass.

    A rank without a batch computes a row of no request, for which it needs a page. Where parking has emptied its batch and there
    is none, it polls ``get_finished`` inside the pass until one of the parked loads is done; the others wait meanwhile.

    A transfer that isn't done in time, or a poll or a start that raises, ends every rank. Nothing is given back then: pages with
    a copy under way stay their request's.

    Args:
        ranks: How the ranks talk; every rank enters each call.
        cache: Whose pages a padding row needs.
        requests: Polled; what is cancelled, and whether the engine is to shut down, is read from them.
        deadlines: How long transfers may take.
        span_passes: A transfer's time goes on from pass to pass, saves included; see :class:`RuntimeVersion`.

    Source: contract.md section 1.6 (the ADP branch); which rank polls, and that only it does, is inferred.
    """

    def __init__(
        self,
        ranks: Collectives,
        cache: PagedCache,
        requests: Requests,
        deadlines: Deadlines | None = None,
        *,
        span_passes: bool = True,
    ) -> None:
        self._ranks = ranks
        self._cache = cache
        self._requests = requests
        self._span_passes = span_passes
        self._due = _DueTimes(deadlines or Deadlines())

    def anyone(self, has: bool) -> bool:
        """Whether any rank has it."""
        return any(self._ranks.allgather(has))

    def may_run(self, batch: Batch, *, waits: bool) -> bool:
        """Whether the ranks run a pass: some rank has a batch, and each has one or can pad.

        Args:
            batch: This rank's.
            waits: A transfer, or a token in flight, may give it a page.

        Raises:
            RuntimeError: On every rank, if one can't pad and that won't change.
        """
        states = self._ranks.allgather((bool(batch), bool(batch) or self._can_pad(), waits))
        if not any(has for has, _, _ in states):
            return False
        blocked = [rank for rank, (_, can, _) in enumerate(states) if not can]
        if any(not states[rank][2] for rank in blocked):
            raise RuntimeError(
                f"tracekv: rank {blocked[0]} has neither a batch nor a page to pad one with; raise num_blocks"
            )
        return not blocked

    def start(self, batch: Batch, parked: list[Request], load: Callable[[], None], report: Callable[[], None]) -> None:
        """Start the loads of a pass, and wait where that leaves a rank with nothing to compute.

        Args:
            batch: What parking has left; gets back what was loaded meanwhile, its pages as they are. A request that was cancelled
                meanwhile is computed all the same: it ends where cancelled ones do, at the end of the pass.
            parked: What parking took, in the batch's order.
            load: ``start_load_kv``.
            report: Hands the connector the metadata of the batch as it is now.

        Raises:
            RuntimeError: On every rank, if one of them failed here or waited too long.
        """
        error = _attempt(load)
        while True:
            is_blocked = not batch and not self._can_pad()
            if not self._agree(is_blocked, error):
                break
            if not is_blocked:
                continue  # it waits in the next vote
            error = _attempt(self._requests.poll)
            batch.chunking, batch.last_chunk = [], []
            for request in parked:
                if request.state is RequestState.CONTEXT_INIT:
                    batch.add_context(request)
            if batch and error is None:
                error = _attempt(report) or _attempt(load)
            elif error is None and (error := self._overdue()) is None:
                time.sleep(_POLL_S)
        if not self._span_passes:
            self._due.forget()

    def poll(self) -> None:
        """``get_finished``; then the ranks tell each other what failed, or isn't done in time.

        Raises:
            RuntimeError: On every rank, if one of them has something to tell.
        """
        if self._requests.manager is None or not self._span_passes:
            self._requests.poll()
        else:
            self._agree(False, _attempt(self._requests.poll) or self._overdue())

    def _agree(self, is_blocked: bool, error: Exception | None) -> bool:
        """Whether any rank is blocked; what one of them failed with, all fail with."""
        mine = (is_blocked, None if error is None else f"{type(error).__name__}: {error}", self._requests.is_closing)
        votes = self._ranks.allgather(mine)
        failed = next((told for _, told, _ in votes if told is not None), None)
        if failed is not None:
            raise RuntimeError(f"tracekv: KV connector failed: {failed}") from error
        closing = any(is_closing for _, _, is_closing in votes)
        self._due.note(self._pending, "Shutdown requested" if closing else None, self._requests.is_to_be_cancelled)
        return any(blocked for blocked, _, _ in votes)

    def _overdue(self) -> TimeoutError | None:
        return self._due.overdue(self._pending)

    @property
    def _pending(self) -> list[Request]:
        manager = self._requests.manager
        return manager.get_pending_transfer_requests() if manager is not None else []

    def _can_pad(self) -> bool:
        return all(pool.available for pool in self._cache.pools)


class _Due(NamedTuple):
    at: float
    allowed_s: float
    why: str


class _DueTimes:
    """When each transfer under way has to be done, how long it had for it, and what began that time."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._due: dict[int, _Due] = {}

    def note(self, pending: Iterable[Request], ends_all: str | None, ends: Callable[[Request], bool]) -> None:
        """Take in what is under way: a new transfer gets its time, and one that is to end has only the grace left."""
        now, allowed = self._deadlines.clock(), self._deadlines
        before, self._due = self._due, {}
        for request in pending:
            due = before.get(request.request_id) or _Due(now + allowed.transfer_s, allowed.transfer_s, _TIMED_OUT)
            why = ends_all or ("Cancellation requested" if ends(request) else None)
            if why is not None and due.why == _TIMED_OUT and now + allowed.grace_s < due.at:
                due = _Due(now + allowed.grace_s, allowed.grace_s, why)
            self._due[request.request_id] = due

    def overdue(self, pending: Iterable[Request]) -> TimeoutError | None:
        """What to fail with, if one of these should be done by now."""
        now = self._deadlines.clock()
        for request in pending:
            due = self._due.get(request.request_id)
            if due is not None and now > due.at:
                return TimeoutError(
                    f"{due.why}: get_finished has not returned request {request.request_id} in {due.allowed_s:g} s"
                )
        return None

    def forget(self) -> None:
        """The time of what is under way begins anew."""
        self._due = {}


def _attempt(step: Callable[[], None]) -> Exception | None:
    """The error that a step ends with; it is told to the other ranks, and raised on all of them."""
    try:
        step()
    except Exception as error:
        _log.exception("tracekv: a rank of attention data parallelism failed; the others are told")
        return error
    return None

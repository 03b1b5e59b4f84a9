"""Attention data parallelism: no rank computes without the others, and none of them fails or waits alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tracekv.harness.cache import PagedCache
from tracekv.harness.collectives import Collectives
from tracekv.harness.ending import Requests
from tracekv.harness.requests import Batch, Request, RequestState

_log = logging.getLogger("tracekv.harness")

_POLL_S = 0.001


class DataParallelPass:
    """What ranks with requests of their own agree on in a pass.

    A rank without a batch computes a row of no request, for which it needs a page. Where parking has emptied its batch and there
    is none, it polls ``get_finished`` inside the pass until one of the parked loads is done; the others wait meanwhile.

    Args:
        ranks: How the ranks talk; every rank enters each call.
        cache: Whose pages a padding row needs.
        requests: Polled.
        load_timeout_s: Longest wait for a load inside a pass.

    Source: contract.md section 1.6 (the ADP branch); which rank polls, and that only it does, is inferred. Upstream's longer
    deadlines, across passes and for cancelled requests, are not here.
    """

    def __init__(self, ranks: Collectives, cache: PagedCache, requests: Requests, *, load_timeout_s: float) -> None:
        self._ranks = ranks
        self._cache = cache
        self._requests = requests
        self._load_timeout_s = load_timeout_s

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
            batch: What parking has left; gets back what was loaded meanwhile, its pages as they are.
            parked: What parking took, in the batch's order.
            load: ``start_load_kv``.
            report: Hands the connector the metadata of the batch as it is now.

        Raises:
            RuntimeError: On every rank, if one of them failed here or waited too long.
        """
        deadline = time.monotonic() + self._load_timeout_s
        error = _attempt(load)
        while True:
            is_blocked = not batch and not self._can_pad()
            votes = self._ranks.allgather((is_blocked, None if error is None else f"{type(error).__name__}: {error}"))
            failed = next((told for _, told in votes if told is not None), None)
            if failed is not None:
                raise RuntimeError(f"tracekv: KV connector failed: {failed}") from error
            if not any(blocked for blocked, _ in votes):
                return
            if not is_blocked:
                continue  # it waits in the next vote
            error = _attempt(self._requests.poll)
            batch.chunking, batch.last_chunk = [], []
            for request in parked:
                if request.state is RequestState.CONTEXT_INIT:
                    batch.add_context(request)
            if batch and error is None:
                error = _attempt(report) or _attempt(load)
            elif error is None and time.monotonic() > deadline:
                error = TimeoutError(
                    f"Timed out: no load was reported done in {self._load_timeout_s:g} s, and there is no page to pad a pass with"
                )
            elif error is None:
                time.sleep(_POLL_S)

    def _can_pad(self) -> bool:
        return all(pool.available for pool in self._cache.pools)


def _attempt(step: Callable[[], None]) -> Exception | None:
    """The error that a step ends with; it is told to the other ranks, and raised on all of them."""
    try:
        step()
    except Exception as error:
        _log.exception("tracekv: a rank of attention data parallelism failed; the others are told")
        return error
    return None

"""A worker's side of parked requests: when their blocks are in the arena, this rank says so. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from tracekv_fsspec.arena_tables import TICKETS, Parked
from tracekv_fsspec.worker_arena import WorkerArena


class ParkedLoadFailed(RuntimeError):
    """Blocks that were promised to a parked request can't be had. The engine counts them as computed, so it must not go on."""


class ParkedRequests:
    """Requests that are held until their blocks are staged. Called on the executor's thread.

    No page is touched for them here: a request that is let go is reported again, and then loaded like any other.
    """

    def __init__(self, arena: WorkerArena) -> None:
        self._arena = arena
        self._tickets: dict[int, int] = {}
        self._held: set[int] = set()

    def named(self, parked: Iterable[tuple[int, int]]) -> None:
        """The pass's metadata names requests and their tickets. Most of them will be held; one that isn't is forgotten in time."""
        for request_id, ticket in parked:
            self._tickets.pop(request_id, None)
            self._tickets[request_id] = ticket
        while len(self._tickets) > TICKETS:
            del self._tickets[next(iter(self._tickets))]

    def finished(self, started: Iterable[int]) -> list[int]:
        """Which of the held requests can go on; ``started`` are held from now on.

        One whose ticket is forgotten goes on, too: its loads are planned when it is reported, or refused there.

        Raises:
            ParkedLoadFailed: Staging was tried again and again, in vain.
        """
        self._held.update(started)
        if not self._held:
            return []
        staged = []
        for request_id in sorted(self._held):
            ticket = self._tickets.get(request_id)
            state = Parked.FORGOTTEN if ticket is None else self._arena.parked(ticket)
            if state is Parked.FAILED:
                raise ParkedLoadFailed(
                    f"tracekv: blocks that were promised to request {request_id} can't be had from the store any more. They count as "
                    "computed, and TensorRT-LLM can't be told otherwise, so going on would serve wrong KV. Where that must not "
                    "stop the engine, set TRACEKV_FSSPEC__OFFER=staged: it promises only what is verified in host memory."
                )
            if state is not Parked.PENDING:
                staged.append(request_id)
                self._held.discard(request_id)
                self._tickets.pop(request_id, None)
        return staged

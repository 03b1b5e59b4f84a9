"""How the scheduler and the worker of one process find each other.

The runtime constructs both apart from each other and passes nothing between them but metadata. A worker takes a :class:`Seat`
when it is constructed; the scheduler looks for its seat at ``wait_for_initialization``, the last step of bring-up, when the worker
knows its caches. They belong together if they were given the same ``llm_args`` object. Where that tells nothing (None, or a copy), the
scheduler takes the seat whose caches were registered last and that no other scheduler has; so several engines in one process are
brought up one after the other, or given ``llm_args`` of their own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

from tracekv_fsspec.node import Node
from tracekv_fsspec.stager import Stager
from tracekv_fsspec.worker_arena import WorkerArena


class Seat:
    """A worker of this process.

    Attributes:
        node: The engine's ranks, once they met.
        arena: This worker's side of their arena.
        stager: The leader's, once its scheduler has found this seat.
    """

    def __init__(self, llm_args: Any) -> None:
        self.llm_args = llm_args
        self.node: Node | None = None
        self.arena: WorkerArena | None = None
        self.stager: Stager | None = None
        self.registered = 0
        self.is_taken = False
        with _lock:
            _seats.add(self)

    def register(self, node: Node) -> None:
        """The worker has met the other ranks."""
        with _lock:
            self.node = node
            self.arena = WorkerArena(node.file, node.geometry, node.rank)
            self.registered = next(_order)

    def lead(self, stager: Stager) -> None:
        """The scheduler of this process has its stager: copies that end here are taken up at once."""
        self.stager = stager
        if self.arena is not None:
            self.arena.ended = stager.copies.own_ended


_lock = threading.Lock()
_order = itertools.count(1)
_seats: weakref.WeakSet[Seat] = weakref.WeakSet()


def take_seat(llm_args: Any) -> Seat | None:
    """The seat of a scheduler's own worker, which is the scheduler's from now on; None where no worker has caches yet."""
    with _lock:
        ready = sorted(
            (seat for seat in _seats if seat.node is not None and not seat.is_taken), key=lambda seat: seat.registered
        )
        own = [seat for seat in ready if llm_args is not None and seat.llm_args is llm_args]
        chosen = (own or ready)[-1:]
        for seat in chosen:
            seat.is_taken = True
        return chosen[0] if chosen else None

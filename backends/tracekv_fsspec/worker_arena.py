"""A rank's side of the arena: where the slots named in the metadata lie, and the saying that their copies are over. No torch."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tracekv_fsspec.arena_file import ArenaFile
from tracekv_fsspec.arena_tables import Geometry, Kind, Parked, StaleSlot
from tracekv_fsspec.index import Shard

_log = logging.getLogger("tracekv.fsspec")


class WorkerArena:
    """The node's arena as a worker sees it. Called on the executor's thread.

    Each step is announced with ``*_begun`` before the first of its copies is issued, if it has any; one with copies, be they of
    other ranks only, is told to be over with ``*_done`` once the last one is issued. What was announced isn't given to another block
    before that.

    Args:
        file: This process's map of the arena.
        rank: Whose slots this worker copies.

    Attributes:
        buffer: The whole file; what :meth:`extent` answers are offsets in it.
        ended: Called whenever this rank's copies are over, from any thread; the leader's process sets it, others are looked at.
    """

    def __init__(self, file: ArenaFile, geometry: Geometry, rank: int) -> None:
        self._file = file
        self._table = geometry.ranks(file.buffer)[rank]
        self._parked = geometry.parked(file.buffer)
        self._places = {
            shard: (*geometry.place(shard), geometry.generations(file.buffer, shard))
            for shard in geometry.page_bytes
            if shard.rank == rank
        }
        self.buffer = file.buffer
        self.ended: Callable[[], None] | None = None
        self._events: queue.SimpleQueue[tuple[Any, Kind, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def extent(self, shard: Shard, number: int, generation: int) -> tuple[int, int]:
        """Where a slot of this rank lies in :attr:`buffer`, padding included.

        Raises:
            StaleSlot: The slot belongs to another block by now.
        """
        base, stride, generations = self._places[shard]
        if generations[number] != generation:
            raise StaleSlot(
                f"tracekv: slot {number} of {shard} is in its generation {generations[number]}, the pass names {generation}"
            )
        start = base + number * stride
        return start, start + stride

    def starts(self, shard: Shard, numbers: Sequence[int], generations: Sequence[int]) -> tuple[list[int], int]:
        """:meth:`extent` for several slots: where each begins, and their bytes with padding. A load has thousands."""
        base, stride, current = self._places[shard]
        if [current[number] for number in numbers] != generations:
            for number, generation in zip(numbers, generations, strict=True):
                self.extent(shard, number, generation)  # says which
        return [base + number * stride for number in numbers], stride

    def loads_begun(self, step: int) -> None:
        """The step's loads are issued from now on."""
        self._table.begin(Kind.LOADS, step)

    def saves_begun(self, step: int) -> None:
        """The step's saves are issued from now on."""
        self._table.begin(Kind.SAVES, step)

    def loads_done(self, step: int, event: Any = None) -> None:
        """All loads of the step are issued; they are over with ``event`` (anything with ``synchronize()``), or are by now."""
        self._done(Kind.LOADS, step, event)

    def saves_done(self, step: int, event: Any = None) -> None:
        """All saves of the step are issued; they are over with ``event``, or are by now."""
        self._done(Kind.SAVES, step, event)

    def parked(self, ticket_number: int) -> Parked:
        """What became of a parked request's ticket."""
        return self._parked.state(ticket_number)

    def close(self, seconds: float) -> None:
        """Wait for the copies' events, for at most so long. No more calls."""
        if self._thread is not None:
            self._events.put(None)
            self._thread.join(seconds)

    def _done(self, kind: Kind, step: int, event: Any) -> None:
        if event is None:
            self._end(kind, step)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tracekv-copied", daemon=True)
            self._thread.start()
        self._events.put((event, kind, step))

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            event, kind, step = item
            has_failed = False
            try:
                event.synchronize()
            except Exception:
                # The copies' fate is unknown, so their slots are never used again: memory is lost, not correctness.
                _log.exception("tracekv: the event of a copy failed; its slots are left unused")
                has_failed = True
            try:
                self._end(kind, step, failed=has_failed)
            except Exception:
                _log.exception("tracekv: what was copied can't be taken up")

    def _end(self, kind: Kind, step: int, *, failed: bool = False) -> None:
        self._table.end(kind, step, failed=failed)
        if self.ended is not None:
            self.ended()

"""Slots that a pass's metadata names, until the copies between them and the pages are over.

The worker says that it has issued a pass's copies and gives an event that covers them; a thread waits for the event and only then are
loaded slots unpinned and saved slots submitted. What a pass named and no worker took up (the forward raised, the batch was
emptied) is given back when the next pass is planned.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tracekv_fsspec.arena import Slot
from tracekv_fsspec.writer import SaveBlock

_log = logging.getLogger("tracekv.fsspec")


@dataclass
class _Pass:
    """What one pass's metadata named and nobody has taken up yet."""

    loads: list[Slot] = field(default_factory=list)
    saves: list[SaveBlock] = field(default_factory=list)


class Copies:
    """The books of copies in flight.

    Args:
        loaded: Called with slots whose bytes are in their pages; from the thread, or from the caller's where there is no event.
        saved: Called with blocks whose bytes are in their slots.
        lost: Called with blocks that no worker copied.
    """

    def __init__(
        self,
        loaded: Callable[[Sequence[Slot]], None],
        saved: Callable[[Sequence[SaveBlock]], None],
        lost: Callable[[Sequence[SaveBlock]], None],
    ) -> None:
        self._loaded = loaded
        self._saved = saved
        self._lost = lost
        self._passes: dict[int, _Pass] = {}
        self._changed = threading.Condition()
        self._unfinished = 0
        self._events: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tracekv-copies", daemon=True)
        self._thread.start()

    def plan(self, step: int, loads: Sequence[Slot], saves: Sequence[SaveBlock]) -> None:
        """Note what the metadata of pass ``step`` names. What earlier passes left behind has to be :meth:`expire` d before."""
        with self._changed:
            self._passes[step] = _Pass(list(loads), list(saves))

    def expire(self) -> None:
        """Give back what no worker has taken up."""
        with self._changed:
            expired, self._passes = list(self._passes.values()), {}
        for left in expired:
            if left.loads:
                self._loaded(left.loads)
            if left.saves:
                self._lost(left.saves)

    def loads_issued(self, step: int, event: Any) -> None:
        """The worker has issued this pass's loads; ``event`` (or None) is done when they are."""
        with self._changed:
            left = self._passes.get(step)
            slots = left.loads if left else []
            if left:
                left.loads = []
        if slots:
            self._after(event, lambda: self._loaded(slots))

    def saves_issued(self, step: int, event: Any) -> None:
        """The worker has issued this pass's saves; ``event`` (or None) is done when they are."""
        with self._changed:
            left = self._passes.get(step)
            blocks = left.saves if left else []
            if left:
                left.saves = []
        if blocks:
            self._after(event, lambda: self._saved(blocks))

    def wait(self, seconds: float) -> bool:
        """Wait until every issued copy is over; False if that took too long."""
        deadline = monotonic() + seconds
        with self._changed:
            while self._unfinished:
                left = deadline - monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self, seconds: float) -> None:
        """Give back what is left and stop."""
        self.expire()
        self.wait(seconds)
        self._events.put(None)
        self._thread.join(seconds)

    def _after(self, event: Any, then: Callable[[], None]) -> None:
        if event is None:  # copies on the CPU are over when they are issued
            then()
            return
        with self._changed:
            self._unfinished += 1
        self._events.put((event, then))

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            event, then = item
            try:
                event.synchronize()
                then()
            except Exception:
                # The copies' fate is unknown, so their slots are never used again: memory is lost, not correctness.
                _log.exception("tracekv: the event of a copy failed; its slots are left unused")
            finally:
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()

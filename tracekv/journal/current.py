"""The journal of this process, and the step it is in. Set by capture; read by whoever reports."""

from __future__ import annotations

from typing import Protocol

from tracekv.journal.records import Record


class Journal(Protocol):
    """Where records go. ``write`` may be called from any thread and never blocks on I/O.

    Attributes:
        waits, saves: float64 slots for the per-layer hooks of the pass in progress: (started, ended) at 2 x layer, in seconds of
            ``time.perf_counter``, which is cheaper to take and to store than an int.
        in_progress: ``(callback, since_ns)`` of the callback entered and not left; callback 0 when there is none.
    """

    waits: memoryview[float]
    saves: memoryview[float]
    in_progress: memoryview

    def write(self, record: Record) -> None:
        """Append a record."""

    def claim_engine_thread(self) -> bool:
        """Say that the runtime's loop calls back on this thread: its records need no lock from now on."""

    def at_step(self, now_ns: int) -> int:
        """Once a step: keep the clock anchors fresh. Returns the control word (``layout.detail_of``)."""

    def close(self) -> None:
        """End in order: nothing more is written."""

    def read(self, cursor: int) -> tuple[list[Record], int, int]:
        """Records from sequence ``cursor`` on; the cursor to go on from; how many were overwritten unread."""


class Current:
    """Mutable process state: ``journal`` is None while nothing is traced; ``step`` is the pass bound last."""

    __slots__ = ("journal", "step")

    def __init__(self) -> None:
        self.journal: Journal | None = None
        self.step = 0


current = Current()

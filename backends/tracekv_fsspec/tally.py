"""What one operation on a store took, counted by whoever did a part of it: engine, retries, pacing, breaker.

An operation runs on its caller's thread, so a thread-local says whose it is and nobody has to pass it along.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Progress(Protocol):
    """Told how far a read is by an engine that fills buffers bit by bit, on the thread of the read."""

    def restart(self) -> None:
        """A try begins: all buffers are filled from their beginnings."""

    def filled(self, number: int, end: int) -> None:
        """The first ``end`` bytes of a buffer are there."""


class Tally(threading.local):
    """Of the operation in progress on this thread.

    Attributes:
        attempts: Tries of the whole operation.
        requests: What was asked of the server, or of the kernel: an HTTP request or a positioned read or write each.
        paced_ns: Time spent waiting for a permit or between tries.
        progress: Who wants to know how far the read is.
        breaker: ``closed``, ``open`` or ``half_open``, as the operation found it.
    """

    attempts = 0
    requests = 0
    paced_ns = 0
    breaker = "closed"
    progress: Progress | None = None

    def reset(self) -> None:
        """A new operation begins."""
        self.attempts = 0
        self.requests = 0
        self.paced_ns = 0
        self.breaker = "closed"
        self.progress = None


tally = Tally()

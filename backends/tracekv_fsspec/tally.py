"""What one operation on a store took, counted by whoever did a part of it: engine, retries, pacing, breaker.

An operation runs on its caller's thread, so a thread-local says whose it is and nobody has to pass it along.
"""

from __future__ import annotations

import threading


class Tally(threading.local):
    """Of the operation in progress on this thread.

    Attributes:
        attempts: Tries of the whole operation.
        requests: What was asked of the server, or of the kernel: an HTTP request or a positioned read or write each.
        paced_ns: Time spent waiting for a permit or between tries.
        breaker: ``closed``, ``open`` or ``half_open``, as the operation found it.
    """

    attempts = 0
    requests = 0
    paced_ns = 0
    breaker = "closed"

    def reset(self) -> None:
        """A new operation begins."""
        self.attempts = 0
        self.requests = 0
        self.paced_ns = 0
        self.breaker = "closed"


tally = Tally()

"""How much waits to be stored, in bytes and in seconds, and whether more may."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

from tracekv.journal.vocabulary import DropReason

#: Of both bounds, what a chain may fill of which nothing was written yet. The rest is for chains under way: a block that is dropped
#: takes all behind it along, so the tail of a new chain costs less than the middle of one that is half stored.
NEW_CHAINS_SHARE = 0.75
#: A commit smaller than this tells how long the store takes to answer, not how much it takes in.
MEASURED_BYTES = 1 << 20
#: How much of the older commits' weight is left after each further one.
_KEPT = 0.7


class Backlog:
    """The bounds of write-behind. Not locked: the writer's lock is held around every call.

    Args:
        most_bytes: How much may wait.
        most_s: How long, at the rate that finished commits have measured, it may take until all of it is stored.
        clock: Seconds from anywhere.
    """

    def __init__(self, most_bytes: int, most_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._most_bytes = most_bytes
        self._most_s = most_s
        self._clock = clock
        self._bytes = 0
        self._stored_bytes = 0.0
        self._stored_s = 0.0
        self._began: deque[float] = deque()
        self._measured_until = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """What the store takes in, as the last few commits measured it; None before the first one."""
        return self._stored_bytes / self._stored_s if self._stored_s else None

    def seconds(self, more_bytes: int = 0) -> float:
        """How long storing what waits will take, and no less than the oldest commit in progress has taken: its store may hang."""
        rate = self.bytes_per_second
        running = self._clock() - self._began[0] if self._began else 0.0
        return max(running, (self._bytes + more_bytes) / rate if rate else 0.0)

    def refusal(self, nbytes: int, *, is_new_chain: bool) -> DropReason | None:
        """Why so much more may not wait; None where it may."""
        share = NEW_CHAINS_SHARE if is_new_chain else 1.0
        waiting = self._bytes + nbytes
        if waiting > share * self._most_bytes:
            return DropReason.QUEUE_FULL
        # As seconds(), which most blocks are far from: asked before each of them.
        if waiting * self._stored_s > share * self._most_s * self._stored_bytes or (
            self._began and self._clock() - self._began[0] > share * self._most_s
        ):
            return DropReason.QUEUE_SLOW
        return None

    def add(self, nbytes: int) -> None:
        """So much more waits."""
        self._bytes += nbytes

    def remove(self, nbytes: int) -> None:
        """So much is stored, or dropped."""
        self._bytes -= nbytes

    def commit_begins(self) -> None:
        """A commit is being written; others may be, too."""
        now = self._clock()
        if not self._began:
            self._measured_until = now
        self._began.append(now)

    def commit_ends(self, stored_bytes: int) -> None:
        """The oldest one is over. One that failed has stored 0 bytes and tells nothing about the rate."""
        self._began.popleft()
        now = self._clock()
        # Where several are in progress, the time since the last one ended is what this one's bytes took.
        took = now - self._measured_until
        if stored_bytes >= MEASURED_BYTES and took > 0:
            self._stored_bytes = _KEPT * self._stored_bytes + stored_bytes
            self._stored_s = _KEPT * self._stored_s + took
            self._measured_until = now

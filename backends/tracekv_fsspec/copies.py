"""Slots that a pass's metadata names, until the copies between them and the pages are over on the slot's rank.

Every rank says in the arena's tables which step's copies it has begun and which are over. The leader looks there when it plans a
pass, when a copy of its own process is over, and, from a thread, while another rank is behind its own: only then are loaded slots
unpinned and saved slots submitted.

What a pass named and a rank never began (the forward raised, the batch was emptied) is given back when the next pass is planned.
By then every rank has left the pass: it ends with ``get_finished`` and a collective over its answers (contract.md section 1.4, 10).
Where some rank has begun the pass, one that has not is waited for all the same, until it goes past it or its process ends.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from tracekv_fsspec.arena import Slot
from tracekv_fsspec.arena_tables import Kind, Progress, RankTable
from tracekv_fsspec.writer import SaveBlock

_log = logging.getLogger("tracekv.fsspec")

#: Ranks run in lock step, so another rank is mostly done when the leader is: the first looks come soon.
_FIRST_LOOK_S = 0.0002
_LAST_LOOK_S = 0.01
#: How long a rank may be behind before it is asked whether its process lives.
_ALIVE_S = 1.0


class _Part(NamedTuple):
    """What a pass named for one rank."""

    kind: Kind
    step: int
    rank: int


class _Named(NamedTuple):
    slots: list[Slot]
    blocks: list[SaveBlock]
    since: float


class Copies:
    """The books of copies in flight. Any thread may call.

    Args:
        ranks: What each rank says of its copies, by rank.
        own: The rank of this process.
        is_gone: Whether a rank's process has ended; such a rank's slots are given back. None where that can't be told.
        loaded: Called with slots whose bytes are in their pages.
        saved: Called with blocks whose bytes are in their slots.
        lost: Called with blocks that no worker copied.
    """

    def __init__(
        self,
        ranks: Sequence[RankTable],
        own: int,
        is_gone: Callable[[int], bool] | None,
        loaded: Callable[[Sequence[Slot]], None],
        saved: Callable[[Sequence[SaveBlock]], None],
        lost: Callable[[Sequence[SaveBlock]], None],
    ) -> None:
        self._ranks = ranks
        self._own = own
        self._is_gone = is_gone
        self._loaded = loaded
        self._saved = saved
        self._lost = lost
        self._parts: dict[_Part, _Named] = {}
        self._handing_over = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def plan(self, step: int, loads: Sequence[Slot], saves: Sequence[SaveBlock]) -> None:
        """Note what the metadata of pass ``step`` names. What earlier passes left behind has to be :meth:`expire` d before."""
        if not loads and not saves:
            return
        now = monotonic()
        parts: defaultdict[_Part, _Named] = defaultdict(lambda: _Named([], [], now))
        for slot in loads:
            parts[_Part(Kind.LOADS, step, slot.shard.rank)].slots.append(slot)
        for block in saves:
            parts[_Part(Kind.SAVES, step, block.shard.rank)].blocks.append(block)
        with self._changed:
            self._parts.update(parts)
            if self._thread is None and any(part.rank != self._own for part in parts):
                self._thread = threading.Thread(target=self._watch, name="tracekv-copies", daemon=True)
                self._thread.start()

    def own_ended(self) -> None:
        """This process's rank has ended some copies: take up what is over, and look after the others from now on."""
        self.look()
        with self._changed:
            self._changed.notify_all()

    def look(self) -> None:
        """Take up what is over by now."""
        with self._changed:
            over = [part for part in self._parts if self._progress(part) in (Progress.DONE, Progress.FAILED)]
            self._hand_over(over)

    def expire(self) -> None:
        """Take up what is over, and give back what no rank has begun."""
        if not self._parts:
            return
        self.look()
        with self._changed:
            skipped = [part for part in self._parts if self._is_skipped(part)]
            self._give_back(skipped)

    def wait(self, seconds: float) -> bool:
        """Wait until every copy that was begun is over; False if that took too long."""
        deadline = monotonic() + seconds
        look_s = _FIRST_LOOK_S
        while True:
            self.look()
            with self._changed:
                if not self._handing_over and not any(
                    self._progress(part) is not Progress.UNTOUCHED for part in self._parts
                ):
                    return True
                left = deadline - monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, look_s))
            look_s = min(2 * look_s, _LAST_LOOK_S)

    def close(self, seconds: float) -> None:
        """Wait for what was begun, give back the rest and stop."""
        self.expire()
        self.wait(seconds)
        with self._changed:
            self._give_back([part for part in self._parts if self._progress(part) is Progress.UNTOUCHED])
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _progress(self, part: _Part) -> Progress:
        return self._ranks[part.rank].progress(part.kind, part.step)

    def _is_skipped(self, part: _Part) -> bool:
        """Whether the rank will surely never begin it, or doesn't live to."""
        kind, step, rank = part
        latest = self._ranks[rank].latest(kind)  # before the step itself: it may be going past it just now
        if self._progress(part) is Progress.UNTOUCHED:
            if latest > step:
                return True
            if all(table.progress(kind, step) is Progress.UNTOUCHED for table in self._ranks):
                return True
        return self._is_dead(part)

    def _is_dead(self, part: _Part) -> bool:
        return (
            self._is_gone is not None
            and part.rank != self._own
            and monotonic() - self._parts[part].since > _ALIVE_S
            and self._progress(part) in (Progress.UNTOUCHED, Progress.BEGUN)
            and self._is_gone(part.rank)
        )

    def _hand_over(self, parts: Sequence[_Part]) -> None:
        """Under the lock, which is let go for the calls."""
        taken = [(part, self._progress(part), self._parts.pop(part)) for part in parts]
        self._call([
            call
            for part, progress, named in taken
            if progress is Progress.DONE
            for call in ((self._loaded, named.slots), (self._saved, named.blocks))
        ])  # fmt: skip

    def _give_back(self, parts: Sequence[_Part]) -> None:
        taken = [self._parts.pop(part) for part in parts]
        self._call([call for named in taken for call in ((self._loaded, named.slots), (self._lost, named.blocks))])

    def _call(self, calls: Sequence[tuple[Callable[..., None], Sequence[object]]]) -> None:
        calls = [(function, items) for function, items in calls if items]
        if not calls:
            return
        self._handing_over += 1
        self._changed.release()
        try:
            for function, items in calls:
                function(items)
        finally:
            self._changed.acquire()
            self._handing_over -= 1
            self._changed.notify_all()

    def _watch(self) -> None:
        """Look for other ranks while they are behind this one."""
        look_s = _FIRST_LOOK_S
        while True:
            with self._changed:
                while not self._is_closed and not self._is_behind():
                    self._changed.wait()
                    look_s = _FIRST_LOOK_S
                if self._is_closed:
                    return
                self._changed.wait(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)
            try:
                self.look()
                with self._changed:
                    self._give_back([part for part in self._parts if self._is_dead(part)])
            except Exception:
                _log.exception("tracekv: the books of copies are wrong; some slots are left unused")

    def _is_behind(self) -> bool:
        own = self._ranks[self._own]
        return any(part.rank != self._own and own.latest(part.kind) >= part.step for part in self._parts)

"""Which part of the transfers' time is hidden behind compute."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from itertools import accumulate

from tracekv.journal.records import LayerHooks, Transfer
from tracekv.journal.vocabulary import Direction
from tracekv.views import names
from tracekv.views.metrics_model import Key

#: Calls and passes' hooks that are remembered: hundreds of passes.
_MAX_HELD = 2048
#: Transfers that wait for the end of a pass.
_MAX_WAITING = 1024
_DIRECTIONS = tuple(direction.value for direction in Direction)


class Overlap:
    """Compares when transfers ran with when the connector's callbacks held the engine thread.

    The transfer's time outside of every callback (per-layer hooks included) is hidden: the engine computed, or did something else of
    its own. A transfer is settled at the end of the first pass that ended after it, when all callbacks during it are known. Transfers
    that run at the same time each count; a transfer longer than what is remembered counts as hidden in the part before.

    Args:
        counts: Where the times are added up.
    """

    def __init__(self, counts: defaultdict[Key, int]) -> None:
        self._counts = counts
        self._held: deque[tuple[int, int] | LayerHooks] = deque(maxlen=_MAX_HELD)
        #: ``(started, ended, direction, layer group)``
        self._waiting: deque[tuple[int, int, str, int]] = deque()

    def called(self, started_ns: int, ended_ns: int) -> None:
        """A callback held the engine thread."""
        self._held.append((started_ns, ended_ns))

    def hooked(self, record: LayerHooks) -> None:
        """So did the per-layer hooks of a pass; they are looked at only where a transfer is settled."""
        self._held.append(record)

    def transferred(self, record: Transfer, layer_group: int) -> None:
        """KV moved."""
        if len(self._waiting) >= _MAX_WAITING:
            self.settle(self._waiting[-1][1])
            self._waiting.clear()
        ended = max(record.started_ns, record.ended_ns)
        self._waiting.append((record.started_ns, ended, record.direction._value_, layer_group))

    def settle(self, pass_ended_ns: int) -> None:
        """A pass has ended: count the transfers that ended before."""
        if not self._waiting:
            return
        due = [transfer for transfer in self._waiting if transfer[1] <= pass_ended_ns]
        self._waiting = deque(transfer for transfer in self._waiting if transfer[1] > pass_ended_ns)
        # Each way for itself: loads before the forward and saves after it leave the hooks between out of sight.
        for direction in _DIRECTIONS:
            one_way = [transfer for transfer in due if transfer[2] == direction]
            if one_way:
                self._settle(one_way)

    def _settle(self, due: list[tuple[int, int, str, int]]) -> None:
        intervals = self._intervals(min(started for started, *_ in due), max(ended for _, ended, *_ in due))
        starts = [started for started, _ in intervals]
        held_before = [0, *accumulate(ended - started for started, ended in intervals)]

        def held_until(moment_ns: int) -> int:
            # Callbacks of the engine thread don't overlap, so that only the last one before can reach past the moment.
            count = bisect_right(starts, moment_ns)
            return held_before[count] - (max(0, intervals[count - 1][1] - moment_ns) if count else 0)

        counts = self._counts
        for started, ended, direction, group in due:
            hidden = ended - started - (held_until(ended) - held_until(started))
            counts[names.METRIC_TRANSFER_TIME, direction, group] += ended - started
            counts[names.METRIC_TRANSFER_HIDDEN, direction, group] += min(max(0, hidden), ended - started)

    def _intervals(self, since_ns: int, until_ns: int) -> list[tuple[int, int]]:
        """When the engine thread was held between two moments, without overlaps."""
        found: list[tuple[int, int]] = []
        for held in reversed(self._held):
            if isinstance(held, LayerHooks):
                for payload in (held.waits, held.saves):
                    pairs = memoryview(payload)[: len(payload) // 16 * 16].cast("q")
                    # Layers run in order: the first one began after all of it, or the last one had ended before.
                    if pairs and not (pairs[0] > until_ns or 0 < pairs[-1] <= since_ns):
                        times = pairs.tolist()
                        found += zip(times[::2], times[1::2], strict=True)
            elif held[1] <= since_ns:
                break  # one thread made all these calls: what was written before ended before
            else:
                found.append(held)
        intervals: list[tuple[int, int]] = []
        for started, ended in sorted(pair for pair in found if pair[1] > since_ns and pair[0] < until_ns):
            begin = max(started, intervals[-1][1]) if intervals else started
            if ended > begin:
                intervals.append((begin, ended))
        return intervals

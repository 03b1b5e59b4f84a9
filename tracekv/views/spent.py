"""Where the time of one request went.

The whole of the time is from the request's enqueue (its first query, where that isn't recorded) to the last thing that is recorded of
it, on the leader's clock. Every nanosecond of it is one part's:

=============  =========================================================================================================
``lookup``     inside the query
``read``       a store read for it, while no forward pass of it ran
``verify``     what was read was being checked, likewise
``copy``       its KV was being copied to the device, likewise; or inside ``start_load_kv``, which the engine waits for
``stall``      its pass stood in ``start_load_kv``, ``wait_for_layer_load`` or ``wait_for_save`` while its KV moved, and nothing
               of the above went on
``hidden``     its KV moved while its pass computed
``compute``    its pass computed, and none of its KV moved
``held``       it was finished, and its pages were kept for the connector
``untold``     tracing had taken more than its share, so calls were only counted and passes aren't known
``queue``      none of these, before its first pass
``between``    none of these, after that
=============  =========================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tracekv.journal.records import (
    BindCall,
    Call,
    CallCounts,
    LayerHooks,
    QueryCall,
    Record,
    StoreOperation,
    Transfer,
    in_ns,
)
from tracekv.journal.vocabulary import Callback, Direction, Operation, Source
from tracekv.views import timing
from tracekv.views.facts import hook_times
from tracekv.views.runs import Clock, Segment
from tracekv.views.story import Story
from tracekv.views.timing import Interval

PARTS = ("queue", "lookup", "read", "verify", "copy", "stall", "hidden", "compute", "between", "held", "untold")
#: How much later than a call its record, and those of other threads, may lie among the records.
SLACK = 64


class Spent:
    """When what happened to one request, on the leader's clock, on any rank."""

    def __init__(self) -> None:
        self._lookup: list[Interval] = []
        self._read: list[Interval] = []
        self._verify: list[Interval] = []
        self._copies: dict[Direction, list[Interval]] = {way: [] for way in Direction}
        self._passes: list[Interval] = []
        self._starts: list[Interval] = []
        self._waits: list[Interval] = []
        self._moving_steps: set[int] = set()
        #: Stalls that the connector told, by pass: for passes whose hooks aren't recorded.
        self._told_stalls: dict[int, list[Interval]] = {}
        self._untold: list[Interval] = []
        self._last_ns = 0

    def take(self, records: Sequence[Record], clock: Clock) -> None:
        """What one rank's records of the request say."""
        reads = [r for r in records if isinstance(r, StoreOperation) and r.operation is Operation.READ]
        for read in reads:
            at = clock(read.started_ns) + read.queued_ns
            self._read.append((at, at + read.transfer_ns if read.transfer_ns else clock(read.ended_ns)))
            self._verify.append((self._read[-1][1], min(self._read[-1][1] + read.verify_ns, clock(read.ended_ns))))
        for record in records:
            self._last_ns = max(self._last_ns, clock(ended_ns(record)))
            match record:
                case QueryCall():
                    self._lookup.append((clock(record.started_ns), clock(record.ended_ns)))
                case Transfer() if record.source is not Source.PLANNED:
                    self._transfer(record, clock, has_reads=bool(reads))

    def _transfer(self, record: Transfer, clock: Clock, *, has_reads: bool) -> None:
        # The parts are told as durations: they are laid in their order, so that the copy ends with the transfer.
        begin, end = clock(record.started_ns), clock(record.ended_ns)
        self._moving_steps.add(record.step)
        if record.stall_ns:
            self._told_stalls.setdefault(record.step, []).append((end - record.stall_ns, end))
        if record.direction is Direction.SAVE:
            self._copies[Direction.SAVE].append((begin, end))
            return
        told = record.read_ns + record.verify_ns + record.copy_ns
        copy_began = begin if not record.copy_ns or told == record.copy_ns else max(begin, end - record.copy_ns)
        self._copies[Direction.LOAD].append((copy_began, end))
        if not has_reads:
            self._verify.append((copy_began - record.verify_ns, copy_began))
            self._read.append((copy_began - record.verify_ns - record.read_ns, copy_began - record.verify_ns))

    def take_passes(self, segment: Segment, clock: Clock, story: Story) -> None:
        """The passes that the request was in, as one rank ran them, and when that isn't told."""
        for record in segment.select(CallCounts):
            if isinstance(record, CallCounts):
                self._untold.append((clock(record.started_ns), clock(record.ended_ns)))
        if not story.first_step or story.first_pass_ns is None:
            return
        process = segment.process
        back = clock(0)
        first = max(0, process.sequence_at(story.first_pass_ns - back) - SLACK)
        last = process.sequence_at(story.last_ns - back + 1) + SLACK
        begun: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for number, record in segment.numbered(Call, BindCall, first=first, last=last):
            if not isinstance(record, Call) or not story.first_step <= record.step <= story.last_step:
                continue
            start, end = clock(record.started_ns), clock(record.ended_ns)
            is_moving = record.step in self._moving_steps
            if isinstance(record, BindCall):
                begun[record.step], numbers[record.step] = start, number
            elif record.callback == Callback.START_LOAD_KV:
                begun.setdefault(record.step, start)
                numbers.setdefault(record.step, number)
                self._passes.append((begun[record.step], end))
                if is_moving:
                    self._starts.append((start, end))
            elif record.callback == Callback.WAIT_FOR_SAVE and record.step in begun:
                self._passes.append((begun[record.step], end))
                if is_moving:
                    self._waits.append((start, end))
                    self._take_hooks(segment, clock, record.step, numbers[record.step], number + SLACK)

    def _take_hooks(self, segment: Segment, clock: Clock, step: int, first: int, last: int) -> None:
        hooks = segment.lists(LayerHooks, first=max(0, first - SLACK), last=last)
        for record in itertools.chain.from_iterable(hooks):
            if record.step == step:
                times = hook_times(in_ns(record).waits)
                self._waits += [(clock(begin), clock(end)) for begin, end in times if begin and end]
                return
        self._waits += self._told_stalls.get(step, [])

    def whole(self, story: Story) -> Interval:
        """The request's life, as far as it is recorded."""
        return story.started_ns, max(self._last_ns, story.last_ns, story.started_ns)

    def moving(self, direction: Direction) -> list[Interval]:
        """When its KV was on the way, reading and checking included."""
        return [*self._copies[direction], *([*self._read, *self._verify] if direction is Direction.LOAD else [])]

    def computing(self) -> list[Interval]:
        """When a pass of it computed: what is left of its passes when what it stood still for is taken out."""
        return timing.without(self._passes, [*self._starts, *self._waits])

    def parts(self, begin: int, end: int, story: Story) -> dict[str, int]:
        """The parts of the whole, by name."""
        loading = self._copies[Direction.LOAD]
        first_pass = min((start for start, _ in self._passes), default=end)
        stories_end = story.finished_ns
        held = [] if stories_end is None or story.held_since_ns is None else [(stories_end, end)]
        layers = {
            "lookup": self._lookup,
            "read in a callback": timing.overlap(self._read, self._starts),
            "verify in a callback": timing.overlap(self._verify, self._starts),
            "copy in a callback": timing.overlap(loading, self._starts),
            "stall": [*self._starts, *self._waits],
            "hidden": timing.overlap([*self.moving(Direction.LOAD), *self._copies[Direction.SAVE]], self._passes),
            "compute": self._passes,
            "held": held,
            "read": self._read,
            "verify": self._verify,
            "copy": loading,
            "untold": self._untold,
            "queue": [(begin, first_pass)],
        }
        found = timing.partition(begin, end, layers, "between")
        for name in ("read", "verify", "copy"):
            found[name] += found.pop(f"{name} in a callback")
        return {name: found[name] for name in PARTS}


def ended_ns(record: Record) -> int:
    """When what a record tells was over; 0 where it doesn't say."""
    return int(getattr(record, "ended_ns", 0) or getattr(record, "last_ended_ns", 0) or getattr(record, "at_ns", 0))

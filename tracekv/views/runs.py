"""Which engines a set of journals tells of: a run is one engine with all its ranks, a process may have had several one after another.

A process's part of a run is a range of its records: from the construction of its connector to the next one's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tracekv.journal.process_scan import Batch, ProcessScan
from tracekv.journal.records import Call, ConnectorWrapped, ProcessStarted, Record, RegisterCall, RunJoined
from tracekv.views import ids
from tracekv.views.clock import unix_offsets
from tracekv.views.facts import Facts

#: Records of a process from which on they are taken in bulk.
LARGE = 50_000
#: Requests whose records are kept.
_KEPT = 8


class Segment:
    """One process's part of a run.

    Attributes:
        process: Whose records they are, with numbers in ``[first, last)``.
        facts: Rank, layout, classes: what the records of the bring-up tell.
        begins_ns, ends_ns: Times of the process between which this engine was its last one.
        offset_ns: What turns the process's monotonic times into Unix times (:func:`unix_offsets`).
    """

    def __init__(self, process: ProcessScan, offset_ns: int, first: int, last: int) -> None:
        self.process = process
        self.offset_ns = offset_ns
        self.first = first
        self.last = last
        self.facts = Facts()
        for record in process.select(ProcessStarted):
            self.facts.observe(record)
        for record in process.select(ConnectorWrapped, RunJoined, RegisterCall, first=first, last=last):
            self.facts.observe(record)
        self.begins_ns = next((_began(record) for record in self.select(Call)), 0)
        self.ends_ns = 1 << 63
        self._named: dict[int, list[tuple[int, Record]]] = {}
        self._learnt: dict[int, list[tuple[int, Record]]] = {}

    @property
    def is_latest(self) -> bool:
        """Whether the process has had no engine after this one."""
        return self.last == self.process.next_sequence

    @property
    def is_large(self) -> bool:
        """Whether its records are better taken in bulk (:mod:`tracekv.views.bulk`) than one by one."""
        return self.last - self.first >= LARGE

    def select(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[Record]:
        """As :meth:`ProcessScan.select`, within this part."""
        for _, record in self.numbered(*kinds, first=first, last=last):
            yield record

    def numbered(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[tuple[int, Record]]:
        """As :meth:`ProcessScan.numbered`, within this part."""
        end = self.last if last is None else min(last, self.last)
        return self.process.numbered(*kinds, first=max(first, self.first), last=end)

    def lists(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[list[Any]]:
        """As :meth:`ProcessScan.lists`, within this part."""
        end = self.last if last is None else min(last, self.last)
        return self.process.lists(*kinds, first=max(first, self.first), last=end)

    def batches_by_kind(self, *kinds: type[Record]) -> Iterator[dict[type[Record], Batch]]:
        """As :meth:`ProcessScan.batches_by_kind`, within this part."""
        return self.process.batches_by_kind(*kinds, first=self.first, last=self.last)

    def names(self, request_id: int, *kinds: type[Record]) -> bool:
        """Whether a record of some kinds names a request."""
        return any(True for _ in self.process.of_request(request_id, *kinds, first=self.first, last=self.last))

    def learn(self, request_ids: frozenset[int]) -> None:
        """Look for the records of several requests in one pass, for :meth:`of_request` to know."""
        self._learnt = self.process.of_requests(request_ids, first=self.first, last=self.last)

    def of_request(self, request_id: int) -> list[tuple[int, Record]]:
        """The records that name a request, or list it, with their numbers; kept, since each question about it asks for them."""
        found = self._learnt.get(request_id, self._named.get(request_id))
        if found is None:
            found = list(self.process.of_request(request_id, first=self.first, last=self.last))
            self._named = {**dict(list(self._named.items())[-_KEPT:]), request_id: found}
        return found


class Run:
    """One engine: the parts of its processes, the leader's first.

    Attributes:
        key: The run id, or the process's own where no run was ever joined.
    """

    def __init__(self, key: bytes, segments: Sequence[Segment]) -> None:
        self.key = key
        self.segments = sorted(segments, key=lambda each: (not each.facts.has_scheduler, each.facts.rank or 0))

    @property
    def leader(self) -> Segment:
        """The part with the scheduler, or the lowest rank where that isn't known."""
        return self.segments[0]

    @property
    def label(self) -> str:
        """How the run is named."""
        return ids.run_label(self.key)

    @property
    def started_ns(self) -> int:
        """Unix time of its start, to within a bring-up."""
        return min(max(each.begins_ns, each.process.facts.monotonic_ns) + each.offset_ns for each in self.segments)

    def request_label(self, request_id: int, *, hashed: bool) -> str:
        """How a request is named."""
        return ids.request_label(self.key, request_id, hashed=hashed)


def runs_of(processes: Sequence[ProcessScan]) -> list[Run]:
    """The runs in some processes, by their start."""
    found: dict[bytes, list[Segment]] = {}
    offsets = unix_offsets(process.facts for process in processes)
    for process, offset_ns in zip(processes, offsets, strict=True):
        for number, segment in enumerate(_segments(process, offset_ns)):
            alone = process.facts.process_id + (b"%d" % number if number else b"")
            found.setdefault(segment.facts.run_id or alone, []).append(segment)
    return sorted((Run(key, segments) for key, segments in found.items()), key=lambda run: run.started_ns)


def _segments(process: ProcessScan, offset_ns: int) -> list[Segment]:
    """A process's engines, as :class:`Facts` counts them."""
    begins = [0]
    facts = Facts()
    for number, record in process.numbered(ConnectorWrapped):
        so_far = facts.engines
        facts.observe(record)
        if 0 < so_far < facts.engines:
            begins.append(number)
    found = [
        Segment(process, offset_ns, *each) for each in zip(begins, [*begins[1:], process.next_sequence], strict=True)
    ]
    for before, after in itertools.pairwise(found):
        before.ends_ns = after.begins_ns
    found[0].begins_ns = 0
    return found


def _began(record: Record) -> int:
    return record.started_ns if isinstance(record, Call) else 0


Clock = Callable[[int], int]
"""From a process's monotonic time to the leader's."""


def clock_of(segment: Segment, leader: Segment) -> Clock:
    """Times of one boot compare as they are, others by their clock anchors."""
    if segment.process.facts.boot_id == leader.process.facts.boot_id:
        return lambda at_ns: at_ns
    shift = segment.offset_ns - leader.offset_ns
    return lambda at_ns: at_ns + shift

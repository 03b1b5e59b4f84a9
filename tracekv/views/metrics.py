"""Records of all ranks of a node to metrics: a pure function of what was read, in integers, with a bound on the number of series.

Names, units, attributes and buckets are in ``registry.yaml``; what each metric counts is told there and in ``docs/telemetry.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import Record
from tracekv.views.metrics_model import Collected, HistogramPoint, MetricPoints, Point, Totals
from tracekv.views.metrics_process import UNKNOWN_RANK, ProcessMetrics
from tracekv.views.metrics_ranks import OF_INTEREST, Ranks

__all__ = ["HistogramPoint", "MetricPoints", "MetricsView", "Point"]

#: Processes that are followed at a time; beyond it the one whose newest record is oldest counts as ended.
MAX_PROCESSES = 256
#: Ranks of ended processes that keep their counters apart; the counters of further ones go to rank -1.
MAX_KEPT_RANKS = 1024


class MetricsView:
    """Adds up the records of many processes, in any order. Not thread-safe.

    Counters of a rank go on when its process ends and another takes its place; gauges are those of the processes that are followed.
    Two engines whose journals lie in one directory add up by rank.

    Args:
        settings_differ: Told once per run, with the ranks of two of its processes that resolved different settings.
    """

    def __init__(self, *, settings_differ: Callable[[int, int], None] | None = None) -> None:
        self._processes: dict[bytes, ProcessMetrics] = {}
        self._kept: dict[int, Totals] = {}
        self._shared = Totals()
        self._reference: JournalFacts | None = None
        self._ranks = Ranks(self._shared, self._clock_shift, settings_differ or _say_nothing)

    def feed(self, source: JournalFacts, record: Record) -> None:
        """Take one record that ``source`` wrote."""
        self.feed_all(source, (record,))

    def feed_all(self, source: JournalFacts, records: Iterable[Record]) -> None:
        """Take records that ``source`` wrote."""
        process = self._process(source)
        handlers = process.handlers
        for record in records:
            kind = type(record)
            process.records += 1
            handler = handlers.get(kind)
            if handler is not None:
                handler(record)
                if kind in OF_INTEREST:
                    self._ranks.feed(process, record)

    def lost(self, source: JournalFacts, count: int) -> None:
        """``count`` records of ``source`` were overwritten before they were read."""
        self._process(source).lost += count

    def journal(self, source: JournalFacts, *, bytes_written: int = 0, undecodable: int = 0) -> None:
        """What a reader knows of a journal beside its records, since it began."""
        process = self._process(source)
        process.bytes_written = max(process.bytes_written, bytes_written)
        process.undecodable = max(process.undecodable, undecodable)

    def ended(self, source: JournalFacts) -> None:
        """No more records of ``source`` will come: its counters stay, its gauges go."""
        process = self._processes.pop(source.process_id, None)
        if process is None:
            return
        self._ranks.forget(process)
        rank = process.rank
        if rank not in self._kept and len(self._kept) >= MAX_KEPT_RANKS:
            rank = UNKNOWN_RANK
        self._kept.setdefault(rank, Totals()).merge(process.kept_totals())

    def metrics(self, *, now_ns: int | None = None, boot_id: str = "") -> list[MetricPoints]:
        """All metrics that have a point, in the registry's order; see :meth:`collect`."""
        collected = Collected()
        self.collect(collected, now_ns=now_ns, boot_id=boot_id)
        return collected.metrics()

    def collect(self, into: Collected, *, now_ns: int | None = None, boot_id: str = "") -> None:
        """Give out everything.

        Args:
            into: What takes it.
            now_ns: CLOCK_MONOTONIC of the boot ``boot_id``, for ages. Processes of other boots, and all where it is None,
                are looked at as they were at their newest record.
        """

        def now(process: ProcessMetrics) -> int:
            is_here = now_ns is not None and process.source.boot_id == boot_id
            return max(now_ns or 0, process.newest_ns) if is_here else process.newest_ns

        for process in self._processes.values():
            process.collect(into, now(process))
        self._ranks.collect(into, now)
        for rank, totals in self._kept.items():
            into.add_all(totals, rank)
        into.add_all(self._shared)

    def _process(self, source: JournalFacts) -> ProcessMetrics:
        known = self._processes.get(source.process_id)
        if known is None:
            if len(self._processes) >= MAX_PROCESSES:
                quietest = min(self._processes.values(), key=lambda one: one.newest_ns + self._clock_shift(one))
                self.ended(quietest.source)
            self._reference = self._reference or source
            known = self._processes[source.process_id] = ProcessMetrics(source)
        return known

    def _clock_shift(self, process: ProcessMetrics) -> int:
        first, source = self._reference or process.source, process.source
        if source.boot_id == first.boot_id:
            return 0
        return (source.wall_ns - source.monotonic_ns) - (first.wall_ns - first.monotonic_ns)


def _say_nothing(reference: int, other: int) -> None:
    """Nobody wants to know of differing settings."""

"""What only several ranks together tell, or none: how far apart they give requests back, which pages are held, whether settings
differ, and what a store was measured to give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tracekv.journal.records import FinishCall, FinishedCall, Record, RunJoined, SettingsSeen, StoreCeiling
from tracekv.views import names
from tracekv.views.metrics_model import Collected, Totals, store_engine
from tracekv.views.metrics_process import ProcessMetrics

#: Requests of a run that are remembered, of each kind.
MAX_REQUESTS = 4096
#: Records that :class:`Ranks` wants to see.
OF_INTEREST = frozenset({FinishCall, FinishedCall, RunJoined, SettingsSeen, StoreCeiling})


class _Held:
    __slots__ = ("pages", "since_ns")

    def __init__(self, pages: list[tuple[int, int]], since_ns: int) -> None:
        self.pages = pages
        self.since_ns = since_ns


class _Run:
    """Requests of one run, whose ranks' journals may be read in any order relative to each other."""

    def __init__(self) -> None:
        self.processes: list[ProcessMetrics] = []
        #: Request -> the scheduler's process and what is held.
        self.held: OrderedDict[int, tuple[ProcessMetrics, _Held]] = OrderedDict()
        #: (direction, request) -> when each process returned it.
        self.returned: OrderedDict[tuple[str, int], dict[ProcessMetrics, int]] = OrderedDict()
        #: Saved requests that every rank has returned, and when the last one did.
        self.done: OrderedDict[int, int] = OrderedDict()
        self.has_said_differing = False

    def workers(self) -> set[ProcessMetrics]:
        return {process for process in self.processes if process.has_worker}


class Ranks:
    """Puts the processes of each run together. Times of processes are compared on the clock of the first one.

    Args:
        totals: Where what belongs to no rank is added up.
        clock_shift: What to add to a time of a process.
        settings_differ: Told once per run, with the ranks of two processes that resolved different settings.
    """

    def __init__(
        self,
        totals: Totals,
        clock_shift: Callable[[ProcessMetrics], int],
        settings_differ: Callable[[int, int], None],
    ) -> None:
        self._totals = totals
        self._clock_shift = clock_shift
        self._settings_differ = settings_differ
        self._runs: dict[bytes, _Run] = {}
        self._run_of: dict[ProcessMetrics, bytes] = {}

    def feed(self, process: ProcessMetrics, record: Record) -> None:
        """Take a record :data:`OF_INTEREST`, after the process's own metrics have."""
        run = self._join(process)
        match record:
            case FinishCall() if record.keeps_pages:
                self._kept(run, process, record)
            case FinishedCall():
                at = record.ended_ns + self._clock_shift(process)
                for request_id in record.loading_returned:
                    self._gave_back(run, process, ("load", request_id), at)
                for request_id in record.saving_returned:
                    self._gave_back(run, process, ("save", request_id), at)
            case RunJoined() | SettingsSeen():
                self._compare_settings(run, process)
            case StoreCeiling():
                engine, direction = store_engine(record.engine), record.direction.value
                self._totals.counts[names.METRIC_STORE_CEILING, engine, direction] = max(0, record.bytes_per_s)

    def forget(self, process: ProcessMetrics) -> None:
        """A process is gone, and what it held with it."""
        run_id = self._run_of.pop(process, None)
        run = None if run_id is None else self._runs.get(run_id)
        if run is None or run_id is None:
            return
        run.processes.remove(process)
        if not run.processes:
            del self._runs[run_id]
            return
        for request_id in [request_id for request_id, (owner, _) in run.held.items() if owner is process]:
            del run.held[request_id]
        for times in run.returned.values():
            times.pop(process, None)

    def collect(self, into: Collected, now_ns: Callable[[ProcessMetrics], int]) -> None:
        """Give out what is held now; ``now_ns`` tells the time on a process's clock."""
        differing = 0
        # One per rank, so that an engine that was started again with other settings doesn't add a series.
        digests: dict[int, str] = {}
        for run in self._runs.values():
            for process in run.processes:
                if process.facts.has_scheduler:
                    into.highest((names.METRIC_HELD_AGE,), 0, process.rank)
                    for group in process.facts.groups:
                        into.add((names.METRIC_HELD_PAGES, group), 0, process.rank)
                if process.settings_digest is not None:
                    digests[process.rank] = process.settings_digest.hex()
            for owner, held in run.held.values():
                age = now_ns(owner) + self._clock_shift(owner) - held.since_ns
                into.highest((names.METRIC_HELD_AGE,), max(0, age), owner.rank)
                for group, pages in held.pages:
                    into.add((names.METRIC_HELD_PAGES, group), pages, owner.rank)
            differing += len(_differing(run.processes))
        for rank, digest in digests.items():
            into.add((names.METRIC_SETTINGS_INFO, digest), 1, rank)
        into.add((names.METRIC_SETTINGS_DIFFERING,), differing)

    def _join(self, process: ProcessMetrics) -> _Run:
        # Until it is told of a run, or where it never will be, a process is a run of its own.
        run_id = process.facts.run or process.source.process_id
        known = self._run_of.get(process)
        if known != run_id:
            if known is not None:
                self.forget(process)
            self._run_of[process] = run_id
            self._runs.setdefault(run_id, _Run()).processes.append(process)
        return self._runs[run_id]

    def _kept(self, run: _Run, process: ProcessMetrics, record: FinishCall) -> None:
        since = record.ended_ns + self._clock_shift(process)
        if run.done.get(record.request_id, since - 1) >= since:
            return  # the ranks' journals were read first: they have given it back
        pages = [
            (process.group(layer_group), len(slots) - slots.count(-1))
            for layer_group, slots in enumerate(record.pages)
        ]  # fmt: skip
        _trim(run.held)
        run.held[record.request_id] = (process, _Held(pages, since))

    def _gave_back(self, run: _Run, process: ProcessMetrics, request: tuple[str, int], at_ns: int) -> None:
        times = run.returned.get(request)
        if times is None:
            _trim(run.returned)
            times = run.returned[request] = {}
        times.setdefault(process, at_ns)
        workers = run.workers()
        if not workers <= times.keys():
            return
        del run.returned[request]
        direction, request_id = request
        last = max(times, key=times.__getitem__)
        if len(times) > 1:
            skew = times[last] - min(times.values())
            self._totals.histogram(names.METRIC_FINISHED_SKEW, direction).add(skew)
            last.totals.counts[names.METRIC_FINISHED_LAST, direction] += 1
        if direction == "save":
            held = run.held.get(request_id)
            if held is not None and held[1].since_ns <= times[last]:
                del run.held[request_id]
            _trim(run.done)
            run.done[request_id] = times[last]

    def _compare_settings(self, run: _Run, process: ProcessMetrics) -> None:
        if run.has_said_differing:
            return
        for other in _differing(run.processes):
            run.has_said_differing = True
            self._settings_differ(_reference(run.processes).rank, other.rank)
            return


def _reference(processes: Sequence[ProcessMetrics]) -> ProcessMetrics:
    return min(processes, key=lambda process: process.rank)


def _differing(processes: Sequence[ProcessMetrics]) -> list[ProcessMetrics]:
    """Those whose settings differ from the lowest rank's."""
    told = [process for process in processes if process.settings_digest is not None]
    if len(told) < 2:
        return []
    digest = _reference(told).settings_digest
    return [process for process in told if process.settings_digest != digest]


def _trim(
    remembered: OrderedDict[int, int]
    | OrderedDict[int, tuple[ProcessMetrics, _Held]]
    | OrderedDict[tuple[str, int], dict[ProcessMetrics, int]],
) -> None:
    if len(remembered) >= MAX_REQUESTS:
        remembered.popitem(last=False)

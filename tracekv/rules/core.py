"""Which processes and runs there are, and what is known of them: joins, gaps and time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tracekv.journal.records import (
    CallCounts,
    ConnectorWrapped,
    ProcessStarted,
    RegisterCall,
    RunJoined,
    TracingReduced,
)
from tracekv.journal.vocabulary import Side
from tracekv.rules import events
from tracekv.rules.model import Limits
from tracekv.rules.plain import is_plain_end, is_plain_load
from tracekv.rules.promise import promise
from tracekv.rules.state import Recent, Request, Run, Source

#: Engines that are followed at a time, and processes.
_MOST_RUNS = 64
_MOST_SOURCES = 1024
_TICK_NS = 1_000_000_000

Tell = Callable[[str, Any], None]


class Core:
    """Sources, runs, gaps and time.

    Args:
        limits: For what settles when.
        tell: Called with an event's name and the event.
        spared: Names of events that aren't told where they are plain.
    """

    def __init__(self, limits: Limits, tell: Tell, spared: Collection[str]) -> None:
        self._limits = limits
        self._tell = tell
        self._spares_query, self._spares_lookup = "query" in spared, "lookup" in spared
        self._spares_astray = "astray" in spared
        self._spares_loaded, self._spares_left = "loaded" in spared, "left" in spared
        self._sources: Recent[str, Source] = Recent(_MOST_SOURCES)
        self._runs: Recent[bytes, Run] = Recent(_MOST_RUNS)
        #: Worker classes that report what they move, in whichever run they did.
        self._reporting: set[str] = set()

    def lost(self, name: str) -> None:
        """Records of a process are missing before the next one."""
        source = self.source(name)
        self._forget_ids(source)
        source.saw_worker = source.saw_start = False
        run = source.run
        if run is None:
            return
        if source.has_scheduler or run.leader is None:  # that it leads may be what was lost
            self._forget(run)
        else:
            run.completions.clear()  # what it returned meanwhile isn't known
            for request in run.requests.values():
                request.is_whole = False

    def tick(self, now_ns: int) -> None:
        """Time has come to ``now_ns``."""
        for run in list(self._runs.values()):
            if run.leader is not None:
                self._time(run, run.leader, now_ns)

    def close(self) -> None:
        """No more records come."""
        for run in list(self._runs.values()):
            source = run.leader or (run.sources[0] if run.sources else None)
            while run.due and source is not None:
                _, name, request = run.due.popleft()
                self._settle(run, source, name, request)

    def _settle(self, run: Run, source: Source, name: str, request: Request) -> None:
        """What is known of a request's load, or of its end, is all that there will be."""
        if name == "left":
            if not (self._spares_left and is_plain_end(request)):
                self._tell("left", events.Settled(run, source, request))
        elif (request.honoured or 0) > 0:
            promised = promise(run, request)
            if not (self._spares_loaded and is_plain_load(run, request, promised)):
                self._tell("loaded", events.Loaded(run, source, request, promised))

    # -- what processes are -----------------------------------------------------------------------------------------

    def source(self, name: str) -> Source:
        """A process by its name."""
        found = self._sources.get(name)
        if found is None:
            found = self._sources[name] = Source(name)
        return found

    def _run(self, source: Source) -> Run:
        if source.run is None:
            self._join(source, source.name.encode())
        assert source.run is not None
        return source.run

    def _join(self, source: Source, key: bytes) -> None:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = Run(key)
            run.is_known_from = 0 if source.saw_start else 2
        if source.run is not None and source.run is not run:
            source.run.sources.remove(source)
        source.run = run
        if source not in run.sources:
            run.sources.append(source)
        if source.has_scheduler and (source.rank or 0) == 0 and run.leader is not source:
            run.leader = source
            run.ticked_ns = run.ticks_ns = 0  # by the clock of whoever was there before
        run.world = run.world or source.world
        for each in run.sources:
            each.shift_ns = self._shift(each, run.leader)
        run.reports |= source.worker_class in self._reporting
        if source.register is not None:
            self._take_layout(run, source.register)

    @staticmethod
    def _shift(source: Source, leader: Source | None) -> int:
        if leader is None or "" in (source.boot_id, leader.boot_id) or source.boot_id == leader.boot_id:
            return 0
        return source.wall_offset_ns - leader.wall_offset_ns

    def _process_started(self, source: Source, record: ProcessStarted) -> None:
        source.boot_id = record.boot_id
        source.wall_offset_ns = record.wall_ns - record.monotonic_ns
        source.saw_start = True

    def _wrapped(self, source: Source, record: ConnectorWrapped) -> None:
        if record.side is Side.SCHEDULER:
            source.has_scheduler = True
            # Both halves are constructed at the same time, and registered after that: what was, was another engine's.
            source.register = None
            if source.run is not None:
                self._forget(source.run)
        else:
            source.worker_class = record.class_name
            source.forget()
            source.register = None
            source.saw_worker = True
            source.is_bound = False
            source.trusts_ids_from = 0

    def _joined(self, source: Source, record: RunJoined) -> None:
        source.rank = record.rank if record.rank >= 0 else None
        source.world = record.world if record.world >= 0 else None
        self._join(source, record.run_id)

    def _reduced(self, source: Source, record: TracingReduced) -> None:
        source.is_blind = record.is_reduced
        self.lost(source.name)

    def _counted(self, source: Source, record: CallCounts) -> None:
        self.lost(source.name)

    def _register(self, source: Source, record: RegisterCall) -> None:
        run = self._run(source)
        run.reports |= source.worker_class in self._reporting
        before, source.register = source.register, record
        self._take_layout(run, record)
        self._tell("register", events.Register(run, source, record, before))

    def _take_layout(self, run: Run, record: RegisterCall) -> None:
        if run.layout is not None:
            return
        run.groups = {group.layer_group_id: group for group in record.groups}
        run.block = record.tokens_per_block
        run.layers = frozenset(layer for group in record.groups for layer in group.layer_ids)
        run.layout = (
            record.tokens_per_block,
            record.dtype,
            tuple((g.layer_group_id, g.window_size, tuple(g.layer_ids), g.bytes_per_page) for g in record.groups),
        )

    # -- gaps and time ------------------------------------------------------------------------------------------------

    def _forget(self, run: Run) -> None:
        run.forget()
        run.is_known_from = run.builds + 2

    def _forget_ids(self, source: Source) -> None:
        source.forget()
        source.trusts_ids_from = source.now_ns + self._limits.kept_ns

    def _passed(self, run: Run, source: Source, now_ns: int) -> None:
        if now_ns > source.now_ns:
            source.now_ns = now_ns
        if now_ns + source.shift_ns > run.ticks_ns:
            self._time(run, source, now_ns + source.shift_ns)

    def _time(self, run: Run, source: Source, now_ns: int) -> None:
        if now_ns <= run.ticked_ns:
            return
        run.ticked_ns, run.ticks_ns = now_ns, now_ns + _TICK_NS
        if run.last_build is not None:
            for request_id in run.last_build.request_ids:
                request = run.requests.get(request_id)
                if request is not None:
                    request.seen_ns = run.last_build.ended_ns
        self._tell("time", events.Time(run, source, now_ns))

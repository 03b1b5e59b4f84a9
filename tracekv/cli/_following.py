"""Follows the journals at some paths: what is there, what is written from now on, and the processes that appear."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tracekv.cli._judging import EVERY
from tracekv.journal.directory import journal_files
from tracekv.journal.layout import JournalFormatError, JournalNotReady
from tracekv.journal.opening import why_left_out
from tracekv.journal.process import boot_id
from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.records import ConnectorWrapped, ProcessStarted, RegisterCall, RunJoined
from tracekv.journal.scan import Scan, scan
from tracekv.rules import Checker, Finding
from tracekv.rules.offline import judge_scanned, source_name, time_of
from tracekv.views import top as view
from tracekv.views.facts import callback_name
from tracekv.views.top import COUNTED, ProcessLine, Seen, Top, TopView

#: The latest records of a process, of which all kinds are read: what it is in the middle of is told by these.
LATEST = 4_096
#: So many records are judged from the beginning; of more, only what is written from now on.
JUDGED = 50_000
#: The last of a process's records are among so many numbers: other threads' come late.
_TAIL = 256
_EXPLAINS = (ProcessStarted, ConnectorWrapped, RunJoined, RegisterCall)


class Followed:
    """One process: what was scanned of it, and its ring from there on."""

    def __init__(self, process: ProcessScan, view: TopView) -> None:
        self.process = process
        self.facts = process.facts
        self.view = view
        self.records, self.lost = process.records, process.lost
        self.cursor = process.next_sequence
        self._ring = process.ring
        if self._ring is not None:
            self._ring.follow_from(self.cursor, process.ring_positions)

    def follow(self, checker: Checker) -> int:
        """Read what was written since; returns how many records came."""
        if self._ring is None:
            return 0
        records, cursor, lost = self._ring.read(self.cursor)
        if lost:
            self.lost += lost
            checker.lost(source_name(self.facts), lost)
        for record in records:
            self.view.feed(record)
            checker.feed(source_name(self.facts), record)
        self.cursor = cursor
        self.records += len(records)
        return len(records)

    def seen(self) -> Seen:
        """The process as it is now."""
        process, facts = self.process, self.view.facts
        is_alive = process.is_alive()
        state = process.state()
        is_here = self.facts.boot_id == boot_id()
        last_ns = max(self.view.last_ns, state.since_ns)
        clock_ns = max(last_ns, time.perf_counter_ns()) if is_here else last_ns
        # Ages are counted back from now; of a process that is gone, from its last moment.
        now_ns = clock_ns if is_alive else last_ns
        inside = None
        if state.callback:
            side, method = callback_name(state.callback)
            layers = [hook.layer for hook in (*state.waits, *state.saves) if not hook.ended_ns]
            inside = f"{side.value}.{method}" + (f" {layers[0]}" if layers else "")
        line = ProcessLine(
            facts.rank, facts.world, self.facts.pid, self.facts.host, facts.run_id.hex() or None, is_alive, inside,
            max(0, now_ns - state.since_ns) / 1e9 if inside else 0.0, self.view.inflight.step,
            (clock_ns - self.view.last_ns) / 1e9 if self.view.last_ns and is_here else None, self.records, self.lost,
            0 if self._ring is None else self._ring.written_bytes(),
        )  # fmt: skip
        undecodable = process.undecodable + (self._ring.undecodable if self._ring is not None else 0)
        return Seen(self.view, line, now_ns, facts.run, undecodable)


def view_of(process: ProcessScan, *, window_s: float, since_unix_ns: int | None) -> TopView:
    """What was scanned of a process, in a view."""
    view = TopView(window_s=window_s, since_ns=_monotonic(process, since_unix_ns))
    latest = max(0, process.next_sequence - LATEST)
    for record in process.select(*_EXPLAINS, *COUNTED, last=latest):
        if isinstance(record, _EXPLAINS):
            view.inflight.feed(record)
        else:
            view.recall(record)
    for record in process.select(first=latest):
        view.feed(record)
    return view


def _monotonic(process: ProcessScan, unix_ns: int | None) -> int:
    """A time on a process's own clock; 0 for none."""
    if unix_ns is None:
        return 0
    anchor = process.anchors()[-1]
    return max(0, unix_ns - anchor.wall_ns + anchor.monotonic_ns)


def _unix(process: ProcessScan, monotonic_ns: int) -> int:
    """A time of a process's own clock, as Unix time."""
    anchor = process.anchors()[-1]
    return monotonic_ns - anchor.monotonic_ns + anchor.wall_ns


def _latest_unix_ns(processes: Sequence[ProcessScan]) -> int:
    """Now, while a process lives; else the last moment that is recorded of any."""
    if not processes or any(process.is_alive() for process in processes):
        return time.time_ns()
    found = []
    for process in processes:
        anchor = process.anchors()[-1]
        last = [time_of(record) for record in process.select(first=process.next_sequence - _TAIL)]
        found.append(_unix(process, max([anchor.monotonic_ns, *last])))
    return max(found)


class Following:
    """All processes at some paths.

    Args:
        paths: Files and directories; ring files that appear in a directory are followed, too.
        found: What was scanned at them; this takes its processes over, and closes it at the end.
        window_s: How far back "of late" goes.
        hashed: Name requests by their digests.
        since_s: How far back from now what is counted goes (from the last record, where no process lives); None for all.
    """

    def __init__(
        self, paths: Sequence[Path], found: Scan, *, window_s: float, hashed: bool, since_s: float | None = None
    ) -> None:
        self._directories = [path for path in paths if path.is_dir()]
        self._window_s = window_s
        self._hashed = hashed
        self._scans = [found]
        self._refused: set[Path] = set()
        self._known = {path for process in found.processes for path in process.paths}
        self._since_unix_ns = None if since_s is None else _latest_unix_ns(found.processes) - int(since_s * 1e9)
        self._found_counts: Counter[str] = Counter()
        #: When counting began, on the clock of each process that was there.
        self._began = {source_name(p.facts): _monotonic(p, self._since_unix_ns) for p in found.processes}
        self._checker = Checker(on_finding=self._count_finding, most_of_a_rule=EVERY)
        self._judged = "all records"
        if found.records <= JUDGED:
            judge_scanned(found.processes, self._checker)
        else:
            self._judged = "what came since this began; `tracekv check` judges all"
            judge_scanned(
                found.processes, self._checker, ranges=[(p.next_sequence, p.next_sequence) for p in found.processes]
            )
            for process in found.processes:  # what was passed over is a gap
                self._checker.lost(source_name(process.facts), 1)
        self.followed = self._follow(found)
        self.notes = found.notes

    def _count_finding(self, finding: Finding) -> None:
        if finding.at_ns >= self._began.get(finding.source, 0):
            self._found_counts[f"{finding.severity.value} {finding.rule}"] += 1

    def refresh(self) -> None:
        """Read on, and look for processes that are new."""
        for file in [file for directory in self._directories for file in journal_files(directory)]:
            if file not in self._known and file not in self._refused:
                self._add(file)
        for each in self.followed:
            while each.follow(self._checker):
                pass

    def _add(self, file: Path) -> None:
        try:
            found = scan([file])
        except (JournalNotReady, FileNotFoundError):  # in the making, or gone: the next look tells
            return
        except (JournalFormatError, OSError) as error:
            self._refused.add(file)
            reason = why_left_out(file, error)
            if reason not in self.notes:
                self.notes.append(reason)
            return
        self._scans.append(found)
        self._known.add(file)
        judge_scanned(found.processes, self._checker)
        self.followed += self._follow(found)

    def _follow(self, found: Scan) -> list[Followed]:
        views = found.map(functools.partial(view_of, window_s=self._window_s, since_unix_ns=self._since_unix_ns))
        return [Followed(process, view) for process, view in zip(found.processes, views, strict=True)]

    def top(self) -> Top:
        """Everything, as it is now."""
        seen = [each.seen() for each in self.followed]
        # "Of late" is before now, while an engine runs; else before the last moment of whichever ended last.
        is_over = not any(each.line.is_alive for each in seen)
        moments = [_unix(each.process, one.now_ns) for each, one in zip(self.followed, seen, strict=True)]
        latest_ns = max(moments) if is_over else time.time_ns()
        for each, one in zip(self.followed, seen, strict=True):
            one.late_ns = one.now_ns if one.line.is_alive else _monotonic(each.process, latest_ns)
        told = view.screen(
            seen, at_unix_ns=time.time_ns(), window_s=self._window_s, hashed=self._hashed,
            rules=self._found_counts, judged=self._judged,
        )  # fmt: skip
        told.notes = self.notes
        told.since_unix_ns = self._since_unix_ns
        return told

    def close(self) -> None:
        """Give the files back."""
        for found in self._scans:
            found.close()

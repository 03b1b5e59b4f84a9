"""What a report shows, as one plain object: numbers, words and bars, ready to be embedded as JSON.

Numbers come from :class:`Summary`, requests from :mod:`requests` and :mod:`explain`, bars from :class:`Timeline`: a report counts
nothing itself. Times in it are nanoseconds from the first process's start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tracekv._version import __version__
from tracekv.journal.parallel import in_processes
from tracekv.journal.records import BindCall, Call
from tracekv.journal.scan import Scan
from tracekv.journal.vocabulary import Direction
from tracekv.views.bar_facts import bar_facts
from tracekv.views.explain import Explanation, explain
from tracekv.views.into import Into, take_each
from tracekv.views.picture import MOST_BARS, Many, Picture
from tracekv.views.process_data import process_data
from tracekv.views.requests import RequestRow, rows_of
from tracekv.views.runs import Run, Segment, runs_of
from tracekv.views.summary import Summary, SummaryView
from tracekv.views.summary_data import summary_data
from tracekv.views.timeline import Row, Timeline
from tracekv.views.tracks import Tracks
from tracekv.views.verdict import verdict

#: Requests that are listed; and of these, those whose time is explained and whose bars are drawn one by one.
MOST_LISTED = 500
MOST_EXPLAINED = 100
_FORK_FROM = 50_000
#: Records of a part that take as long as explaining one request, about.
_EXPLANATION = 1300
#: Records at either end of a process that tell how long it ran, and lanes that share its bars.
_EDGE, _LANES = 256, 16
_FINEST_NS = 1 << 12

Data = dict[str, Any]


class Part(NamedTuple):
    """What one process's part of a run comes to."""

    summary: Summary
    timeline: Data


class Explained(NamedTuple):
    """A request whose time is explained."""

    started_unix_ns: int
    whole_ns: int
    data: Data


class ReportData:
    """Collects the parts of a report.

    Args:
        scan: The journals.
        hashed: Name requests by their digests.
        chosen: Requests that the timeline is narrowed to, ``(run, request id)``; empty for all.
        most_bars: Bars of the timeline.
    """

    def __init__(
        self, scan: Scan, *, hashed: bool = False, chosen: Sequence[tuple[Run, int]] = (), most_bars: int = MOST_BARS
    ) -> None:
        self.scan = scan
        self.runs = runs_of(scan.processes)
        self._hashed = hashed
        self._chosen = [(run.key, request_id) for run, request_id in chosen]
        self._most_bars = most_bars
        self._segments = [(run, segment) for run in self.runs for segment in run.segments]
        self.zero_ns = min(
            (segment.process.facts.monotonic_ns + segment.offset_ns for _, segment in self._segments), default=0
        )

    def build(self, findings: Sequence[Data] | None, progress: Callable[[int, int], object] | None = None) -> Data:
        """Everything.

        Args:
            findings: What the rules found, None where they weren't run.
            progress: Called now and then with what is done and what there is to do.
        """
        tell = progress or _untold
        tell(0, 2)
        rows = self._map(
            [functools.partial(rows_of, run) for run in self.runs],
            [sum(s.process.records for s in r.segments) for r in self.runs],
        )
        tell(1, 2)
        listed = self._listed(rows)
        explained, parts = self._explained_and_parts(self._worth_explaining(listed))
        tell(2, 2)
        summary = Summary()
        for part in parts:
            summary.merge(part.summary)
        summary.lost_records = self.scan.lost
        return {
            "kind": "report",
            "version": __version__,
            "start_unix_ns": str(self.zero_ns),
            "summary": summary_data(summary),
            "requests": {
                "total": sum(len(each) for each in rows),
                "rows": [self._row(key, row, explained.get(key)) for key, row in listed],
            },
            "timeline": self._timeline(parts),
            "findings": findings,
            "processes": [process_data(run, segment) for run, segment in self._segments],
            "runs": [run.label for run in self.runs],
            "notes": self._notes(),
        }

    def _explained_and_parts(
        self, keys: Sequence[tuple[int, int]]
    ) -> tuple[dict[tuple[int, int], Explained], Sequence[Part]]:
        of_runs = {run: [request_id for at, request_id in keys if at == run] for run, _ in keys}
        explaining = [functools.partial(self._explain, *each) for each in of_runs.items()]
        costs = [
            sum(segment.last - segment.first for segment in self.runs[run].segments) // 6 + len(ids) * _EXPLANATION
            for run, ids in of_runs.items()
        ]
        window = None
        told: list[Any] = []
        if self._chosen:  # where they lie says what the parts are to draw
            told = self._map(explaining, costs)
            window = self._window(list(told))
            explaining, costs = [], []
        made = self._map(
            [*explaining, *(functools.partial(self._part, run, segment, window) for run, segment in self._segments)],
            [*costs, *(segment.last - segment.first for _, segment in self._segments)],
        )
        told += made[: len(explaining)]
        return {key: each for of_run in told for key, each in of_run.items()}, made[len(explaining) :]

    def _map(self, tasks: Sequence[Callable[[], Any]], weights: Sequence[int]) -> list[Any]:
        workers = len(os.sched_getaffinity(0)) if sum(weights) >= _FORK_FROM else 1
        return in_processes(tasks, weights, workers=workers)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _listed(self, rows: Sequence[Sequence[RequestRow]]) -> list[tuple[tuple[int, int], RequestRow]]:
        """The chosen ones; without a choice those that waited longest for their KV, and those that missed most."""
        found = [((at, row.request_id), row) for at, of_run in enumerate(rows) for row in of_run]
        if self._chosen:
            return [each for each in found if (self.runs[each[0][0]].key, each[0][1]) in self._chosen]
        if len(found) <= MOST_LISTED:
            return found
        slow = sorted(found, key=lambda each: -each[1].kv_ns)[: MOST_LISTED // 2]
        missed = sorted(found, key=lambda each: -each[1].missed_tokens)[: MOST_LISTED // 2]
        keys = {key for key, _ in (*slow, *missed)}
        return [each for each in found if each[0] in keys]

    def _worth_explaining(self, listed: Sequence[tuple[tuple[int, int], RequestRow]]) -> list[tuple[int, int]]:
        return [key for key, _ in sorted(listed, key=lambda each: -each[1].kv_ns)[:MOST_EXPLAINED]]

    def _explain(self, number: int, request_ids: Sequence[int]) -> dict[tuple[int, int], Explained]:
        """Some requests of a run. May run in a child."""
        run, found = self.runs[number], {}
        for segment in run.segments:
            segment.learn(frozenset(request_ids))
        for request_id in request_ids:
            told = explain(run, request_id, hashed=self._hashed)
            if told is not None:
                found[number, request_id] = Explained(told.started_unix_ns, told.whole_ns, self._told(run, told))
        return found

    def _row(self, key: tuple[int, int], row: RequestRow, told: Explained | None) -> Data:
        run = self.runs[key[0]]
        data: Data = {
            "key": f"{key[0]}:{run.request_label(row.request_id, hashed=self._hashed)}",
            "label": run.request_label(row.request_id, hashed=self._hashed),
            "run": key[0],
            "start": row.first_ns + run.leader.offset_ns - self.zero_ns,
            "prompt": row.prompt_tokens,
            "computed": row.computed_tokens,
            "offered": row.offered_tokens,
            "honoured": row.honoured_tokens,
            "missed": row.missed_tokens,
            "reason": row.miss_reason and row.miss_reason.value,
            "bytes": row.loaded_bytes,
            "kv_ns": row.kv_ns,
            "stall_ns": row.stall_ns,
        }
        if told is not None:
            data["told"] = told.data
        return data

    def _told(self, run: Run, told: Explanation) -> Data:
        story = told.story
        bars: list[list[Any]] = []
        zero = self.zero_ns
        for segment in run.segments:
            timeline = Timeline(segment.facts)
            shift = segment.offset_ns - zero
            for _, record in segment.of_request(told.request_id):
                for bar in timeline.feed(record):
                    if told.request_id in bar.requests and bar.lane.row is not Row.REQUESTS:
                        facts = bar_facts(bar, functools.partial(run.request_label, hashed=self._hashed))
                        facts.pop("request", None)
                        name = bar.lane.label if bar.lane.label.startswith(bar.name.split(" ")[0]) else bar.name
                        bars.append(
                            [
                                segment.facts.rank,
                                name,
                                bar.lane.row,
                                bar.start_ns + shift,
                                bar.end_ns - bar.start_ns,
                                facts,
                            ]
                        )
        bars.sort(key=_begun)
        return {
            "verdict": verdict(told),
            "whole_ns": told.whole_ns,
            "start": told.started_unix_ns - zero,
            "parts": told.parts,
            "load_ns": told.load_ns,
            "load_hidden_ns": told.load_hidden_ns,
            "trace_id": told.trace_id,
            "stored": story.stored_tokens,
            "staged": story.staged_tokens,
            "bounding": story.bounding_layer_group,
            "loaded": told.tokens(Direction.LOAD),
            "saved": told.tokens(Direction.SAVE),
            "moved": [
                {
                    "rank": rank, "way": moved.direction.value, "group": moved.layer_group, "tier": moved.tier.value,
                    "source": moved.source.value, "bytes": moved.nbytes, "pages": moved.pages, "ns": moved.time_ns,
                    "stall_ns": moved.stall_ns, "failures": moved.failures,
                }
                for rank, moved in told.moved()
            ],
            "store": [
                {
                    "name": operation.value, "operations": stored.operations, "failures": stored.failures,
                    "requests": stored.requests, "bytes": stored.nbytes, "ns": stored.time_ns,
                }
                for operation, stored in told.stored().items()
            ],
            "errors": sorted({error for rank in told.ranks for error in rank.story.errors}),
            "bars": bars,
        }  # fmt: skip

    # -- the timeline -------------------------------------------------------------------------------------------------

    def _window(self, told: Sequence[dict[tuple[int, int], Explained]]) -> tuple[int, int] | None:
        """Where the chosen requests lie, in Unix time; None for everything."""
        spans = [(e.started_unix_ns, e.started_unix_ns + e.whole_ns) for of_run in told for e in of_run.values()]
        return (min(begin for begin, _ in spans), max(end for _, end in spans)) if spans else None

    def _part(self, run: Run, segment: Segment, window: tuple[int, int] | None) -> Part:
        """One pass over a process's records. May run in a child."""
        offset = segment.offset_ns
        begin, end = (0, (1 << 63) - 1) if window is None else (window[0] - offset, window[1] - offset)
        most = max(1000, self._most_bars // len(self._segments))
        if segment.is_large:
            into = Into(
                SummaryView(), Timeline(segment.facts), Picture(most, _width(segment, most, end - begin)), begin, end
            )
            from tracekv.views.bulk import take_in_bulk  # numpy's import takes longer than a small report

            take_in_bulk(segment, into)
        else:
            into = Into(SummaryView(), Timeline(), Picture(most), begin, end)
            take_each(segment, into)
        into.take(into.timeline.close())
        return Part(into.view.summary, self._drawn(run, segment, into.picture))

    def _drawn(self, run: Run, segment: Segment, picture: Picture) -> Data:
        label = functools.partial(run.request_label, hashed=self._hashed)
        number, shift = self.runs.index(run), segment.offset_ns - self.zero_ns
        names: dict[str, int] = {}
        lanes: list[Data] = []
        for lane, found in picture.kept():
            tracks = Tracks(0)
            bars: list[list[Any]] = []
            for each in found:
                if isinstance(each, Many):
                    name = next(iter(each.names)) if len(each.names) == 1 else "several"
                    requests = [f"{number}:{label(request)}" for request in each.requests] + ["+"] * each.has_more
                    place = tracks.among(lane, each.first_ns, each.last_ns)
                    facts: Data = {"busy_ns": each.busy_ns, "longest_ns": each.longest_ns, "names": each.names}
                    if each.errors:
                        facts["error"] = f"{each.errors} failed"
                    start, length, count = each.first_ns, each.last_ns - each.first_ns, each.count
                else:
                    name = each.name if each.layer < 0 else f"{each.name} {each.layer}"
                    if each.lane.row is Row.REQUESTS:
                        name = f"{name} {label(each.requests[0])}"
                    requests = [f"{number}:{label(request)}" for request in each.requests]
                    place = tracks.among(lane, each.start_ns, each.end_ns)
                    facts = bar_facts(each, label)
                    start, length, count = each.start_ns, each.end_ns - each.start_ns, 1
                index = names.setdefault(name, len(names))
                bars.append([place, start + shift, length, index, count, requests, facts])
            lanes.append(
                {"label": lane.label, "row": lane.row.name.lower(), "tracks": tracks.count(lane), "bars": bars}
            )
        facts_of = segment.process.facts
        rank = "" if segment.facts.rank is None else f"rank {segment.facts.rank} · "
        return {
            "name": f"{rank}{facts_of.host} pid {facts_of.pid}",
            "run": number,
            "rank": segment.facts.rank,
            "lanes": lanes,
            "names": list(names),
            "bars": picture.bars,
            "width_ns": picture.width_ns,
        }

    def _timeline(self, parts: Sequence[Part]) -> Data:
        processes = [part.timeline for part in parts]
        every = [bar for process in processes for lane in process["lanes"] for bar in lane["bars"]]
        return {
            "processes": processes,
            "begin": min((bar[1] for bar in every), default=0),
            "end": max((bar[1] + bar[2] for bar in every), default=1),
            "bars": sum(process["bars"] for process in processes),
            "drawn": len(every),
            "width_ns": max((process["width_ns"] for process in processes), default=0),
            "narrowed": bool(self._chosen),
        }

    # -- what else there is to know ----------------------------------------------------------------------------------

    def _notes(self) -> list[str]:
        notes = [*self.scan.left_out]
        if self.scan.lost:
            notes.append(
                f"{self.scan.lost:,} records were overwritten before they were read: the numbers are too small by what they held"
            )
        for process in self.scan.processes:
            name = f"{process.facts.host} pid {process.facts.pid}"
            notes += [
                f"{path.name} is cut short: {cut:,} bytes after its last whole entry"
                for path, cut in process.truncated_bytes.items()
            ]
            if process.is_alive():
                notes.append(f"{name} still runs: this is what it had recorded by now")
        return notes


def _width(segment: Segment, most: int, longest: int) -> int:
    """What a picture begins with: a power of two that is about as wide as bars have to be, where some lanes share what may be drawn.

    Args:
        longest: Of a process's time as much is drawn, at the most.
    """
    times = [
        record.started_ns
        for first, last in ((segment.first, segment.first + _EDGE), (segment.last - _EDGE, segment.last))
        for record in segment.select(Call, BindCall, first=first, last=last)
        if isinstance(record, Call)
    ]
    span = max(times) - min(times) if times else 0
    drawn = min(longest, span)
    if (segment.last - segment.first) * drawn <= most * span:
        return _FINEST_NS  # the picture itself finds how wide the bars of a few records have to be
    return max(_FINEST_NS, 1 << (drawn * _LANES // most).bit_length() >> 1)


def _begun(bar: list[Any]) -> tuple[int, int]:
    return bar[3], -bar[4]


def _untold(_done: int, _total: int) -> None:
    """Nobody looks."""

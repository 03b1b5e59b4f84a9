"""Journals as Chrome trace events, which Perfetto, ``chrome://tracing`` and others open.

A process per journal, a track per lane (a further one where bars of a lane overlap), counters of the bytes in flight and the
bandwidth each way, and arrows from loads to their first use. Times are microseconds with three decimals from the first process's
start, so that a nanosecond is told apart; ``otherData`` says when that was.

Source: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from tracekv._version import __version__
from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.reader import JournalState
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Callback, Source
from tracekv.views.bar_facts import bar_facts
from tracekv.views.clock import unix_offsets
from tracekv.views.facts import callback_name
from tracekv.views.first_use import Arrow, FirstUses
from tracekv.views.rates import Level, TransferRates
from tracekv.views.runs import Run, Segment, runs_of
from tracekv.views.timeline import Bar, Lane, Row, Timeline
from tracekv.views.tracks import TRACKS_OF_A_PROCESS, Tracks

_encode = msgspec.json.Encoder().encode
_FAR_RANK = 1_000_000

Event = dict[str, Any]


def write_perfetto(processes: Sequence[ProcessScan], out: BinaryIO, *, hash_request_ids: bool = False) -> int:
    """Write everything that the journals hold as one JSON object, as it is read; returns how many events.

    Raises:
        OSError: ``out`` can't be written.
    """
    offsets = unix_offsets(process.facts for process in processes)
    starts = [each.facts.monotonic_ns + offset for each, offset in zip(processes, offsets, strict=True)]
    zero = min(starts, default=0)
    out.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
    count = 0
    known = {
        scan.facts.process_id: _Process(number, zero - offset, hash_request_ids=hash_request_ids)
        for number, (scan, offset) in enumerate(zip(processes, offsets, strict=True), 1)
    }
    for run in runs_of(processes):
        for segment in run.segments:
            for event in known[segment.process.facts.process_id].events(run, segment):
                out.write((b",\n" if count else b"") + _encode(event))
                count += 1
    lost = sum(process.lost for process in processes)
    told = {"tool": f"tracekv {__version__}", "start_unix_ns": str(zero), "records_lost": lost}
    out.write(b'\n],"otherData":' + _encode(told) + b"}\n")
    return count


class _Process:
    """The events of one journal; ``zero_ns`` is the monotonic time at which the trace begins."""

    def __init__(self, number: int, zero_ns: int, *, hash_request_ids: bool) -> None:
        self._pid = number
        self._zero_ns = zero_ns
        self._hash = hash_request_ids
        self._tracks = Tracks(number * TRACKS_OF_A_PROCESS)
        self._arrows = 0

    def events(self, run: Run, segment: Segment) -> Iterator[Event]:
        """Those of one of its engines; they come in the order of their runs."""
        self._label = functools.partial(run.request_label, hashed=self._hash)
        self._uses = FirstUses()
        timeline, rates = Timeline(segment.facts), TransferRates()
        for record in segment.select():
            for bar in timeline.feed(record):
                yield from self._bar(bar)
            if isinstance(record, Transfer) and record.source is not Source.PLANNED:
                for level in rates.add(record):
                    yield from self._level(level)
        for bar in timeline.close():
            yield from self._bar(bar)
        for level in rates.close():
            yield from self._level(level)
        if segment.is_latest:
            yield from self._in_progress(segment.process.state())
            yield from self._names(segment)

    def _bar(self, bar: Bar) -> Iterator[Event]:
        track = self._tracks.place(bar.lane, bar.start_ns, bar.end_ns)
        event: Event = {
            "ph": "X",
            "pid": self._pid,
            "tid": track,
            "ts": self._us(bar.start_ns),
            "cat": bar.lane.row.name.lower(),
            "name": self._name(bar),
            "args": bar_facts(bar, self._label),
        }
        if bar.lane.row is Row.EVENTS:
            event |= {"ph": "i", "s": "t"}
        else:
            event["dur"] = _us(bar.end_ns - bar.start_ns)
        yield event
        for arrow in self._uses.feed(bar, track):
            yield from self._arrow(arrow)

    def _name(self, bar: Bar) -> str:
        if bar.lane.row is Row.REQUESTS:
            return f"{bar.name} {self._label(bar.requests[0])}"
        return bar.name if bar.layer < 0 else f"{bar.name} {bar.layer}"

    def _arrow(self, arrow: Arrow) -> Iterator[Event]:
        self._arrows += 1
        load, use = arrow.load.bar, arrow.use.bar
        # Both ends lie inside their bars: a viewer looks for the bar around them.
        leaves = max(load.start_ns, load.end_ns - 1)
        arrives = min(max(use.start_ns, leaves), max(use.start_ns, use.end_ns - 1))
        both: Event = {
            "cat": "first_use",
            "name": "first use",
            "id": self._pid * TRACKS_OF_A_PROCESS + self._arrows,
            "pid": self._pid,
        }
        yield {"ph": "s", "tid": arrow.load.track, "ts": self._us(leaves), **both}
        yield {"ph": "f", "bp": "e", "tid": arrow.use.track, "ts": self._us(arrives), **both}

    def _level(self, level: Level) -> Iterator[Event]:
        source = "" if level.source is Source.REPORTED else f" ({level.source.value})"
        at: Event = {"ph": "C", "pid": self._pid, "ts": self._us(level.at_ns), "cat": "transfers"}
        name = f"{level.direction.value}{source}"
        yield {**at, "name": f"{name}: bytes in flight", "args": {"bytes": level.bytes_in_flight}}
        yield {**at, "name": f"{name}: bandwidth", "args": {"bytes_per_s": level.bytes_per_s}}

    def _in_progress(self, state: JournalState) -> Iterator[Event]:
        """The callback, or the layer hook, that the process is in, or was in when it died: a bar without an end."""
        if not state.callback:
            return
        number, layer, since = state.callback, "", state.since_ns
        for callback, hooks in ((Callback.WAIT_FOR_LAYER_LOAD, state.waits), (Callback.SAVE_KV_LAYER, state.saves)):
            for hook in hooks:
                if not hook.ended_ns and hook.started_ns >= since:
                    number, layer, since = callback, f" {hook.layer}", hook.started_ns
        side, method = callback_name(number)
        lane = Lane(Row.SCHEDULER if side.value == "scheduler" else Row.WORKER)
        track = self._tracks.place(lane, since, 1 << 62)
        yield {
            "ph": "B", "pid": self._pid, "tid": track, "ts": self._us(since), "cat": lane.row.name.lower(),
            "name": f"{method}{layer}, not left",
        }  # fmt: skip

    def _names(self, segment: Segment) -> Iterator[Event]:
        facts, process = segment.facts, segment.process.facts
        rank = "" if facts.rank is None else f"rank {facts.rank}, "
        name = f"{rank}{process.host} pid {process.pid}"
        order = _FAR_RANK + self._pid if facts.rank is None else facts.rank
        yield self._metadata("process_name", {"name": name})
        yield self._metadata("process_sort_index", {"sort_index": order})
        for lane, place, track in self._tracks.all():
            yield self._metadata("thread_name", {"name": lane.label + (f" ({place + 1})" if place else "")}, track)
            yield self._metadata("thread_sort_index", {"sort_index": track}, track)

    def _metadata(self, name: str, args: dict[str, Any], track: int = 0) -> Event:
        return {"ph": "M", "pid": self._pid, "tid": track, "ts": msgspec.Raw(b"0"), "name": name, "args": args}

    def _us(self, monotonic_ns: int) -> msgspec.Raw:
        return _us(max(0, monotonic_ns - self._zero_ns))


def _us(ns: int) -> msgspec.Raw:
    """Nanoseconds as a JSON number of microseconds, every digit of it."""
    return msgspec.Raw(b"%d.%03d" % divmod(ns, 1000))

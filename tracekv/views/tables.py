"""Flat tables of what journals hold, for spreadsheets and data frames: one row per request, transfer, call, miss or store operation.

Every row names its process, so that tables of several ranks can be put below each other. Times are Unix nanoseconds and durations
nanoseconds; what isn't told is an empty cell.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, BinaryIO, NamedTuple

from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.records import (
    Call,
    CallCounts,
    IdlePolls,
    LayerHooks,
    Lookup,
    Record,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.views import ids
from tracekv.views.facts import callback_name, count_pages, hook_times
from tracekv.views.runs import Segment, runs_of
from tracekv.views.stories import KINDS, Stories
from tracekv.views.story import Story
from tracekv.views.timeline import requests_of

Cell = Any
Row = Iterable[Cell]
_PROCESS = ("host", "pid", "rank", "run")
_CALLS: tuple[type[Record], ...] = (Call, *Call.__subclasses__())


class Source(NamedTuple):
    """One process's part of a run, with what its rows need."""

    segment: Segment
    label: Callable[[int], str]

    @property
    def offset_ns(self) -> int:
        """What turns its monotonic times into Unix times."""
        return self.segment.offset_ns

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Host, pid, rank, run."""
        facts, process = self.segment.facts, self.segment.process.facts
        return process.host, process.pid, facts.rank, ids.run_label(facts.run_id) if facts.run_id else None


def sources_of(scans: Sequence[ProcessScan], *, hash_request_ids: bool = False) -> list[Source]:
    """The engines of some journals, rank by rank."""
    return [
        Source(segment, functools.partial(run.request_label, hashed=hash_request_ids))
        for run in runs_of(scans)
        for segment in run.segments
    ]


class Table(NamedTuple):
    """A table: the columns after those of the process, and its rows, as they are read."""

    columns: tuple[str, ...]
    rows: Callable[[Source], Iterator[Row]]


def write_csv(table: Table, sources: Iterable[Source], out: BinaryIO) -> int:
    """Write a table as CSV with a header (RFC 4180, UTF-8); returns how many rows.

    Raises:
        OSError: ``out`` can't be written.
    """
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=False)
    try:
        writer = csv.writer(text)
        writer.writerow((*_PROCESS, *table.columns))
        rows = 0
        for source in sources:
            head = source.cells
            for row in table.rows(source):
                writer.writerow((*head, *map(_cell, row)))
                rows += 1
        text.flush()
        return rows
    finally:
        text.detach()


def _cell(value: Cell) -> Cell:
    match value:
        case Enum():
            return value.value
        case bool():
            return int(value)
        case bytes():
            return value.hex()
        case list() | tuple():
            return " ".join(str(each) for each in value)
        # A cell that begins like a formula is one for a spreadsheet, whatever wrote it.
        case str() if value[:1] in "=+-@\t\r" and value:
            return f"'{value}"
    return value


_STORY = (
    "prompt_tokens", "computed_tokens", "offered_tokens", "honoured_tokens", "is_async", "stored_tokens", "staged_tokens",
    "miss_reason", "bounding_layer_group", "queries", "query_ns", "lookup_ns", "waited_ns", "steps", "scheduled_tokens",
    "resets", "dropped_blocks", "prefetched_blocks", "keeps_pages", "held_pages", "held_ns",
)  # fmt: skip
_WAYS = tuple(f"{way.value}_{what}" for way in Direction for what in ("tokens", "pages", "bytes", "stall_ns"))


def _requests(source: Source) -> Iterator[Row]:
    if not source.segment.facts.has_scheduler:
        return
    stories = Stories()
    for record in source.segment.select(*KINDS):
        for story in stories.feed(record):
            yield _story(source, story)
    for story in stories.close():
        yield _story(source, story)


def _story(source: Source, story: Story) -> Row:
    client = None if story.client_id is None else source.label(story.client_id)
    yield from (source.label(story.request_id), client, story.outcome, story.started_ns + source.offset_ns)
    yield from (story.ended_ns - story.started_ns, *(getattr(story, name) for name in _STORY))
    for way in Direction:
        yield from (story.tokens(way), story.pages(way), story.nbytes(way), story.stall_ns(way))


_TRANSFER = (
    "direction", "source", "tier", "step", "layer_group", "nbytes", "tokens", "queued_ns", "read_ns", "verify_ns", "copy_ns",
    "stall_ns", "error",
)  # fmt: skip


def _transfers(source: Source) -> Iterator[Row]:
    for record in source.segment.select(Transfer):
        assert isinstance(record, Transfer)
        pages = count_pages(record.pages)
        yield (
            source.label(record.request_id), record.started_ns + source.offset_ns, record.ended_ns - record.started_ns, pages,
            *(getattr(record, name) for name in _TRANSFER),
        )  # fmt: skip


def _callbacks(source: Source) -> Iterator[Row]:
    for record in source.segment.select(*_CALLS, IdlePolls, LayerHooks, CallCounts):
        match record:
            case Call():
                side, method = callback_name(record.callback)
                took = record.ended_ns - record.started_ns
                requests = [source.label(request_id) for request_id in requests_of(record)]
                at = record.started_ns + source.offset_ns
                yield side, method, at, took, 1, took, took, record.step, None, requests, record.error
            case IdlePolls():
                at, took = record.first_started_ns + source.offset_ns, record.last_ended_ns - record.first_started_ns
                poll = Callback.GET_FINISHED
                yield (
                    poll.side,
                    poll.method,
                    at,
                    took,
                    record.count,
                    record.sum_ns,
                    record.max_ns,
                    record.step,
                    None,
                    (),
                    None,
                )
            case CallCounts():
                at, took = record.started_ns + source.offset_ns, record.ended_ns - record.started_ns
                for number, calls, sum_ns, max_ns in record.callbacks:
                    yield *callback_name(number), at, took, calls, sum_ns, max_ns, record.step, None, (), None
            case LayerHooks():
                yield from _hooks(source, record)


def _hooks(source: Source, record: LayerHooks) -> Iterator[Row]:
    for hook, payload in ((Callback.WAIT_FOR_LAYER_LOAD, record.waits), (Callback.SAVE_KV_LAYER, record.saves)):
        groups: dict[int, list[tuple[int, int]]] = {}
        for layer, (started, ended) in enumerate(hook_times(payload)):
            if started and ended:
                groups.setdefault(source.segment.facts.group_of_layer(layer), []).append((started, ended))
        for group, times in groups.items():
            first, last = times[0][0], times[-1][1]
            took = [ended - started for started, ended in times]
            at = first + source.offset_ns
            yield (
                hook.side,
                hook.method,
                at,
                last - first,
                len(took),
                sum(took),
                max(took),
                record.step,
                group,
                (),
                None,
            )


_LOOKUP = (
    "reason", "prompt_tokens", "computed_tokens", "stored_tokens", "staged_tokens", "offered_tokens", "bounding_layer_group",
    "group_tokens", "waited_ns",
)  # fmt: skip


def _misses(source: Source) -> Iterator[Row]:
    for record in source.segment.select(Lookup):
        assert isinstance(record, Lookup)
        if record.reason is not None:
            yield (
                source.label(record.request_id), record.started_ns + source.offset_ns, record.ended_ns - record.started_ns,
                *(getattr(record, name) for name in _LOOKUP),
            )  # fmt: skip


_STORE = (
    "operation", "outcome", "engine", "bucket", "key", "layer_group", "blocks", "nbytes", "attempts", "requests", "queued_ns",
    "transfer_ns", "verify_ns", "breaker", "error",
)  # fmt: skip


def _store_operations(source: Source) -> Iterator[Row]:
    for record in source.segment.select(StoreOperation):
        assert isinstance(record, StoreOperation)
        request = None if record.request_id is None else source.label(record.request_id)
        yield (
            request, record.started_ns + source.offset_ns, record.ended_ns - record.started_ns,
            *(getattr(record, name) for name in _STORE),
        )  # fmt: skip


#: By name; findings of the rules are a table too, which :mod:`tracekv.cli.export` makes, since views know no rules.
TABLES: Mapping[str, Table] = {
    "requests": Table(
        ("request_id", "client_id", "outcome", "started_unix_ns", "duration_ns", *_STORY, *_WAYS), _requests
    ),
    "transfers": Table(("request_id", "started_unix_ns", "duration_ns", "pages", *_TRANSFER), _transfers),
    "callbacks": Table(
        (
            "side", "callback", "started_unix_ns", "duration_ns", "calls", "sum_ns", "max_ns", "step", "layer_group", "request_ids",
            "error",
        ),
        _callbacks,
    ),
    "misses": Table(("request_id", "started_unix_ns", "duration_ns", *_LOOKUP), _misses),
    "store_operations": Table(("request_id", "started_unix_ns", "duration_ns", *_STORE), _store_operations),
}  # fmt: skip

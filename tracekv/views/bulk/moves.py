"""The transfers of a large run, and its store's operations: what there is most of beside the callbacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tracekv.journal.arrays import np
from tracekv.journal.columns import NIL, Columns, Ints, Rows, alike
from tracekv.journal.process_scan import Batch
from tracekv.journal.records import Record, StoreOperation, Transfer
from tracekv.journal.vocabulary import Direction, Operation, Outcome, Source, Tier
from tracekv.views.bulk.drawing import Spans, draw, own_bars, take_alike
from tracekv.views.into import Into
from tracekv.views.runs import Segment
from tracekv.views.story import Moved
from tracekv.views.timeline import Lane, lane_of_store, lane_of_transfers


def take_moves(segment: Segment, into: Into) -> None:
    """The transfers and the operations of a store of a process; the requests that they are for are told elsewhere."""
    for found in segment.batches_by_kind(Transfer, StoreOperation):
        _take_transfers(segment, found[Transfer], into)
        _take_operations(segment, found[StoreOperation], into)


def _take_transfers(segment: Segment, batch: Batch, into: Into) -> None:
    columns = Columns(Transfer, batch.payloads)
    directions, sources, tiers = columns.words(Direction), columns.words(Source), columns.words(Tier)
    requests, _, groups = columns.ints(), columns.ints(), columns.ints()
    slots, absent = columns.counts()
    nbytes, tokens, starts, ends = (columns.ints() for _ in range(4))
    parts = [columns.ints() for _ in range(5)]
    columns.nil()
    _take_decoded(segment, np.flatnonzero(columns.odd), batch, into)
    into.view.summary.records += int((~columns.odd).sum())
    took = np.maximum(ends - starts, 0)
    sums = (slots - absent, nbytes, tokens, took, *parts)
    for (way, source, tier, group), rows in alike(~columns.odd, directions[0], sources[0], tiers[0], groups):
        direction, told_by, where = directions[1][way], sources[1][source], tiers[1][tier]
        totals = [int(column[rows].sum()) for column in sums]
        into.view.moved(Moved(direction, group, where, told_by, len(rows), 0, *totals))
        _draw(*lane_of_transfers(direction, group, told_by, where), segment, rows, starts, ends, requests, batch, into)


def _take_operations(segment: Segment, batch: Batch, into: Into) -> None:
    columns = Columns(StoreOperation, batch.payloads)
    operations, outcomes = columns.words(Operation), columns.words(Outcome)
    columns.skip(3)
    requests = columns.optional_ints()
    columns.skip(3)
    nbytes = columns.ints()
    columns.skip()
    starts, ends = columns.ints(), columns.ints()
    columns.skip(4)
    columns.nil()
    asked = columns.ints()
    _take_decoded(segment, np.flatnonzero(columns.odd), batch, into)
    into.view.summary.records += int((~columns.odd).sum())
    for (operation, outcome), rows in alike(~columns.odd, operations[0], outcomes[0]):
        kind = operations[1][operation], outcomes[1][outcome]
        into.view.stored(*kind, len(rows), int(asked[rows].sum()), int(nbytes[rows].sum()))
        _draw(*lane_of_store(*kind), segment, rows, starts, ends, requests, batch, into)


def _take_decoded(segment: Segment, rows: Rows, batch: Batch, into: Into) -> None:
    """What failed, one by one; and what has more in it than columns hold."""
    by_lane: defaultdict[tuple[Lane, str], list[Record]] = defaultdict(list)
    for at in rows.tolist():
        record = segment.process.decoded(batch.payloads[at])
        if isinstance(record, Transfer) and record.error is None:
            by_lane[lane_of_transfers(record.direction, record.layer_group, record.source, record.tier)].append(record)
        elif isinstance(record, StoreOperation) and record.error is None:
            by_lane[lane_of_store(record.operation, record.outcome)].append(record)
        elif record is not None:
            into.view.feed(record)
            into.take(into.timeline.bars(record))
    for (lane, name), records in by_lane.items():
        take_alike(lane, name, records, into)


def _draw(
    lane: Lane,
    name: str,
    segment: Segment,
    rows: Rows,
    starts: Ints,
    ends: Ints,
    requests: Ints,
    batch: Batch,
    into: Into,
) -> None:
    def named(places: Rows) -> Iterator[int]:
        return (request for request in requests[rows[places]].tolist() if request != NIL)

    draw(lane, name, Spans(starts[rows], ends[rows], own_bars(segment, batch.payloads, rows, into), named), into)

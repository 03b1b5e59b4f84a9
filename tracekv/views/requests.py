"""All requests of some runs, a row each: what a person chooses from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from tracekv.journal.records import AllocCall, FinishCall, Lookup, QueryCall, Transfer
from tracekv.journal.vocabulary import Direction, MissReason, Source
from tracekv.views.runs import Run, Segment, clock_of


class RequestRow(msgspec.Struct):
    """One request, in a line.

    Attributes:
        kv_ns: From its first query to the end of its last load on whichever rank; of the query alone where nothing was loaded.
        stall_ns: The longest that a rank's pass waited for its loads, as the connector tells it.
        first_ns: When it was first queried, on the leader's clock.
    """

    request_id: int
    prompt_tokens: int | None = None
    computed_tokens: int = 0
    offered_tokens: int = 0
    honoured_tokens: int | None = None
    miss_reason: MissReason | None = None
    kv_ns: int = 0
    stall_ns: int = 0
    loaded_bytes: int = 0
    first_ns: int = 0
    last_ns: int = 0
    is_finished: bool = False

    @property
    def served_tokens(self) -> int:
        """Tokens that the runtime took of the offer; all of it where it doesn't tell."""
        return self.offered_tokens if self.honoured_tokens is None else self.honoured_tokens

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were neither on the device nor served; the last one is always computed."""
        return max(0, (self.prompt_tokens or 0) - 1 - self.computed_tokens - self.served_tokens)


def rows_of(run: Run) -> list[RequestRow]:
    """The requests of a run, in the order in which they were first queried."""
    rows: dict[int, RequestRow] = {}
    for segment in run.segments:
        clock = clock_of(segment, run.leader)
        _take_calls(segment, rows, clock)
        _take_loads(segment, rows, clock)
    for row in rows.values():
        row.kv_ns = max(0, row.last_ns - row.first_ns)
    return sorted((row for row in rows.values() if row.first_ns), key=lambda row: row.first_ns)


def _take_calls(segment: Segment, rows: dict[int, RequestRow], clock: Callable[[int], int]) -> None:
    for record in segment.select(QueryCall, Lookup, AllocCall, FinishCall):
        row = rows.setdefault(record.request_id, RequestRow(record.request_id))  # type: ignore[attr-defined]  # each has one
        match record:
            case QueryCall():
                row.prompt_tokens = record.prompt_tokens if record.prompt_tokens is not None else row.prompt_tokens
                row.computed_tokens, row.offered_tokens = record.computed_tokens, record.offered_tokens
                row.honoured_tokens = None
                row.first_ns = row.first_ns or clock(record.started_ns)
                row.last_ns = max(row.last_ns, clock(record.ended_ns))
            case Lookup():
                row.miss_reason = record.reason
            case AllocCall():
                row.honoured_tokens = record.honoured_tokens
            case FinishCall():
                row.is_finished = True


def _take_loads(segment: Segment, rows: dict[int, RequestRow], clock: Callable[[int], int]) -> None:
    stalls: dict[int, int] = {}
    for request_id, ended_ns, nbytes, stall_ns in _loads(segment):
        row = rows.get(request_id)
        if row is not None:
            row.last_ns = max(row.last_ns, clock(ended_ns))
            row.loaded_bytes += nbytes
            stalls[request_id] = stalls.get(request_id, 0) + stall_ns
    for request_id, stall_ns in stalls.items():
        rows[request_id].stall_ns = max(rows[request_id].stall_ns, stall_ns)


def _loads(segment: Segment) -> Iterable[tuple[int, int, int, int]]:
    """Request, end, bytes and stall of loads, several of a request in one where that is known."""
    if segment.is_large:
        from tracekv.views.bulk.loads import loads_of  # numpy's import takes longer than a small journal

        return loads_of(segment)
    return (
        (record.request_id, record.ended_ns, record.nbytes, record.stall_ns)
        for record in segment.select(Transfer)
        if isinstance(record, Transfer) and is_load(record)
    )


def is_load(record: Transfer) -> bool:
    """Whether a transfer counts as a load here: as a connector reports it."""
    return record.direction is Direction.LOAD and record.source is Source.REPORTED


def slowest(rows: Sequence[RequestRow], most: int) -> list[RequestRow]:
    """Those that waited longest from query to the end of their loads."""
    return sorted(rows, key=lambda row: -row.kv_ns)[:most]


def missed(rows: Sequence[RequestRow], most: int) -> list[RequestRow]:
    """Those that had the most tokens computed for want of a hit."""
    return sorted((row for row in rows if row.missed_tokens), key=lambda row: -row.missed_tokens)[:most]

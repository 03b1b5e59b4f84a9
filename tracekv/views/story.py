"""The story of one request: what was asked, offered, honoured, moved and missed, collected from records.

A story is what a request's root span carries and what a person asks for afterwards. It holds plain facts; nothing is derived
that the records don't say.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    Drop,
    Enqueued,
    Finding,
    FinishCall,
    FinishedCall,
    Lookup,
    Prefetch,
    QueryCall,
    Record,
    RequestResetCall,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Direction, MissReason, Operation, Source, Tier
from tracekv.views.facts import MOVED, callback_name, count_pages


class Moved(msgspec.Struct):
    """KV that moved one way between the pages of one layer group and one tier.

    Attributes:
        tokens: Tokens whose KV moved; a request's tokens count once per layer group.
        queued_ns, read_ns, verify_ns, copy_ns, stall_ns: Parts of the time, as far as the connector tells them.
    """

    direction: Direction
    layer_group: int
    tier: Tier
    source: Source
    transfers: int = 0
    failures: int = 0
    pages: int = 0
    nbytes: int = 0
    tokens: int = 0
    time_ns: int = 0
    queued_ns: int = 0
    read_ns: int = 0
    verify_ns: int = 0
    copy_ns: int = 0
    stall_ns: int = 0

    def add(self, transfer: Transfer) -> None:
        """Count a transfer; a failed one moved nothing that counts."""
        self.time_ns += max(0, transfer.ended_ns - transfer.started_ns)
        self.queued_ns += transfer.queued_ns
        self.read_ns += transfer.read_ns
        self.verify_ns += transfer.verify_ns
        self.copy_ns += transfer.copy_ns
        self.stall_ns += transfer.stall_ns
        if transfer.error is not None:
            self.failures += 1
            return
        self.transfers += 1
        self.pages += count_pages(transfer.pages)
        self.nbytes += transfer.nbytes
        self.tokens += transfer.tokens


class Stored(msgspec.Struct):
    """Store operations of one kind for one request; ``requests`` is what was asked of the server for them."""

    operations: int = 0
    failures: int = 0
    nbytes: int = 0
    time_ns: int = 0
    requests: int = 0

    def add(self, record: StoreOperation) -> None:
        """Count one; a failed one moved nothing that counts."""
        self.operations += 1
        self.requests += record.requests
        self.time_ns += max(0, record.ended_ns - record.started_ns)
        if record.outcome in MOVED:
            self.nbytes += record.nbytes
        else:
            self.failures += 1

    def merge(self, other: Stored) -> None:
        """Add those of another process."""
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class Story(msgspec.Struct):
    """One request in one process. Times are the process's monotonic nanoseconds; None is "not told".

    A replayed request is queried again: the numbers of the query, the lookup and the allocation are those of the last one, while
    what moved adds up.

    Attributes:
        started_ns: Enqueue where it was recorded, else the start of the first query.
        prompt_tokens: Tokens of the prompt that were queried; ``computed_tokens`` of them were on the device already.
        moved: What moved, by direction, layer group, tier and source; sums are of the best source there is.
        rules: Rules that were broken for it.
        allocated_pages: Pages per layer group of the last allocation, blocks without a page left out.
        held_ns: From ``request_finished`` to the ``get_finished`` that gave kept pages back; None while they are held.
        loaded_at_ns, saved_at_ns: When ``get_finished`` of this process named it so.
        store_reads, store_puts: Store operations for it: how many, bytes, time.
        errors: ``callback: Error`` of callbacks of this request that raised, and of transfers and store operations that failed.
        first_step, last_step: Passes that it was in, 0 for none; the first began at ``first_pass_ns``.
        outcome: "" while open, then ``finished`` or ``abandoned``.
        records_lost: Records overwritten unread while the story was open.
    """

    request_id: int
    started_ns: int
    last_ns: int
    ended_ns: int = 0
    client_id: int | None = None
    enqueued_ns: int | None = None
    traceparent: str | None = None
    queries: int = 0
    query_ns: int = 0
    first_query_ns: int | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    offered_tokens: int | None = None
    honoured_tokens: int | None = None
    is_async: bool = False
    lora_id: int | None = None
    stored_tokens: int | None = None
    staged_tokens: int | None = None
    group_tokens: list[int] = []
    bounding_layer_group: int | None = None
    miss_reason: MissReason | None = None
    rules: list[str] = []
    lookup_ns: int = 0
    waited_ns: int = 0
    key: bytes | None = None
    moved: list[Moved] = []
    allocated_pages: list[int] = []
    steps: int = 0
    scheduled_tokens: int = 0
    resets: int = 0
    dropped_blocks: int = 0
    prefetched_blocks: int = 0
    keeps_pages: bool = False
    held_pages: int = 0
    held_since_ns: int | None = None
    held_ns: int | None = None
    loaded_at_ns: int | None = None
    saved_at_ns: int | None = None
    store_reads: Stored = msgspec.field(default_factory=Stored)
    store_puts: Stored = msgspec.field(default_factory=Stored)
    errors: list[str] = []
    first_step: int = 0
    last_step: int = 0
    first_pass_ns: int | None = None
    finished_ns: int | None = None
    outcome: str = ""
    records_lost: int = 0

    def feed(self, record: Record) -> None:
        """Take any record; one that doesn't concern this request changes nothing."""
        request_id = self.request_id
        match record:
            case BuildCall():
                if request_id in record.request_ids:
                    self.scheduled((record,), record.scheduled_tokens[record.request_ids.index(request_id)])
            case FinishedCall():
                self.polled(record)
            case Enqueued(request_id=same) if same == request_id:
                self.enqueued(record)
            case QueryCall(request_id=same) if same == request_id:
                self.queried(record)
            case Lookup(request_id=same) if same == request_id:
                self.looked_up(record)
            case AllocCall(request_id=same) if same == request_id:
                self.allocated(record)
            case Transfer(request_id=same) if same == request_id:
                self.transferred(record)
            case StoreOperation(request_id=same) if same == request_id:
                self.stored(record)
            case Drop(request_id=same) if same == request_id:
                self.dropped(record)
            case Prefetch(request_id=same) if same == request_id:
                self.prefetched(record)
            case RequestResetCall(request_id=same) if same == request_id:
                self.reset(record)
            case FinishCall(request_id=same) if same == request_id:
                self.finished(record)
            case Finding(request_id=same) if same == request_id:
                self.found(record)
        if isinstance(record, Call) and record.error is not None and getattr(record, "request_id", None) == request_id:
            self._failed(f"{callback_name(record.callback)[1]}: {record.error}")

    def enqueued(self, record: Enqueued) -> None:
        """The request entered the engine."""
        self.client_id = record.client_id
        self.enqueued_ns = record.at_ns
        self.started_ns = min(self.started_ns, record.at_ns)
        self.prompt_tokens = record.prompt_tokens
        self.traceparent = record.traceparent
        self._touch(record.at_ns)

    def queried(self, record: QueryCall) -> None:
        """The runtime asked what the connector can offer."""
        self.queries += 1
        self.query_ns += record.ended_ns - record.started_ns
        if self.first_query_ns is None:
            self.first_query_ns = record.started_ns
            self.started_ns = min(self.started_ns, record.started_ns)
        self.client_id = record.client_id if record.client_id is not None else self.client_id
        self.prompt_tokens = record.prompt_tokens if record.prompt_tokens is not None else self.prompt_tokens
        self.computed_tokens = record.computed_tokens
        self.offered_tokens = record.offered_tokens
        self.honoured_tokens = None
        self.is_async = record.is_async
        self.lora_id = record.lora_id
        self._touch(record.ended_ns)

    def looked_up(self, record: Lookup) -> None:
        """The connector told how its offer came about."""
        self.stored_tokens = record.stored_tokens
        self.staged_tokens = record.staged_tokens
        self.group_tokens = list(record.group_tokens)
        self.bounding_layer_group = record.bounding_layer_group
        self.miss_reason = record.reason
        self.lookup_ns += max(0, record.ended_ns - record.started_ns)
        self.waited_ns += record.waited_ns
        self.key = record.key
        self._touch(record.ended_ns)

    def allocated(self, record: AllocCall) -> None:
        """The runtime gave pages, and said how much of the offer it took."""
        self.honoured_tokens = record.honoured_tokens
        self.allocated_pages = [count_pages(slots) for slots in record.pages]
        self._touch(record.ended_ns)

    def scheduled(self, passes: Sequence[BuildCall], tokens: int) -> None:
        """The request is part of some passes, which follow one another, with so many tokens together."""
        last = passes[-1]
        self.steps += len(passes)
        self.scheduled_tokens += tokens
        self.last_step = last.step
        if self.first_pass_ns is None:
            self.first_step, self.first_pass_ns = passes[0].step, passes[0].started_ns
        # As _touch does; a long run has millions of these.
        if last.ended_ns > self.last_ns:
            self.last_ns = last.ended_ns

    def transferred(self, record: Transfer) -> None:
        """KV moved."""
        self._moved(record.direction, record.layer_group, record.tier, record.source).add(record)
        if record.error is not None:
            self._failed(f"{record.direction.value}: {record.error}")
        self._touch(record.ended_ns)

    def stored(self, record: StoreOperation) -> None:
        """The store was asked for something of it."""
        if record.operation is Operation.READ:
            self.store_reads.add(record)
        elif record.operation is Operation.PUT:
            self.store_puts.add(record)
        if record.outcome not in MOVED and record.operation in (Operation.READ, Operation.PUT):
            self._failed(f"store {record.operation.value}: {record.outcome.value}")
        self._touch(record.ended_ns)

    def polled(self, record: FinishedCall) -> None:
        """``get_finished`` answered, on any rank."""
        if self.request_id in record.loading_returned:
            self.loaded_at_ns = record.ended_ns
            self._touch(record.ended_ns)
        if self.request_id in record.saving_returned:
            self.saved_at_ns = record.ended_ns
            self.released(record.ended_ns)

    def dropped(self, record: Drop) -> None:
        """Blocks were given up."""
        self.dropped_blocks += record.blocks
        self._touch(record.at_ns)

    def found(self, record: Finding) -> None:
        """A rule was broken."""
        if record.rule not in self.rules:
            self.rules.append(record.rule)

    def prefetched(self, record: Prefetch) -> None:
        """Something became of blocks that were read ahead."""
        self.prefetched_blocks += record.blocks
        self._touch(record.at_ns)

    def reset(self, record: RequestResetCall) -> None:
        """The request is going to be replayed."""
        self.resets += 1
        self._touch(record.ended_ns)

    def finished(self, record: FinishCall) -> None:
        """The engine is done with the request; its pages may be kept."""
        self.keeps_pages = record.keeps_pages
        self.finished_ns = record.ended_ns
        self._touch(record.ended_ns)
        if record.keeps_pages and record.error is None:
            self.held_pages = sum(map(count_pages, record.pages))
            self.held_since_ns = record.ended_ns

    def released(self, at_ns: int) -> None:
        """``get_finished`` gave the kept pages back."""
        if self.held_since_ns is not None:
            self.held_ns = max(0, at_ns - self.held_since_ns)
        self._touch(at_ns)

    def tokens(self, direction: Direction) -> int:
        """Tokens whose KV moved: per layer group they add up, over the groups the largest counts."""
        by_group: dict[int, int] = {}
        for moved in self._all(direction, None):
            by_group[moved.layer_group] = by_group.get(moved.layer_group, 0) + moved.tokens
        return max(by_group.values(), default=0)

    def nbytes(self, direction: Direction, layer_group: int | None = None) -> int:
        """Bytes that moved, of one layer group or of all."""
        return sum(m.nbytes for m in self._all(direction, layer_group))

    def pages(self, direction: Direction, layer_group: int | None = None) -> int:
        """Pages that moved, of one layer group or of all."""
        return sum(m.pages for m in self._all(direction, layer_group))

    def stall_ns(self, direction: Direction) -> int:
        """Time that the forward pass waited for what moved, as far as the connector tells it."""
        return sum(m.stall_ns for m in self._all(direction, None))

    def tiers(self, direction: Direction) -> list[str]:
        """Tiers that KV moved from or to, in alphabetical order."""
        return sorted({m.tier.value for m in self._all(direction, None)})

    def layer_groups(self) -> list[int]:
        """Layer groups of which anything moved."""
        return sorted({m.layer_group for m in self.moved})

    def _all(self, direction: Direction, layer_group: int | None) -> list[Moved]:
        # The same bytes can be known twice, as reported and as observed: the best source counts.
        of_direction = [m for m in self.moved if m.direction is direction]
        best = next((source for source in Source if any(m.source is source for m in of_direction)), None)
        return [m for m in of_direction if m.source is best and layer_group in (None, m.layer_group)]

    def _moved(self, direction: Direction, layer_group: int, tier: Tier, source: Source) -> Moved:
        for known in self.moved:
            if (
                known.layer_group == layer_group
                and known.direction is direction
                and known.tier is tier
                and known.source is source
            ):
                return known
        fresh = Moved(direction, layer_group, tier, source)
        self.moved.append(fresh)
        return fresh

    def _failed(self, error: str) -> None:
        if error not in self.errors:
            self.errors.append(error)

    def _touch(self, at_ns: int) -> None:
        self.last_ns = max(self.last_ns, at_ns)

"""Staging: store -> arena, on threads of its own; each block is verified when it arrives.

A query asks for a run of blocks and gets a :class:`Ticket`. Blocks that are in the arena are pinned for it at once, the others
are read. What failed is forgotten by the index, so the next query doesn't count on it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns

import tracekv
from tracekv.journal.vocabulary import MissReason, Operation, Outcome
from tracekv_fsspec.arena import Arena, Slot
from tracekv_fsspec.format import HEADER_BYTES, BadObject, check_block, padded, parse_header
from tracekv_fsspec.index import Index, Place, Segment, Shard
from tracekv_fsspec.paths import path_digest
from tracekv_fsspec.store import Range, Store
from tracekv_fsspec.store_errors import MISS_OF, StoreError

_log = logging.getLogger("tracekv.fsspec")

READERS = 8
#: How much one task reads from a segment; several are in flight.
BATCH_BYTES = 4 << 20


@dataclass
class ReadTimes:
    """What reading cost a ticket, summed over its blocks of a shard."""

    queued_ns: int = 0
    read_ns: int = 0
    verify_ns: int = 0

    def add(self, share: float, queued_ns: int, read_ns: int, verify_ns: int) -> None:
        """Add a shard's share of what a batch cost."""
        self.queued_ns += int(share * queued_ns)
        self.read_ns += int(share * read_ns)
        self.verify_ns += int(share * verify_ns)


class Ticket:
    """A run of a chain's blocks on its way into the arena. Only :class:`Reader` changes it, under its lock.

    Attributes:
        start: Ordinal of the first block.
        times: By shard, for the blocks that this ticket had read.
    """

    def __init__(self, request_id: int | None, keys: Sequence[bytes], start: int, shards: Sequence[Shard]) -> None:
        self.request_id = request_id
        self.keys = keys
        self.start = start
        self.slots: dict[Shard, list[Slot | None]] = {shard: [] for shard in shards}
        self.is_read: dict[Shard, bytearray] = {shard: bytearray(len(keys)) for shard in shards}
        self.times: dict[Shard, ReadTimes] = {shard: ReadTimes() for shard in shards}
        self.reasons: dict[int, MissReason] = {}
        self.outstanding = 0
        self.taken = 0
        self.is_closed = False
        self._frontier = 0

    def staged_blocks(self) -> int:
        """How many blocks from ``start`` on are staged for every shard, without a gap."""
        ends = []
        for slots in self.slots.values():
            try:
                ends.append(slots.index(None, self._frontier, len(self.keys)))
            except ValueError:
                ends.append(len(self.keys))
        self._frontier = min(ends)
        return self._frontier

    def is_settled(self) -> bool:
        """Whether more waiting can't lengthen the staged run."""
        staged = self.staged_blocks()
        return self.outstanding == 0 or staged == len(self.keys) or staged in self.reasons

    def reason(self) -> MissReason | None:
        """Why the staged run ends where it does; None where it is whole."""
        staged = self.staged_blocks()
        if staged == len(self.keys):
            return None
        return self.reasons.get(staged, MissReason.NOT_STAGED)


@dataclass
class _Wanted:
    """A block that is being read, and who waits for it."""

    shard: Shard
    place: Place
    waiting: list[tuple[Ticket, int]] = field(default_factory=list)


@dataclass
class _Batch:
    """Blocks of one segment that are read by one task, in rising order of offset.

    Attributes:
        followers: Batches of the same segment that wait until this one has found its header right.
    """

    segment: Segment
    wanted: list[_Wanted]
    owner: Ticket
    queued_ns: int
    followers: list[_Batch] = field(default_factory=list)


class Reader:
    """The threads that read.

    Args:
        deployment: Digest that a segment's header has to carry.
        layout: Fingerprint that it has to carry.
    """

    def __init__(self, store: Store, index: Index, arena: Arena, *, deployment: bytes, layout: bytes) -> None:
        self._store = store
        self._index = index
        self._arena = arena
        self._deployment = deployment
        self._layout = layout
        self._shards = arena.shards
        self._changed = threading.Condition()
        self._in_flight: dict[tuple[Shard, bytes], _Wanted] = {}
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tracekv-read-{number}", daemon=True) for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def stage(self, keys: Sequence[bytes], start: int, *, request_id: int | None = None) -> Ticket:
        """Begin to stage blocks ``start`` ... of a chain; ``keys`` are theirs. Returns at once, does no I/O."""
        ticket = Ticket(request_id, keys, start, self._shards)
        missing: list[_Wanted] = []
        with self._changed:
            for shard in self._shards:
                slots = ticket.slots[shard] = self._arena.pin_each(shard, keys)
                for number, slot in enumerate(slots):
                    if slot is None:
                        self._want(ticket, shard, number, missing)
        for batch in _batches(missing, ticket):
            self._batches.put(batch)
        return ticket

    def wait(self, ticket: Ticket, seconds: float) -> None:
        """Wait until the ticket is settled, at most so long. Does no I/O."""
        deadline = monotonic() + seconds
        with self._changed:
            while not ticket.is_settled():
                left = deadline - monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def take(self, ticket: Ticket) -> tuple[int, MissReason | None]:
        """Close the ticket; the pins of its staged run go over to the caller.

        What is still being read goes on into the arena, and stays pinned until the last of it has come, so that the
        tail of a long prompt doesn't evict its head.

        Returns:
            How many blocks from ``ticket.start`` on the caller now owns a pin of, for each shard; and why not more.
        """
        with self._changed:
            ticket.taken = ticket.staged_blocks()
            reason = ticket.reason()
            ticket.is_closed = True
            self._release_if_done(ticket)
            return ticket.taken, reason

    def close(self, seconds: float) -> None:
        """Stop reading; what waits is settled as a miss."""
        with self._changed:
            self._is_closed = True
        for _ in self._threads:
            self._batches.put(None)
        deadline = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _want(self, ticket: Ticket, shard: Shard, number: int, missing: list[_Wanted]) -> None:
        key = ticket.keys[number]
        place = self._index.place(shard, key)
        if place is None or self._is_closed:
            ticket.reasons.setdefault(number, MissReason.NOT_STORED if place is None else MissReason.STORE_DOWN)
            return
        if place.block.length != self._arena.page_bytes(shard):
            ticket.reasons.setdefault(number, MissReason.CORRUPT)
            self._index.quarantine_block(shard, place, Outcome.FOREIGN)
            return
        wanted = self._in_flight.get((shard, key))
        if wanted is None:
            wanted = self._in_flight[shard, key] = _Wanted(shard, place)
            missing.append(wanted)
        wanted.waiting.append((ticket, number))
        ticket.outstanding += 1

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                if self._is_closed:
                    self._fail(_all_wanted(batch), MissReason.STORE_DOWN)
                else:
                    self._read(batch)
            except Exception:
                _log.exception("tracekv: reading from %s failed in an unforeseen way", self._store.url)
                self._fail(_all_wanted(batch), MissReason.ERROR)

    def _read(self, batch: _Batch) -> None:
        segment = batch.segment
        filled: list[tuple[_Wanted, Slot]] = []
        try:
            for wanted in batch.wanted:
                slot = self._arena.allocate(wanted.shard)
                if slot is None:
                    break
                filled.append((wanted, slot))
            self._fail(batch.wanted[len(filled) :], MissReason.ARENA_FULL)
            if not filled:
                self._fail([w for follower in batch.followers for w in follower.wanted], MissReason.ARENA_FULL)
                return
            self._fetch(batch, filled)
        finally:
            # Delivered slots are taken out of the list; what is left was not filled.
            for _, slot in filled:
                self._arena.abandon(slot)
        if segment.fault is None:
            for follower in batch.followers:
                self._batches.put(follower)
        else:
            reason = MISS_OF.get(segment.fault, MissReason.STORE_DOWN)
            self._fail([w for follower in batch.followers for w in follower.wanted], reason)

    def _fetch(self, batch: _Batch, filled: list[tuple[_Wanted, Slot]]) -> None:
        segment = batch.segment
        started = perf_counter_ns()
        ranges = [Range(w.place.block.offset, padded(w.place.block.length)) for w, _ in filled]
        into = [self._arena.view(slot) for _, slot in filled]
        if not segment.is_checked:
            ranges.insert(0, Range(0, HEADER_BYTES))
            into.insert(0, memoryview(bytearray(HEADER_BYTES)))
        blocks, outcome, message = len(filled), Outcome.OK, None
        failed: list[tuple[_Wanted, MissReason]] = []
        try:
            self._store.read(segment.path, ranges, into)
            read_ns = perf_counter_ns() - started
            if not segment.is_checked:
                self._check_header(segment, into[0])
            failed = [(w, MissReason.CORRUPT) for w, slot in filled if not _is_intact(w, slot, self._arena)]
        except (StoreError, BadObject) as error:
            read_ns = perf_counter_ns() - started
            outcome, message = error.outcome, str(error)
            failed = [(w, MISS_OF.get(outcome, MissReason.STORE_DOWN)) for w, _ in filled]
            if outcome in MISS_OF:
                forgotten = self._index.quarantine_segment(segment, outcome)
                _log.warning(
                    "tracekv: %s is %s, %d blocks forgotten: %s", segment.path, outcome.value, forgotten, error
                )
        else:
            for wanted, _ in failed:
                outcome, message = Outcome.ALTERED, f"{len(failed)} of {blocks} blocks differ from their checksums"
                self._index.quarantine_block(wanted.shard, wanted.place, Outcome.ALTERED)
        verify_ns = perf_counter_ns() - started - read_ns
        with self._changed:
            for shard, count in Counter(wanted.shard for wanted, _ in filled).items():
                batch.owner.times[shard].add(count / blocks, started - batch.queued_ns, read_ns, verify_ns)
        self._deliver(filled, {id(wanted) for wanted, _ in failed})
        for wanted, reason in failed:
            self._fail([wanted], reason)
        tracekv.store_operation(
            Operation.READ, outcome, self._store.engine, started_ns=started, nbytes=sum(r.length for r in ranges),
            blocks=blocks, bucket=self._store.bucket, key=path_digest(segment.path), request_id=batch.owner.request_id,
            rank=segment.rank, queued_ns=started - batch.queued_ns, transfer_ns=read_ns, verify_ns=verify_ns,
            error=message,
        )  # fmt: skip

    def _check_header(self, segment: Segment, data: memoryview) -> None:
        header = parse_header(data)
        found = (
            header.deployment, header.layout, header.namespace, header.writer, header.sequence, header.rank,
            header.world, header.total_bytes,
        )  # fmt: skip
        expected = (
            self._deployment, self._layout, segment.namespace, segment.writer, segment.sequence, segment.rank,
            segment.world, segment.size,
        )  # fmt: skip
        if found != expected:
            raise BadObject(Outcome.FOREIGN, "segment that isn't the one its manifest names")
        segment.is_checked = True

    def _deliver(self, filled: list[tuple[_Wanted, Slot]], failed: set[int]) -> None:
        """Make verified blocks findable, and pin them for whoever waits. Leaves in ``filled`` what failed."""
        verified = [pair for pair in filled if id(pair[0]) not in failed]
        filled[:] = [pair for pair in filled if id(pair[0]) in failed]
        with self._changed:
            for wanted, slot in verified:
                shard, key = wanted.shard, wanted.place.block.key
                held = self._arena.commit(slot, key)
                self._in_flight.pop((shard, key), None)
                for ticket, number in wanted.waiting:
                    ticket.slots[shard][number] = self._arena.pin(shard, key)
                    ticket.is_read[shard][number] = 1
                    ticket.outstanding -= 1
                    self._release_if_done(ticket)
                self._arena.unpin_each([held])
            self._changed.notify_all()

    def _fail(self, failed: Sequence[_Wanted], reason: MissReason) -> None:
        if not failed:
            return
        with self._changed:
            for wanted in failed:
                place = (wanted.shard, wanted.place.block.key)
                if self._in_flight.get(place) is not wanted:
                    continue
                del self._in_flight[place]
                for ticket, number in wanted.waiting:
                    ticket.reasons.setdefault(number, reason)
                    ticket.outstanding -= 1
                    self._release_if_done(ticket)
            self._changed.notify_all()

    def _release_if_done(self, ticket: Ticket) -> None:
        if not ticket.is_closed or ticket.outstanding:
            return
        for slots in ticket.slots.values():
            # The tail first, so that a chain loses its end before its beginning.
            self._arena.unpin_each(slot for slot in reversed(slots[ticket.taken :]) if slot is not None)
            del slots[ticket.taken :]


def _is_intact(wanted: _Wanted, slot: Slot, arena: Arena) -> bool:
    try:
        check_block(wanted.place.block, arena.view(slot))
    except BadObject:
        return False
    return True


def _batches(missing: list[_Wanted], owner: Ticket) -> list[_Batch]:
    """Group by segment, in rising order of offset, in pieces of :data:`BATCH_BYTES`."""
    by_segment: dict[int, list[_Wanted]] = {}
    for wanted in missing:
        by_segment.setdefault(id(wanted.place.segment), []).append(wanted)
    now = perf_counter_ns()
    ready = []
    for group in by_segment.values():
        group.sort(key=lambda wanted: wanted.place.block.offset)
        segment = group[0].place.segment
        batches = [_Batch(segment, [], owner, now)]
        size = 0
        for wanted in group:
            length = padded(wanted.place.block.length)
            if size and size + length > BATCH_BYTES:
                batches.append(_Batch(segment, [], owner, now))
                size = 0
            batches[-1].wanted.append(wanted)
            size += length
        if segment.is_checked:
            ready += batches
        else:
            batches[0].followers = batches[1:]
            ready.append(batches[0])
    return ready


def _all_wanted(batch: _Batch) -> list[_Wanted]:
    return [wanted for each in (batch, *batch.followers) for wanted in each.wanted]

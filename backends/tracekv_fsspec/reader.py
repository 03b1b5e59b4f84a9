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
from time import monotonic, perf_counter_ns, time

from tracekv.journal.vocabulary import MissReason, Operation, Outcome
from tracekv_fsspec.arena import Arena, Slot
from tracekv_fsspec.format import HEADER_BYTES, BadObject, aligned, check_block, padded, parse_header
from tracekv_fsspec.index import Index, Place, Run, Segment, Shard
from tracekv_fsspec.report import Report, reported
from tracekv_fsspec.store import Range, Store
from tracekv_fsspec.store_errors import MISS_OF, StoreError

_log = logging.getLogger("tracekv.fsspec")

READERS = 8
#: How much one task reads from a segment; several are in flight.
BATCH_BYTES = 4 << 20


class ReadTimes:
    """What reading cost a ticket, summed over its blocks of a shard."""

    def __init__(self) -> None:
        self.queued_ns = 0
        self.read_ns = 0
        self.verify_ns = 0

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


class _Wanted:
    """A block that is being read, and who waits for it. There are thousands per query, so it is flat."""

    __slots__ = ("checksum", "key", "length", "offset", "run", "shard", "stored_bytes", "waiting")

    def __init__(self, shard: Shard, key: bytes, run: Run, place: Place, ticket: Ticket, number: int) -> None:
        self.shard = shard
        self.key = key
        self.run = run
        self.offset, self.length, self.checksum = place
        self.stored_bytes = padded(self.length)
        self.waiting = [(ticket, number)]


class _HeaderCheck:
    """What became of a segment's header, for those who read other parts of the segment at the same time."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reason: MissReason | None = MissReason.ERROR


class _Batch:
    """Blocks of one segment that are read by one task, in rising order of offset.

    Attributes:
        header: Who has to be right before the blocks are; None where the segment's header was checked before.
        reads_header: Whether this batch finds out.
    """

    def __init__(self, wanted: list[_Wanted], owner: Ticket, queued_ns: int, header: _HeaderCheck | None) -> None:
        self.segment = wanted[0].run.segment
        self.wanted = wanted
        self.owner = owner
        self.queued_ns = queued_ns
        self.header = header
        self.reads_header = False


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
                unstaged = [number for number, slot in enumerate(slots) if slot is None]
                found = self._index.locate(shard, [keys[number] for number in unstaged])
                for number, located in zip(unstaged, found, strict=True):
                    self._want(ticket, shard, number, located, missing)
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

    def _want(
        self, ticket: Ticket, shard: Shard, number: int, located: tuple[Run, Place] | None, missing: list[_Wanted]
    ) -> None:
        if located is None or self._is_closed:
            ticket.reasons.setdefault(number, MissReason.NOT_STORED if located is None else MissReason.STORE_DOWN)
            return
        run, place = located
        key = ticket.keys[number]
        if place.length != self._arena.page_bytes(shard):
            ticket.reasons.setdefault(number, MissReason.CORRUPT)
            self._index.quarantine_block(run, key, Outcome.FOREIGN)
            return
        wanted = self._in_flight.get((shard, key))
        if wanted is None:
            wanted = self._in_flight[shard, key] = _Wanted(shard, key, run, place, ticket, number)
            missing.append(wanted)
        else:
            wanted.waiting.append((ticket, number))
        ticket.outstanding += 1

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                if self._is_closed:
                    self._fail(batch.wanted, MissReason.STORE_DOWN)
                else:
                    self._read(batch)
            except Exception:
                _log.exception("tracekv: reading from %s failed in an unforeseen way", self._store.url)
                self._fail(batch.wanted, MissReason.ERROR)
            finally:
                if batch.reads_header and batch.header is not None:
                    batch.header.done.set()

    def _read(self, batch: _Batch) -> None:
        slots = self._arena.allocate_each([wanted.shard for wanted in batch.wanted])
        filled = list(zip(batch.wanted, slots, strict=False))
        try:
            self._fail(batch.wanted[len(filled) :], MissReason.ARENA_FULL)
            if filled:
                self._fetch(batch, filled)
            elif batch.header is not None and batch.reads_header:
                batch.header.reason = MissReason.ARENA_FULL
        finally:
            # Delivered slots are taken out of the list; what is left was not filled.
            for _, slot in filled:
                self._arena.abandon(slot)

    def _fetch(self, batch: _Batch, filled: list[tuple[_Wanted, Slot]]) -> None:
        segment = batch.segment
        ranges = [Range(wanted.offset, wanted.stored_bytes) for wanted, _ in filled]
        into = self._arena.view_each([slot for _, slot in filled])
        if batch.reads_header:
            ranges.insert(0, Range(0, HEADER_BYTES))
            into.insert(0, aligned(HEADER_BYTES))
        queued_ns = perf_counter_ns() - batch.queued_ns
        failed: dict[int, MissReason] = {}
        with reported(
            self._store, Operation.READ, segment.path, nbytes=sum(r.length for r in ranges), blocks=len(filled),
            queued_ns=queued_ns, request_id=batch.owner.request_id, rank=segment.rank,
        ) as report:  # fmt: skip
            reading = perf_counter_ns()
            try:
                self._store.read(segment.path, ranges, into)
                report.transfer_ns = perf_counter_ns() - reading
                failed = self._verify(batch, filled, into, report)
            except (StoreError, BadObject) as error:
                report.transfer_ns = report.transfer_ns or perf_counter_ns() - reading
                report.failed(error)
                reason = MISS_OF.get(error.outcome, MissReason.STORE_DOWN)
                failed = dict.fromkeys(range(len(filled)), reason)
                self._give_up(batch, error, reason)
            report.verify_ns = perf_counter_ns() - reading - report.transfer_ns
            segment.used_at = int(time())
            with self._changed:
                for shard, count in Counter([wanted.shard for wanted, _ in filled]).items():
                    share = count / len(filled)
                    batch.owner.times[shard].add(share, queued_ns, report.transfer_ns, report.verify_ns)
        wanted_of = [wanted for wanted, _ in filled]
        self._deliver(filled, failed)
        while filled:  # before anybody is told, so that who is told finds the slots free
            self._arena.abandon(filled.pop()[1])
        for number, reason in failed.items():
            self._fail([wanted_of[number]], reason)

    def _verify(
        self, batch: _Batch, filled: list[tuple[_Wanted, Slot]], into: list[memoryview], report: Report
    ) -> dict[int, MissReason]:
        """Check header and blocks; which of them are wrong, and why."""
        header = batch.header
        if batch.reads_header and header is not None:
            self._check_header(batch.segment, into.pop(0))
            header.reason = None
            header.done.set()
        failed: dict[int, MissReason] = {}
        for number, ((wanted, _), view) in enumerate(zip(filled, into, strict=True)):
            try:
                check_block(view, wanted.length, wanted.checksum)
            except BadObject:
                failed[number] = MissReason.CORRUPT
                self._index.quarantine_block(wanted.run, wanted.key, Outcome.ALTERED)
        if failed:
            report.outcome = Outcome.ALTERED
            report.error = f"{len(failed)} of {len(filled)} blocks differ from their checksums"
            _log.warning("tracekv: %s: %s; they are forgotten", batch.segment.path, report.error)
        if header is not None and not batch.reads_header:
            # Who reads it came earlier in the same queue, so it is on its way.
            header.done.wait()
            if header.reason is not None:
                return dict.fromkeys(range(len(filled)), header.reason)
        return failed

    def _give_up(self, batch: _Batch, error: StoreError | BadObject, reason: MissReason) -> None:
        if batch.reads_header and batch.header is not None:
            batch.header.reason = reason
        if error.outcome in MISS_OF:
            forgotten = self._index.quarantine_segment(batch.segment, error.outcome)
            _log.warning(
                "tracekv: %s is %s, %d blocks forgotten: %s", batch.segment.path, error.outcome.value, forgotten, error
            )

    def _check_header(self, segment: Segment, data: memoryview) -> None:
        header = parse_header(data)
        found = (
            header.deployment, header.layout, header.namespace, header.writer, header.sequence, header.rank,
            header.world, header.total_bytes,
        )  # fmt: skip
        expected = (
            self._deployment, self._layout, segment.namespace, *segment.commit, segment.rank, segment.world, segment.size,
        )  # fmt: skip
        if found != expected:
            raise BadObject(Outcome.FOREIGN, "segment that isn't the one its manifest names")
        segment.is_checked = True

    def _deliver(self, filled: list[tuple[_Wanted, Slot]], failed: dict[int, MissReason]) -> None:
        """Make verified blocks findable, and pin them for whoever waits. Leaves in ``filled`` what failed."""
        verified = [pair for number, pair in enumerate(filled) if number not in failed] if failed else filled[:]
        filled[:] = [pair for number, pair in enumerate(filled) if number in failed]
        with self._changed:
            held = self._arena.commit_each([(slot, wanted.key) for wanted, slot in verified])
            for (wanted, _), slot in zip(verified, held, strict=True):
                shard, key = wanted.shard, wanted.key
                self._in_flight.pop((shard, key), None)
                mine: Slot | None = slot  # the pin of the commit is the first waiter's
                for ticket, number in wanted.waiting:
                    ticket.slots[shard][number] = mine or self._arena.pin(shard, key)
                    mine = None
                    ticket.is_read[shard][number] = 1
                    ticket.outstanding -= 1
                    self._release_if_done(ticket)
            self._changed.notify_all()

    def _fail(self, failed: Sequence[_Wanted], reason: MissReason) -> None:
        if not failed:
            return
        with self._changed:
            for wanted in failed:
                place = (wanted.shard, wanted.key)
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


def _batches(missing: list[_Wanted], owner: Ticket) -> list[_Batch]:
    """Group by segment, in rising order of offset, in pieces of :data:`BATCH_BYTES`."""
    by_segment: dict[int, list[_Wanted]] = {}
    for wanted in missing:
        by_segment.setdefault(id(wanted.run.segment), []).append(wanted)
    now = perf_counter_ns()
    batches: list[_Batch] = []
    for group in by_segment.values():
        group.sort(key=lambda wanted: wanted.offset)
        header = None if group[0].run.segment.is_checked else _HeaderCheck()
        first = len(batches)
        start = size = 0
        for number, wanted in enumerate(group):
            if size and size + wanted.stored_bytes > BATCH_BYTES:
                batches.append(_Batch(group[start:number], owner, now, header))
                start, size = number, 0
            size += wanted.stored_bytes
        batches.append(_Batch(group[start:], owner, now, header))
        batches[first].reads_header = header is not None
    return batches

"""Staging: store -> arena, on threads of its own; each block is verified when it arrives.

A query asks for a run of blocks and gets a :class:`Ticket`. Blocks that are in the arena are pinned for it at once, the others
are read, in the order of the :class:`ReadQueue`. What failed is forgotten by the index, so the next query doesn't count on it.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, perf_counter_ns, time

from tracekv.journal.vocabulary import MissReason, Operation, Outcome
from tracekv_fsspec.arena import Arena
from tracekv_fsspec.fates import Fates
from tracekv_fsspec.format import HEADER_BYTES, BadObject, aligned, parse_header
from tracekv_fsspec.index import Index, Segment, Shard, Stretch
from tracekv_fsspec.read_queue import Batch, Piece, Priority, ReadQueue, Waiting, batches_of
from tracekv_fsspec.report import Report, reported
from tracekv_fsspec.store import Range, Store
from tracekv_fsspec.store_errors import MISS_OF, StoreError
from tracekv_fsspec.tally import tally
from tracekv_fsspec.tickets import Ticket
from tracekv_fsspec.verify import Verifier

__all__ = ["READERS", "Priority", "Reader", "Ticket"]

_log = logging.getLogger("tracekv.fsspec")

READERS = 8


class _HeaderCheck:
    """What became of a segment's header, for those who read other parts of the segment at the same time."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reason: MissReason | None = MissReason.ERROR


class _Filled:
    """A piece and the slots that it is read into."""

    def __init__(self, piece: Piece, numbers: list[int]) -> None:
        self.piece = piece
        self.numbers = numbers
        self.failed: dict[int, MissReason] = {}


class Reader:
    """The threads that read.

    Args:
        fates: Told what arrives and what is taken up.
        deployment: Digest that a segment's header has to carry.
        layout: Fingerprint that it has to carry.
    """

    def __init__(
        self, store: Store, index: Index, arena: Arena, fates: Fates, *, deployment: bytes, layout: bytes
    ) -> None:
        self._store = store
        self._index = index
        self._arena = arena
        self._fates = fates
        self._deployment = deployment
        self._layout = layout
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queued = threading.Condition(self._lock)
        self._in_flight: dict[Shard, dict[bytes, Piece]] = {shard: {} for shard in arena.shards}
        self._queue = ReadQueue(sum(arena.slot_bytes(shard) for shard in arena.shards) * arena.slots_per_shard)
        self._checks: dict[Segment, _HeaderCheck] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tracekv-read-{number}", daemon=True) for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def stage(
        self,
        keys: Sequence[bytes],
        start: int,
        *,
        request_id: int | None = None,
        priority: Priority = Priority.ASKED,
        skipped: Mapping[Shard, int] | None = None,
    ) -> Ticket:
        """Begin to stage blocks ``start`` ... of a chain; ``keys`` are theirs. Returns at once, does no I/O.

        Args:
            skipped: By shard, how many of the first blocks it doesn't need.
        """
        ticket = Ticket(self._arena, request_id, keys, start, skipped)
        is_whole = True
        for shard, numbers in ticket.numbers.items():
            first = ticket.skipped.get(shard, 0)
            pinned = self._arena.pin_run(shard, keys[first:] if first else keys)
            is_whole = is_whole and None not in pinned
            numbers.extend([None] * first)
            numbers.extend(pinned)
        if is_whole:
            ticket.found_whole()
            return ticket
        with self._lock:
            wanted: list[tuple[Shard, Sequence[bytes], Stretch]] = []
            numbers_of: dict[Shard, list[int]] = {}
            for shard in ticket.numbers:
                wanted += self._wanted(ticket, shard, numbers_of)
            for batch in batches_of(wanted, ticket, priority):
                self._enqueue(batch, numbers_of)
            self._hurry(ticket, priority)
        return ticket

    def when_done(self, ticket: Ticket, call: Callable[[], None]) -> None:
        """Have ``call`` made once nothing of the ticket is outstanding; under the lock, so it only takes note."""
        with self._lock:
            if ticket.outstanding:
                ticket.when_done = call
                return
        call()

    def wait(self, ticket: Ticket, seconds: float) -> None:
        """Wait until the ticket is settled, at most so long. Does no I/O."""
        deadline = monotonic() + seconds
        with self._changed:
            self._hurry(ticket, Priority.WAITED)
            while not ticket.is_settled():
                left = deadline - monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def wait_done(self, ticket: Ticket, seconds: float) -> None:
        """Wait until nothing of the ticket is outstanding, at most so long; it may be closed."""
        with self._changed:
            self._changed.wait_for(lambda: not ticket.outstanding, seconds)

    def take(self, ticket: Ticket) -> tuple[int, MissReason | None]:
        """Close the ticket; the pins of its staged run go over to the caller.

        What is still being read goes on into the arena, and stays pinned until the last of it has come, so that the
        tail of a long prompt doesn't evict its head.

        Returns:
            How many blocks from ``ticket.start`` on the caller now owns a pin of, for each shard; and why not more.
        """
        with self._lock:
            ticket.taken = ticket.staged_blocks()
            reason = ticket.reason()
            if ticket.outstanding:
                for piece in ticket.pieces:
                    piece.is_late, piece.late_for = True, ticket.request_id
            self._fates.used(ticket)
            self._close(ticket)
        return ticket.taken, reason

    def leave(self, ticket: Ticket) -> None:
        """Close a ticket of which nothing is taken: what it asked for goes on into the arena."""
        with self._lock:
            self._close(ticket)

    def cancel(self, ticket: Ticket) -> int:
        """Close a ticket, and read nothing more for it that nobody else wants; how many blocks are left unread."""
        unread = 0
        with self._lock:
            for piece in ticket.pieces:
                batch = piece.batch
                mine = [waiting for waiting in piece.waiting if waiting.ticket is ticket]
                if not mine or batch is None or not batch.is_queued:
                    continue
                piece.without(ticket)
                ticket.outstanding -= sum(waiting.blocks for waiting in mine)
                if not piece.waiting:
                    unread += len(piece.keys)
                    self._queue.shrink(batch, piece)
                    self._forget(piece)
            self._close(ticket)
        return unread

    def close(self, seconds: float) -> None:
        """Stop reading; what waits is settled as a miss."""
        with self._lock:
            self._is_closed = True
            left = self._queue.clear()
            self._queued.notify_all()
        for batch in left:
            self._fail_batch(batch, MissReason.STORE_DOWN)
        deadline = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _wanted(
        self, ticket: Ticket, shard: Shard, numbers_of: dict[Shard, list[int]]
    ) -> Iterator[tuple[Shard, Sequence[bytes], Stretch]]:
        """What has to be read of a shard. Blocks that are being read already are joined, those of nowhere get their reasons."""
        numbers = ticket.numbers[shard]
        unstaged = [
            number for number, slot in enumerate(numbers) if slot is None and number >= ticket.skipped.get(shard, 0)
        ]
        keys = [ticket.keys[number] for number in unstaged]
        for number, slot in zip(unstaged, self._arena.pin_run(shard, keys), strict=True):
            numbers[number] = slot  # it may have come meanwhile
        left = []
        in_flight = self._in_flight[shard]
        for number in unstaged:
            if numbers[number] is None:
                piece = in_flight.get(ticket.keys[number])
                if piece is None:
                    left.append(number)
                else:
                    self._join(ticket, piece, number)
        numbers_of[shard] = left
        keys = [ticket.keys[number] for number in left]
        stretches, missing = self._index.stretches(shard, keys)
        for position in missing:
            ticket.reasons.setdefault(left[position], MissReason.NOT_STORED)
        for stretch in stretches:
            if stretch.length == self._arena.page_bytes(shard) and not self._is_closed:
                yield shard, keys, stretch
                continue
            for position in range(stretch.first, stretch.first + stretch.blocks):
                if self._is_closed:
                    ticket.reasons.setdefault(left[position], MissReason.STORE_DOWN)
                else:
                    ticket.reasons.setdefault(left[position], MissReason.CORRUPT)
                    self._index.quarantine_block(stretch.run, keys[position], Outcome.FOREIGN)

    def _join(self, ticket: Ticket, piece: Piece, number: int) -> None:
        at = piece.keys.index(ticket.keys[number])
        last = piece.waiting[-1] if piece.waiting else None
        if (
            last is not None
            and last.ticket is ticket
            and (last.number + last.blocks, last.at + last.blocks) == (number, at)
        ):
            piece.waiting[-1] = last._replace(blocks=last.blocks + 1)
        else:
            piece.waiting.append(Waiting(ticket, number, at, 1))
        if not ticket.pieces or ticket.pieces[-1] is not piece:
            ticket.pieces.append(piece)
        ticket.outstanding += 1

    def _enqueue(self, batch: Batch, numbers_of: Mapping[Shard, list[int]]) -> None:
        ticket = batch.owner
        for piece in batch.pieces:
            for number, at, count in _neighbours(numbers_of[piece.shard][piece.first : piece.first + len(piece.keys)]):
                piece.waiting.append(Waiting(ticket, number, at, count))
            self._in_flight[piece.shard].update(zip(piece.keys, itertools.repeat(piece)))
            ticket.pieces.append(piece)
            ticket.outstanding += len(piece.keys)
        dropped = self._queue.put(batch)
        for each in [batch] if dropped is None else dropped:
            for piece in each.pieces:
                self._fail(piece, range(len(piece.keys)), MissReason.ARENA_FULL)
        self._queued.notify()

    def _hurry(self, ticket: Ticket, priority: Priority) -> None:
        for piece in ticket.pieces:
            if piece.batch is not None:
                self._queue.hurry(piece.batch, priority)

    def _run(self) -> None:
        while True:
            with self._queued:
                while (batch := self._queue.pop()) is None and not self._is_closed:
                    self._queued.wait()
                if batch is None:
                    return
                check, reads_header = self._header_of(batch.segment)
            try:
                self._read(batch, check, reads_header)
            except Exception:
                _log.exception("tracekv: reading from %s failed in an unforeseen way", self._store.url)
                self._fail_batch(batch, MissReason.ERROR)
            finally:
                if reads_header and check is not None:
                    with self._lock:
                        del self._checks[batch.segment]
                    check.done.set()

    def _header_of(self, segment: Segment) -> tuple[_HeaderCheck | None, bool]:
        """Who finds out whether a segment's header is right, where that isn't known; and whether it is the caller."""
        if segment.is_checked:
            return None, False
        check = self._checks.get(segment)
        if check is not None:
            return check, False
        check = self._checks[segment] = _HeaderCheck()
        return check, True

    def _read(self, batch: Batch, check: _HeaderCheck | None, reads_header: bool) -> None:
        filled: list[_Filled] = []
        try:
            for piece in batch.pieces:
                numbers = self._arena.allocate_run(piece.shard, len(piece.keys))
                filled.append(_Filled(piece, numbers))
                if len(numbers) < len(piece.keys):
                    filled[-1].failed = dict.fromkeys(range(len(numbers), len(piece.keys)), MissReason.ARENA_FULL)
            if any(each.numbers for each in filled):
                self._fetch(batch, filled, check, reads_header)
            elif check is not None and reads_header:
                check.reason = MissReason.ARENA_FULL
            for each in filled:  # before anybody is told, so that who is told finds the slots free
                self._give_back_failed(each)
            for each in filled:
                self._deliver(each)
        finally:
            for each in filled:
                self._arena.abandon_run(each.piece.shard, each.numbers)

    def _fetch(self, batch: Batch, filled: list[_Filled], check: _HeaderCheck | None, reads_header: bool) -> None:
        segment = batch.segment
        ranges: list[Range] = []
        into: list[memoryview] = []
        verifier = Verifier()
        whose: list[tuple[_Filled, int]] = []
        for each in filled:
            piece, first = each.piece, 0
            for count, view in self._arena.pieces(piece.shard, each.numbers):
                ranges.append(Range(piece.offset + first * piece.stride, len(view)))
                into.append(view)
                whose.append((each, first))
                verifier.add(view, piece.length, piece.checksums[first : first + count])
                first += count
        header = aligned(HEADER_BYTES) if reads_header else None
        if header is not None:
            ranges.insert(0, Range(0, HEADER_BYTES))
            into.insert(0, header)
            verifier.lead_in()
        queued_ns = perf_counter_ns() - batch.queued_ns
        blocks = {each.piece.shard: 0 for each in filled}
        for each in filled:
            blocks[each.piece.shard] += len(each.numbers)
        with reported(
            self._store, Operation.READ, segment.path, nbytes=sum(r.length for r in ranges), blocks=sum(blocks.values()),
            queued_ns=queued_ns, request_id=batch.owner.request_id, rank=segment.rank,
        ) as report:  # fmt: skip
            reading = perf_counter_ns()
            try:
                tally.progress = verifier
                self._store.read(segment.path, ranges, into)
                report.transfer_ns = perf_counter_ns() - reading - verifier.took_ns
                if header is not None and check is not None:
                    self._check_header(segment, header)
                    check.reason = None
                    check.done.set()
                self._forget_wrong(segment, whose, verifier.finish(), report)
                if check is not None and not reads_header:
                    check.done.wait()  # who reads it began before
                    if check.reason is not None:
                        _fail_all(filled, check.reason)
            except (StoreError, BadObject) as error:
                report.transfer_ns = report.transfer_ns or perf_counter_ns() - reading
                report.failed(error)
                reason = MISS_OF.get(error.outcome, MissReason.STORE_DOWN)
                _fail_all(filled, reason)
                if reads_header and check is not None:
                    check.reason = reason
                self._give_up(segment, error)
            report.verify_ns = perf_counter_ns() - reading - report.transfer_ns
            segment.used_at = int(time())
            with self._lock:
                for shard, count in blocks.items():
                    share = count / sum(blocks.values())
                    batch.owner.times[shard].add(share, queued_ns, report.transfer_ns, report.verify_ns)

    def _forget_wrong(
        self, segment: Segment, whose: list[tuple[_Filled, int]], wrong_of: list[list[int]], report: Report
    ) -> None:
        wrong = 0
        for (each, first), numbers in zip(whose, wrong_of, strict=True):
            for number in numbers:
                wrong += 1
                each.failed[first + number] = MissReason.CORRUPT
                self._index.quarantine_block(each.piece.run, each.piece.keys[first + number], Outcome.ALTERED)
        if wrong:
            report.outcome = Outcome.ALTERED
            report.error = f"{wrong} of {report.blocks} blocks differ from their checksums"
            _log.warning("tracekv: %s: %s; they are forgotten", segment.path, report.error)

    def _give_up(self, segment: Segment, error: StoreError | BadObject) -> None:
        if error.outcome in MISS_OF:
            forgotten = self._index.quarantine_segment(segment, error.outcome)
            _log.warning(
                "tracekv: %s is %s, %d blocks forgotten: %s", segment.path, error.outcome.value, forgotten, error
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

    def _give_back_failed(self, filled: _Filled) -> None:
        if filled.failed:
            unfilled = [slot for number, slot in enumerate(filled.numbers) if number in filled.failed]
            filled.numbers = [slot for number, slot in enumerate(filled.numbers) if number not in filled.failed]
            self._arena.abandon_run(filled.piece.shard, unfilled)

    def _deliver(self, filled: _Filled) -> None:
        """Make verified blocks findable, pinned for whoever waits; say what failed."""
        piece, shard = filled.piece, filled.piece.shard
        good = [number for number in range(len(piece.keys)) if number not in filled.failed]
        slots, filled.numbers = filled.numbers, []
        with self._changed:
            for first, at, count in _neighbours(good):
                keys = piece.keys[first : first + count]
                held = self._arena.commit_run(shard, slots[at : at + count], keys)
                self._fates.arrived(piece, keys)
                for waiting in piece.waiting:
                    self._give(waiting, shard, held, first)
                # The tail first, so that what nobody waits for loses its end before its beginning.
                self._arena.unpin_run(shard, reversed(held))
            reasons: dict[MissReason, list[int]] = {}
            for number, reason in filled.failed.items():
                reasons.setdefault(reason, []).append(number)
            for reason, failed in reasons.items():
                self._fail(piece, failed, reason, is_last=False)
            self._settle(piece)

    def _give(self, waiting: Waiting, shard: Shard, held: list[int], first: int) -> None:
        """Hand a waiting ticket its share of the blocks ``first`` ... of a piece."""
        begin, end = max(waiting.at, first), min(waiting.at + waiting.blocks, first + len(held))
        if begin >= end:
            return
        ticket, number = waiting.ticket, waiting.number + begin - waiting.at
        mine = held[begin - first : end - first]
        self._arena.pin_again(shard, mine)
        ticket.numbers[shard][number : number + len(mine)] = mine
        ticket.is_read[shard][number : number + len(mine)] = b"\1" * len(mine)
        ticket.outstanding -= len(mine)

    def _fail_batch(self, batch: Batch, reason: MissReason) -> None:
        with self._changed:
            for piece in batch.pieces:
                self._fail(piece, range(len(piece.keys)), reason)

    def _fail(self, piece: Piece, failed: Sequence[int], reason: MissReason, *, is_last: bool = True) -> None:
        """Tell those who wait for some blocks of a piece that they don't come; all that is left of it where ``is_last``."""
        for ticket, number, at, count in piece.waiting:
            mine = [number + which - at for which in failed if at <= which < at + count]
            for which in mine:
                ticket.reasons.setdefault(which, reason)
            ticket.outstanding -= len(mine)
        if is_last:
            self._settle(piece)

    def _settle(self, piece: Piece) -> None:
        """A piece is read or given up; nothing of it may be outstanding."""
        self._forget(piece)
        waiting, piece.waiting = piece.waiting, []
        for ticket in {id(each.ticket): each.ticket for each in waiting}.values():
            self._release_if_done(ticket)
        self._changed.notify_all()

    def _forget(self, piece: Piece) -> None:
        in_flight = self._in_flight[piece.shard]
        for key in piece.keys:
            if in_flight.get(key) is piece:
                del in_flight[key]

    def _close(self, ticket: Ticket) -> None:
        ticket.is_closed = True
        self._release_if_done(ticket)

    def _release_if_done(self, ticket: Ticket) -> None:
        if ticket.outstanding:
            return
        ticket.pieces = []
        if ticket.when_done is not None:
            ticket.when_done()
            ticket.when_done = None
        if not ticket.is_closed:
            return
        for shard, numbers in ticket.numbers.items():
            if len(numbers) > ticket.taken:
                # The tail first, so that a chain loses its end before its beginning.
                left = [number for number in reversed(numbers[ticket.taken :]) if number is not None]
                self._arena.unpin_run(shard, left)
                del numbers[ticket.taken :]


def _fail_all(filled: list[_Filled], reason: MissReason) -> None:
    for each in filled:
        each.failed |= dict.fromkeys(range(len(each.numbers)), reason)


def _neighbours(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Rising numbers as (first, its position, how many follow each other)."""
    if numbers and numbers[-1] - numbers[0] + 1 == len(numbers):
        yield numbers[0], 0, len(numbers)
        return
    first = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield numbers[first], first, end - first
            first = end

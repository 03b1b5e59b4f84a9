"""Staging: store -> arena, on threads of its own: who waits for which block, and what they are told when it comes.

A query asks for a run of blocks and gets a :class:`Ticket`. Blocks that are in the arena are pinned for it at once, the others
are read, in the order of the :class:`ReadQueue`, each once however many wait for it. How a batch is read is the :class:`Fetcher`'s.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic

from tracekv.journal.vocabulary import MissReason, Outcome
from tracekv_fsspec.arena import Arena
from tracekv_fsspec.fates import Fates
from tracekv_fsspec.fetching import Fetched, Fetcher, FilledPiece
from tracekv_fsspec.header_checks import HeaderChecks
from tracekv_fsspec.index import Index, Shard, Stretch
from tracekv_fsspec.read_queue import Batch, Piece, Priority, ReadQueue, Waiting, batches_of
from tracekv_fsspec.store import Store
from tracekv_fsspec.tickets import Ticket

__all__ = ["READERS", "Priority", "Reader", "Ticket"]

_log = logging.getLogger("tracekv.fsspec")

READERS = 8


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
        self._url = store.url
        self._index = index
        self._arena = arena
        self._fates = fates
        self._checks = HeaderChecks(deployment, layout)
        self._fetcher = Fetcher(store, index, arena, self._checks)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queued = threading.Condition(self._lock)
        self._in_flight: dict[Shard, dict[bytes, Piece]] = {shard: {} for shard in arena.shards}
        self._queue = ReadQueue(sum(arena.slot_bytes(shard) for shard in arena.shards) * arena.slots_per_shard)
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
            wanted_keys = keys[first:] if first else keys
            whole = self._arena.pin_whole(shard, wanted_keys)
            is_whole = is_whole and whole is not None
            numbers.extend([None] * first)
            numbers.extend(self._arena.pin_run(shard, wanted_keys) if whole is None else whole)
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
            try:
                with self._fetcher.fetched(batch) as fetched:
                    self._charge(batch, fetched)
                    for filled in fetched.filled:
                        self._deliver(filled)
            except Exception:
                _log.exception("tracekv: reading from %s failed in an unforeseen way", self._url)
                self._fail_batch(batch, MissReason.ERROR)

    def _charge(self, batch: Batch, fetched: Fetched) -> None:
        """What the read took is the time of whom it was begun for, shard by shard as their blocks are many."""
        if fetched.took is None:
            return
        total = sum(fetched.blocks.values())
        with self._lock:
            for shard, count in fetched.blocks.items():
                batch.owner.times[shard].add(count / total, *fetched.took)

    def _deliver(self, filled: FilledPiece) -> None:
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

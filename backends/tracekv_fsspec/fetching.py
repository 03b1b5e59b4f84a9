"""One batch from the store into slots of the arena: read, checked while it arrives, and told of on the trace.

What failed is forgotten by the index, so the next query doesn't count on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns, time
from typing import NamedTuple

from tracekv.journal.vocabulary import MissReason, Operation, Outcome
from tracekv_fsspec.arena import Arena
from tracekv_fsspec.format import HEADER_BYTES, BadObject, aligned
from tracekv_fsspec.header_checks import HeaderCheck, HeaderChecks
from tracekv_fsspec.index import Index, Segment, Shard
from tracekv_fsspec.read_queue import Batch, Piece
from tracekv_fsspec.report import Report, reported
from tracekv_fsspec.store import Range, Store
from tracekv_fsspec.store_errors import MISS_OF, StoreError
from tracekv_fsspec.tally import tally
from tracekv_fsspec.verify import Verifier

_log = logging.getLogger("tracekv.fsspec")


class FilledPiece:
    """A piece and the slots that it is read into.

    Attributes:
        numbers: Of the slots that hold its verified blocks, in their order. Whoever commits them empties it.
        failed: By number of a block, why it didn't come.
    """

    def __init__(self, piece: Piece, numbers: list[int]) -> None:
        self.piece = piece
        self.numbers = numbers
        self.failed = dict.fromkeys(range(len(numbers), len(piece.keys)), MissReason.ARENA_FULL)

    def fail(self, reason: MissReason) -> None:
        """Nothing of it came."""
        self.failed |= dict.fromkeys(range(len(self.numbers)), reason)

    def without_failed(self) -> list[int]:
        """Keep the slots of verified blocks; the others' numbers are returned."""
        unfilled = [slot for number, slot in enumerate(self.numbers) if number in self.failed]
        if self.failed:
            self.numbers = [slot for number, slot in enumerate(self.numbers) if number not in self.failed]
        return unfilled


class Took(NamedTuple):
    """What the read of a batch took, in nanoseconds."""

    queued_ns: int
    read_ns: int
    verify_ns: int


class Fetched(NamedTuple):
    """A batch in slots of the arena.

    Attributes:
        filled: Its pieces.
        blocks: By shard, how many blocks were read; not all of them need be right.
        took: None where the arena had no room, so that nothing was read.
    """

    filled: list[FilledPiece]
    blocks: dict[Shard, int]
    took: Took | None


class Fetcher:
    """Reads batches; as many threads at once as like to. It knows nothing of those who wait for the blocks."""

    def __init__(self, store: Store, index: Index, arena: Arena, checks: HeaderChecks) -> None:
        self._store = store
        self._index = index
        self._arena = arena
        self._checks = checks

    @contextmanager
    def fetched(self, batch: Batch) -> Iterator[Fetched]:
        """A batch, read into slots that are the caller's to commit; those that are left at the end are given back."""
        mine, theirs = self._checks.begin(batch.segment)
        filled: list[FilledPiece] = []
        try:
            for piece in batch.pieces:
                filled.append(FilledPiece(piece, self._arena.allocate_run(piece.shard, len(piece.keys))))
            blocks = {each.piece.shard: 0 for each in filled}
            for each in filled:
                blocks[each.piece.shard] += len(each.numbers)
            took = None
            if any(blocks.values()):
                took = self._read(batch, filled, blocks, mine, theirs)
            elif mine is not None:
                mine.reason = MissReason.ARENA_FULL
            for each in filled:  # before anybody is told, so that who is told finds the slots free
                if unfilled := each.without_failed():
                    self._arena.abandon_run(each.piece.shard, unfilled)
            yield Fetched(filled, blocks, took)
        finally:
            for each in filled:
                self._arena.abandon_run(each.piece.shard, each.numbers)
            if mine is not None:
                self._checks.end(batch.segment, mine)

    def _read(
        self,
        batch: Batch,
        filled: list[FilledPiece],
        blocks: dict[Shard, int],
        mine: HeaderCheck | None,
        theirs: HeaderCheck | None,
    ) -> Took:
        segment = batch.segment
        ranges: list[Range] = []
        into: list[memoryview] = []
        verifier = Verifier()
        whose: list[tuple[FilledPiece, int]] = []
        for each in filled:
            piece, first = each.piece, 0
            for count, view in self._arena.pieces(piece.shard, each.numbers):
                ranges.append(Range(piece.offset + first * piece.stride, len(view)))
                into.append(view)
                whose.append((each, first))
                verifier.add(view, piece.length, piece.checksums[first : first + count])
                first += count
        header = None if mine is None else aligned(HEADER_BYTES)
        if header is not None:
            ranges.insert(0, Range(0, HEADER_BYTES))
            into.insert(0, header)
            verifier.lead_in()
        queued_ns = perf_counter_ns() - batch.queued_ns
        with reported(
            self._store, Operation.READ, segment.path, nbytes=sum(r.length for r in ranges), blocks=sum(blocks.values()),
            queued_ns=queued_ns, request_id=batch.owner.request_id, rank=segment.rank,
        ) as report:  # fmt: skip
            reading = perf_counter_ns()
            try:
                tally.progress = verifier
                self._store.read(segment.path, ranges, into)
                report.transfer_ns = perf_counter_ns() - reading - verifier.took_ns
                if mine is not None and header is not None:
                    self._checks.check(segment, header)
                    mine.reason = None
                    mine.done.set()
                self._forget_wrong(segment, whose, verifier.finish(), report)
                if theirs is not None:
                    theirs.done.wait()  # who reads it began before
                    if theirs.reason is not None:
                        _fail_all(filled, theirs.reason)
            except (StoreError, BadObject) as error:
                report.transfer_ns = report.transfer_ns or perf_counter_ns() - reading
                report.failed(error)
                reason = MISS_OF.get(error.outcome, MissReason.STORE_DOWN)
                _fail_all(filled, reason)
                if mine is not None:
                    mine.reason = reason
                self._give_up(segment, error)
            report.verify_ns = perf_counter_ns() - reading - report.transfer_ns
            segment.used_at = int(time())
        return Took(queued_ns, report.transfer_ns, report.verify_ns)

    def _forget_wrong(
        self, segment: Segment, whose: list[tuple[FilledPiece, int]], wrong_of: list[list[int]], report: Report
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


def _fail_all(filled: list[FilledPiece], reason: MissReason) -> None:
    for each in filled:
        each.fail(reason)

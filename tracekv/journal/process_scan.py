"""One process's records in what was scanned: selected by kind, by request or by time, and decoded only when they are asked for.

They may lie in several places (the rings of a file, archives); whoever asks gets them in order, each once.
"""

from __future__ import annotations

import functools
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from tracekv.journal import frames
from tracekv.journal.archive import SourceState
from tracekv.journal.frames import ArchiveScan, Column, Kinds
from tracekv.journal.layout import JournalFacts
from tracekv.journal.naming import KINDS, LISTING, NAMING, TAGS, concerns, named_of
from tracekv.journal.reader import JournalState, RingReader
from tracekv.journal.records import ClockAnchor, Record, decode, decode_as_stored

_DATED = frozenset(TAGS[kind] for kind in KINDS if "ended_ns" in kind.__struct_fields__)
#: Sequence numbers that are ordered at a time, at first: who wants one record needn't wait for thousands. Later it is as many as
#: have about so many bytes of payload.
_FIRST_TURN, _TURN_BYTES = 1 << 8, 4 << 20
#: Bytes of a turn from which on the pages that it lay in are given back: faulting them in again would take longer than a small turn.
_GIVE_BACK_BYTES = 1 << 20


class _Strand(NamedTuple):
    """A part of a process's records whose numbers rise with their places: one ring, or its entries in an archive."""

    kinds: Kinds
    mapping: mmap.mmap
    payloads: Callable[[Sequence[int], Sequence[int]], list[bytes | None]]


class _Stream(NamedTuple):
    """The records of one kind in a strand."""

    column: Column
    strand: _Strand


class Batch(NamedTuple):
    """Encoded records in their order, with their numbers."""

    numbers: Sequence[int]
    payloads: Sequence[bytes]


class ProcessScan:
    """One process's records, as they were when it was scanned. One thread at a time.

    Attributes:
        facts: Who wrote them.
        paths: Where they lie: a ring file, archives.
        records: How many there are, each counted once; ``lost`` are those with lower numbers that aren't there any more.
        next_sequence: One above the highest number.
        undecodable: Records that were selected and aren't of this version.
        truncated_bytes: By archive, what comes after its last whole entry.
        ring: The open ring file where there is one, and ``ring_positions`` how far it was scanned: to follow it from here.
    """

    def __init__(self, facts: JournalFacts) -> None:
        self.facts = facts
        self.paths: list[Path] = []
        self.records = 0
        self.lost = 0
        self.next_sequence = 0
        self.undecodable = 0
        self.truncated_bytes: dict[Path, int] = {}
        self.ring: RingReader | None = None
        self.ring_positions: list[int] = []
        self._strands: list[_Strand] = []
        self._archived: SourceState | None = None

    def count(self, *kinds: type[Record]) -> int:
        """Records of some kinds; those that lie in an archive and in a ring count twice here."""
        tags = [TAGS[kind] for kind in kinds]
        return sum(len(s.kinds.by_tag[tag].numbers) for s in self._strands for tag in tags if tag in s.kinds.by_tag)

    def select(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[Record]:
        """Records of some kinds (none: of all), in order, with numbers in ``[first, last)``."""
        for _, record in self.numbered(*kinds, first=first, last=last):
            yield record

    def numbered(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[tuple[int, Record]]:
        """As :meth:`select`, each with its number."""
        for numbers, payloads in self.batches(*kinds, first=first, last=last):
            for sequence, payload in zip(numbers, payloads, strict=True):
                try:
                    record = decode(payload)
                except msgspec.DecodeError:
                    self.undecodable += 1
                    continue
                yield sequence, record

    def lists(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[list[Any]]:
        """As :meth:`select`, many at a time, and the hooks of passes as they are stored (:func:`decode_as_stored`)."""
        for _, payloads in self.batches(*kinds, first=first, last=last):
            try:
                yield list(map(decode_as_stored, payloads))
            except msgspec.DecodeError:
                yield [record for payload in payloads if (record := self.decoded(payload)) is not None]

    def payloads(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[tuple[int, bytes]]:
        """As :meth:`numbered`, encoded: for who wants to decode only a part of each."""
        for numbers, payloads in self.batches(*kinds, first=first, last=last):
            yield from zip(numbers, payloads, strict=True)

    def batches(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[Batch]:
        """As :meth:`payloads`, many at a time. A batch may be empty."""
        for (batch,) in self._turns([self._streams([TAGS[kind] for kind in kinds])], first, last):
            yield batch

    def batches_by_kind(
        self, *kinds: type[Record], first: int = 0, last: int | None = None
    ) -> Iterator[dict[type[Record], Batch]]:
        """As :meth:`batches`, each with the records of every kind apart."""
        for found in self._turns([self._streams([TAGS[kind]]) for kind in kinds], first, last):
            yield dict(zip(kinds, found, strict=True))

    def decoded(self, payload: bytes) -> Record | None:
        """An encoded record as it is stored (:func:`decode_as_stored`), None for one that isn't of this version; counts those."""
        try:
            return decode_as_stored(payload)
        except msgspec.DecodeError:
            self.undecodable += 1
            return None

    def _turns(self, parts: Sequence[Sequence[_Stream]], first: int, last: int | None) -> Iterator[list[Batch]]:
        """A batch of each part, as many times as it takes; what is in a batch comes before all that is in a later one."""
        end = self.next_sequence if last is None else min(last, self.next_sequence)
        begins = [[bisect_left(column.numbers, first) for column, _ in streams] for streams in parts]
        turn_end, turn = first, _FIRST_TURN
        while turn_end < end:
            # A turn with nothing in it is skipped, not walked through.
            ahead = [
                column.numbers[at]
                for streams, places in zip(parts, begins, strict=True)
                for (column, _), at in zip(streams, places, strict=True)
                if at < len(column.numbers)
            ]
            if not ahead:
                return
            turn_end = min(end, max(turn_end, min(ahead)) + turn)
            found = [_batch(streams, places, turn_end) for streams, places in zip(parts, begins, strict=True)]
            yield found
            nbytes = sum(sum(map(len, batch.payloads)) for batch in found)
            turn = 2 * turn if nbytes < _TURN_BYTES else max(_FIRST_TURN, turn // 2)
            if nbytes >= _GIVE_BACK_BYTES:
                for strand in self._strands:
                    frames.give_back(strand.mapping)

    def _streams(self, tags: Sequence[int]) -> list[_Stream]:
        return [
            _Stream(column, strand)
            for strand in self._strands
            for tag, column in strand.kinds.by_tag.items()
            if not tags or tag in tags
        ]

    def of_request(
        self, request_id: int, *kinds: type[Record], first: int = 0, last: int | None = None
    ) -> Iterator[tuple[int, Record]]:
        """Records that name a request, or list it, with their numbers; ``kinds`` narrows them down."""
        needle = msgspec.msgpack.encode(request_id)
        wanted = [kind for kind in kinds or (*NAMING, *LISTING) if kind in NAMING or kind in LISTING]
        for sequence, payload in self.payloads(*wanted, first=first, last=last) if wanted else ():
            if needle in payload:
                try:
                    record = decode(payload)
                except msgspec.DecodeError:
                    self.undecodable += 1
                    continue
                if concerns(record, request_id):
                    yield sequence, record

    def of_requests(
        self, request_ids: frozenset[int], *, first: int = 0, last: int | None = None
    ) -> dict[int, list[tuple[int, Record]]]:
        """As :meth:`of_request`, for several requests in one pass; each has a list, be it empty."""
        found: dict[int, list[tuple[int, Record]]] = {request_id: [] for request_id in request_ids}
        for sequence, payload in self.payloads(*NAMING, *LISTING, first=first, last=last):
            try:
                named = named_of(payload, request_ids)
                if named:
                    record = decode(payload)
                    for request_id in named:
                        found[request_id].append((sequence, record))
            except msgspec.DecodeError:
                self.undecodable += 1
        return found

    def sequence_at(self, at_ns: int) -> int:
        """The number from which on records end at ``at_ns`` (monotonic) or later, as far as they lie in the order of their times."""
        found: list[int] = []
        for strand in self._strands:
            dated = [column for tag, column in strand.kinds.by_tag.items() if tag in _DATED]
            if dated:
                column = max(dated, key=lambda column: len(column.numbers))
                ended_ns = functools.partial(_ended_ns, strand, column)
                at = bisect_left(range(len(column.numbers)), at_ns, key=ended_ns)
                found += column.numbers[at : at + 1]
        return min(found, default=self.next_sequence)

    def is_alive(self) -> bool:
        """Whether more can come."""
        return self.ring is not None and self.ring.is_alive()

    def state(self) -> JournalState:
        """What the process was doing."""
        if self.ring is not None:
            return self.ring.state()
        return self._archived.state if self._archived else JournalState(0, 0, [], [], 0)

    def anchors(self) -> list[ClockAnchor]:
        """Clock anchors of the process, oldest first."""
        if self.ring is not None:
            return self.ring.anchors()
        own = ClockAnchor(self.facts.monotonic_ns, self.facts.wall_ns)
        return self._archived.anchors if self._archived else [own]

    def add_ring(self, reader: RingReader, scanned: Sequence[tuple[Kinds, int]]) -> None:
        """Take a ring file of this process, of which each ring was scanned."""
        self.paths.append(reader.path)
        self.ring = reader
        for area, (kinds, position) in zip(reader.areas, scanned, strict=True):
            self.ring_positions.append(position)
            payloads = functools.partial(frames.ring_payloads, reader.mapping, area, changes=reader.is_alive())
            self._strands.append(_Strand(kinds, reader.mapping, payloads))

    def add_archived(self, path: Path, number: int, mapping: mmap.mmap, found: ArchiveScan) -> None:
        """Take this process's part of an archive that was scanned."""
        self.paths.append(path)
        if found.truncated_bytes:
            self.truncated_bytes[path] = found.truncated_bytes
        if number in found.states:
            self._archived = msgspec.msgpack.decode(found.states[number], type=SourceState)
        kinds = found.kinds.get(number)
        if kinds is not None:
            self._strands.append(_Strand(kinds, mapping, functools.partial(frames.archive_payloads, mapping)))

    def close(self) -> None:
        """All of its places are scanned: count."""
        kinds = [strand.kinds for strand in self._strands]
        self.next_sequence = 1 + max((each.last for each in kinds), default=-1)
        # The rings of one file share no number; what is in an archive too is counted once.
        self.records = sum(each.records for each in kinds) if len(self.paths) == 1 else len(_all_numbers(kinds))
        self.lost = self.next_sequence - self.records


def _all_numbers(kinds: Sequence[Kinds]) -> set[int]:
    return {number for each in kinds for column in each.by_tag.values() for number in column.numbers}


def _ended_ns(strand: _Strand, column: Column, at: int) -> int:
    (payload,) = strand.payloads(column.places[at : at + 1], column.lengths[at : at + 1])
    try:
        return int(getattr(decode(payload), "ended_ns", 0)) if payload is not None else 0
    except msgspec.DecodeError:
        return 0


def _batch(streams: Sequence[_Stream], begins: list[int], end: int) -> Batch:
    """The records from some places on with numbers below ``end``; moves the places on."""
    found: dict[int, bytes] = {}
    for index, (column, strand) in enumerate(streams):
        part = slice(begins[index], bisect_left(column.numbers, end, begins[index]))
        begins[index] = part.stop
        numbers = column.numbers[part]
        payloads = strand.payloads(column.places[part], column.lengths[part])
        if all(payloads):
            if len(streams) == 1:
                return Batch(numbers, cast("list[bytes]", payloads))
            # It may be in a ring and in an archive: one number, and the same bytes.
            found.update(zip(numbers, cast("list[bytes]", payloads), strict=True))
        else:
            found.update((number, each) for number, each in zip(numbers, payloads, strict=True) if each is not None)
    # Each stream's numbers rise.
    order = sorted(found) if len(streams) > 1 else list(found)
    return Batch(order, list(map(found.__getitem__, order)))

"""Opens many journals at once: every frame is found and checked, and only the records that are asked for are decoded.

A million records are a million objects when they are all decoded, and most questions need a tenth of them. So :func:`scan` keeps two
numbers per record, by kind, and :meth:`ProcessScan.select` makes records of the kinds that a view asks for.

A process whose journal was also archived is one process here: its records are joined by their sequence numbers.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from tracekv.journal import archive, frames
from tracekv.journal.archive import SourceState
from tracekv.journal.frames import ArchiveScan, Kinds, Progress
from tracekv.journal.layout import JournalFacts, JournalFormatError
from tracekv.journal.naming import KINDS, LISTING, NAMING, TAGS, concerns, named_of
from tracekv.journal.opening import files_of, is_archive, why_left_out
from tracekv.journal.parallel import in_processes
from tracekv.journal.reader import JournalState, RingReader
from tracekv.journal.records import ClockAnchor, Record, decode

T = TypeVar("T")
#: Told the bytes that are done, and those that there are.
Tell = Callable[[int, int], object]

_DATED = frozenset(TAGS[kind] for kind in KINDS if "ended_ns" in kind.__struct_fields__)
#: Bytes from which on several cores share the work.
_LARGE = 32 << 20
#: Sequence numbers that are ordered at a time; after each turn the pages that were read are given back.
_TURN = 1 << 16


class _Strand(NamedTuple):
    """A part of a process's records whose numbers rise with their places: one ring, or its entries in an archive."""

    kinds: Kinds
    mapping: mmap.mmap
    payload: Callable[[int], bytes | None]


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
        return sum(len(s.kinds.by_tag[tag][0]) for s in self._strands for tag in tags if tag in s.kinds.by_tag)

    def select(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[Record]:
        """Records of some kinds (none: of all), in order, with numbers in ``[first, last)``."""
        for _, record in self.numbered(*kinds, first=first, last=last):
            yield record

    def numbered(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[tuple[int, Record]]:
        """As :meth:`select`, each with its number."""
        for sequence, payload in self.payloads(*kinds, first=first, last=last):
            try:
                record = decode(payload)
            except msgspec.DecodeError:
                self.undecodable += 1
                continue
            yield sequence, record

    def payloads(self, *kinds: type[Record], first: int = 0, last: int | None = None) -> Iterator[tuple[int, bytes]]:
        """As :meth:`numbered`, encoded: for who wants to decode only a part of each."""
        streams = self._streams([TAGS[kind] for kind in kinds])
        end = self.next_sequence if last is None else min(last, self.next_sequence)
        begins = [bisect_left(numbers, first) for numbers, _, _ in streams]
        turn_end = first
        while turn_end < end:
            # A turn with nothing in it is skipped, not walked through.
            ahead = [numbers[at] for (numbers, _, _), at in zip(streams, begins, strict=True) if at < len(numbers)]
            if not ahead:
                return
            turn_end = min(end, max(turn_end, min(ahead)) + _TURN)
            yield from self._turn(streams, begins, turn_end)
            for strand in self._strands:
                frames.give_back(strand.mapping)

    def _turn(
        self, streams: Sequence[tuple[Any, Any, _Strand]], begins: list[int], end: int
    ) -> Iterator[tuple[int, bytes]]:
        """The records below ``end``; numbers are sorted together with the index of their stream, whose places are in order."""
        keys: list[int] = []
        places: list[Iterator[int]] = []
        for index, (numbers, where, _) in enumerate(streams):
            begin = begins[index]
            begins[index] = stop = bisect_left(numbers, end, begin)
            keys += [number << 16 | index for number in numbers[begin:stop]]
            places.append(iter(where[begin:stop]))
        if len(streams) > 1:
            keys.sort()
        payload_of = [strand.payload for _, _, strand in streams]
        before = -1
        for key in keys:
            index, sequence = key & 0xFFFF, key >> 16
            place = next(places[index])
            if sequence == before:
                continue  # in a ring and in an archive
            payload = payload_of[index](place)
            if payload is not None:
                before = sequence
                yield sequence, payload

    def _streams(self, tags: Sequence[int]) -> list[tuple[Any, Any, _Strand]]:
        return [
            (*found, strand)
            for strand in self._strands
            for tag, found in strand.kinds.by_tag.items()
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
        found = []
        for strand in self._strands:
            dated = [stream for tag, stream in strand.kinds.by_tag.items() if tag in _DATED]
            numbers, places = max(dated, key=lambda stream: len(stream[0]), default=((), ()))
            at = bisect_left(range(len(places)), at_ns, key=lambda i: _ended_ns(strand, places[i]))
            if at < len(numbers):
                found.append(numbers[at])
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
            payload = functools.partial(frames.ring_payload, reader.mapping, area, changes=reader.is_alive())
            self._strands.append(_Strand(kinds, reader.mapping, payload))

    def add_archived(self, path: Path, number: int, mapping: mmap.mmap, found: ArchiveScan) -> None:
        """Take this process's part of an archive that was scanned."""
        self.paths.append(path)
        if found.truncated_bytes:
            self.truncated_bytes[path] = found.truncated_bytes
        if number in found.states:
            self._archived = msgspec.msgpack.decode(found.states[number], type=SourceState)
        kinds = found.kinds.get(number)
        if kinds is not None:
            self._strands.append(_Strand(kinds, mapping, functools.partial(frames.archive_payload, mapping)))

    def close(self) -> None:
        """All of its places are scanned: count."""
        kinds = [strand.kinds for strand in self._strands]
        self.next_sequence = 1 + max((each.last for each in kinds), default=-1)
        # The rings of one file share no number; what is in an archive too is counted once.
        self.records = sum(each.records for each in kinds) if len(self.paths) == 1 else len(_all_numbers(kinds))
        self.lost = self.next_sequence - self.records


class _RingFile:
    """A ring file that is open."""

    def __init__(self, path: Path) -> None:
        self._reader = RingReader(path, patience_ns=0)
        self.close = self._reader.close

    def scan(self, progress: Progress) -> list[tuple[Kinds, int]]:
        return [frames.scan_ring(self._reader.mapping, area, progress) for area in self._reader.areas]

    def tell(self, found: list[tuple[Kinds, int]], process_of: Callable[[JournalFacts], ProcessScan]) -> None:
        process_of(self._reader.facts).add_ring(self._reader, found)


class _ArchiveFile:
    """An archive that is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            archive.check_prefix(file, path)
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.close = self._mapping.close

    def scan(self, progress: Progress) -> ArchiveScan:
        return ArchiveScan(self._mapping, progress)

    def tell(self, found: ArchiveScan, process_of: Callable[[JournalFacts], ProcessScan]) -> None:
        for number, encoded in found.facts.items():
            facts = msgspec.msgpack.decode(encoded, type=JournalFacts)
            process_of(facts).add_archived(self._path, number, self._mapping, found)


class Scan:
    """What was found at some paths. To be closed; ``with scan(paths) as found`` does it.

    Attributes:
        processes: By the time of their start.
        left_out: Files of directories that couldn't be read, a sentence each.
    """

    def __init__(self, left_out: list[str]) -> None:
        self.processes: list[ProcessScan] = []
        self.left_out = left_out
        self._files = contextlib.ExitStack()

    @property
    def records(self) -> int:
        """Records of all processes."""
        return sum(process.records for process in self.processes)

    @property
    def lost(self) -> int:
        """Records of all processes that were overwritten, or never got whole."""
        return sum(process.lost for process in self.processes)

    @property
    def notes(self) -> list[str]:
        """What a person has to know of the files: those left out, and archives that are cut short."""
        cut = {path: nbytes for process in self.processes for path, nbytes in process.truncated_bytes.items()}
        return [
            *self.left_out,
            *(
                f"tracekv: {path} is cut short: {n} bytes after its last whole entry are left out"
                for path, n in cut.items()
            ),
        ]

    def map(self, work: Callable[[ProcessScan], T]) -> list[T]:
        """What ``work`` makes of each process, in their order; done on several cores by forked children, so it has to be picklable."""
        tasks = [functools.partial(work, process) for process in self.processes]
        return in_processes(
            tasks, [process.records for process in self.processes], workers=_workers(self.records * 256)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the files back."""
        self._files.close()

    def process(self, facts: JournalFacts) -> ProcessScan:
        """The process of ``facts``, made where it isn't known."""
        for known in self.processes:
            if known.facts.process_id == facts.process_id:
                return known
        fresh = ProcessScan(facts)
        self.processes.append(fresh)
        return fresh

    def read(self, files: Sequence[_RingFile | _ArchiveFile], sizes: Sequence[int], tell: Tell | None) -> None:
        """Scan files that are open, and give them back with this scan."""
        for file in files:
            self._files.callback(file.close)
        workers = _workers(sum(sizes))
        progress = _Progress(sum(sizes) // workers, tell)
        found: list[Any] = in_processes(
            [functools.partial(file.scan, progress.passed) for file in files], sizes, workers=workers
        )
        for file, each in zip(files, found, strict=True):
            file.tell(each, self.process)
        for process in self.processes:
            process.close()
        self.processes.sort(key=lambda process: (process.facts.wall_ns, process.facts.process_id))
        progress.end()


def scan(paths: Sequence[Path], *, progress: Tell | None = None) -> Scan:
    """Scan the journals, archives and directories at ``paths``.

    A large input is scanned on several cores by forked children, so no other thread should run.

    Args:
        paths: Files and directories; of a directory, the ring files and archives in it.
        progress: Called now and then with the bytes that are done, and those that there are to do.

    Raises:
        JournalFormatError: A named file is no journal, or of a version that this one doesn't read.
        OSError: A named path can't be read.
    """
    left_out: list[str] = []
    files: list[_RingFile | _ArchiveFile] = []
    sizes: list[int] = []
    with contextlib.ExitStack() as on_error:
        for path, is_named in files_of(paths):
            try:
                sizes.append(path.stat().st_size)
                files.append(_ArchiveFile(path) if is_archive(path) else _RingFile(path))
            except (JournalFormatError, OSError) as error:
                if is_named:
                    raise
                del sizes[len(files) :]
                left_out.append(why_left_out(path, error))
            else:
                on_error.callback(files[-1].close)
        on_error.pop_all()
    found = Scan(left_out)
    try:
        found.read(files, sizes, progress)
    except BaseException:
        found.close()
        raise
    return found


class _Progress:
    """Adds up what is passed."""

    def __init__(self, total: int, tell: Tell | None) -> None:
        self._total = total
        self._tell = tell
        self._done = 0

    def passed(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        if self._tell is not None:
            self._tell(self._done, self._total)

    def end(self) -> None:
        self.passed(self._total - self._done)


def _workers(nbytes: int) -> int:
    """A fork isn't worth it for what takes milliseconds."""
    return len(os.sched_getaffinity(0)) if nbytes >= _LARGE else 1


def _all_numbers(kinds: Sequence[Kinds]) -> set[int]:
    return {number for each in kinds for numbers, _ in each.by_tag.values() for number in numbers}


def _ended_ns(strand: _Strand, place: int) -> int:
    payload = strand.payload(place)
    try:
        return int(getattr(decode(payload), "ended_ns", 0)) if payload is not None else 0
    except msgspec.DecodeError:
        return 0

"""An append-only file of records from any number of journals: more than a ring holds, and what is sent with a bug report."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self
from zlib import crc32

import msgspec

from tracekv.journal.layout import Field, JournalFacts, JournalFormatError
from tracekv.journal.reader import READ_LIMIT, Frame, JournalReader, JournalState, decode_frames
from tracekv.journal.records import ClockAnchor, Record

MAGIC = b"TKVARCH\n"
FORMAT_VERSION = 1

PREFIX_FIELDS = (
    Field("8s", "magic", 'b"TKVARCH\\n"'),
    Field("I", "format_version", f"this page describes version {FORMAT_VERSION}"),
    Field("I", "crc", "CRC-32 over the 12 bytes before"),
)
PREFIX = struct.Struct("<8sII")

ENTRY_FIELDS = (
    Field("I", "crc", "CRC-32 over the 20 bytes that follow and the payload"),
    Field("I", "length", "bytes of payload"),
    Field("I", "kind", "1 facts of a process, 2 record, 3 state of a process"),
    Field("I", "source", "number of the process in this archive, given by its facts"),
    Field("Q", "sequence", "number of the record in its process; 0 for the other kinds"),
)
ENTRY = struct.Struct("<IIIIQ")
#: What an entry begins with.
CRC_AND_LENGTH = struct.Struct("<II")

FACTS, RECORD, STATE = 1, 2, 3
#: A length above this is damage: no ring holds a record that long.
_LONGEST = 1 << 28


class SourceState(msgspec.Struct, frozen=True):
    """What an archive keeps of a process beside its records, taken when it was last looked at."""

    state: JournalState
    anchors: list[ClockAnchor]


class ArchiveWriter:
    """Appends what journals hold. ``copy`` again and again follows them; ``close`` adds what each was doing at the end."""

    def __init__(self, path: Path) -> None:
        """Make the file, mode 0600.

        Raises:
            FileExistsError: There is one: an archive is never overwritten.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        head = struct.pack("<8sI", MAGIC, FORMAT_VERSION)
        self._file.write(head + struct.pack("<I", crc32(head)))
        self._sources: dict[bytes, _Source] = {}

    def copy(self, reader: JournalReader) -> int:
        """Append what ``reader`` has that is not here yet; returns how many records."""
        source = self._sources.get(reader.facts.process_id)
        if source is None:
            source = _Source(len(self._sources), reader)
            self._sources[reader.facts.process_id] = source
            self._append(FACTS, source.number, 0, msgspec.msgpack.encode(reader.facts))
        source.reader = reader
        copied = 0
        while True:
            frames, source.cursor, _ = reader.read_frames(source.cursor)
            if not frames:
                self._file.flush()
                return copied
            for frame in frames:
                self._append(RECORD, source.number, frame.sequence, frame.payload)
            copied += len(frames)

    def _append(self, kind: int, source: int, sequence: int, payload: bytes) -> None:
        rest = ENTRY.pack(0, len(payload), kind, source, sequence)[4:]
        self._file.write(struct.pack("<I", crc32(payload, crc32(rest))) + rest + payload)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Add the state of each process whose journal was copied (its reader still has to be open), and end the file."""
        for source in self._sources.values():
            state = SourceState(source.reader.state(), source.reader.anchors())
            self._append(STATE, source.number, 0, msgspec.msgpack.encode(state))
        self._file.close()


class _Source:
    """A process in an archive that is being written."""

    def __init__(self, number: int, reader: JournalReader) -> None:
        self.number = number
        self.reader = reader
        self.cursor = 0


def copy_records(readers: Iterable[JournalReader], path: Path) -> int:
    """Archive in ``path`` what ``readers`` hold now; returns how many records.

    Raises:
        FileExistsError: There is a file of that name.
    """
    with ArchiveWriter(path) as archive:
        return sum(archive.copy(reader) for reader in readers)


class Entry(NamedTuple):
    """A whole entry of an archive, and where the next one begins."""

    kind: int
    source: int
    sequence: int
    payload: bytes
    end: int


def _entries(file: BinaryIO, offset: int) -> Iterator[Entry]:
    """Whole entries from ``offset`` on; ends at the first that is cut or damaged."""
    file.seek(offset)
    while len(head := file.read(ENTRY.size)) == ENTRY.size:
        crc, length, kind, source, sequence = ENTRY.unpack(head)
        if length > _LONGEST:
            return
        payload = file.read(length)
        if len(payload) < length or crc32(payload, crc32(head[4:])) != crc:
            return
        offset += ENTRY.size + length
        yield Entry(kind, source, sequence, payload, offset)


def sources(path: Path) -> dict[int, JournalFacts]:
    """The processes in an archive, by number.

    Raises:
        JournalFormatError: It is no archive, or none that this version reads.
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        check_prefix(file, path)
        return {
            entry.source: msgspec.msgpack.decode(entry.payload, type=JournalFacts)
            for entry in _entries(file, PREFIX.size)
            if entry.kind == FACTS
        }


def check_prefix(file: BinaryIO, path: Path) -> None:
    """Read and check what an archive begins with; raises as :func:`sources` does."""
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC):
        raise JournalFormatError(f"tracekv: {path} is no archive of journals: it begins with {prefix[:8]!r}")
    _, version, crc = PREFIX.unpack(prefix)
    if crc32(prefix[:-4]) != crc:
        raise JournalFormatError(f"tracekv: {path} has a damaged header (its CRC-32 differs)")
    if version != FORMAT_VERSION:
        raise JournalFormatError(
            f"tracekv: {path} has archive format {version}, this version of tracekv reads format {FORMAT_VERSION}: "
            "read it with the tracekv that wrote it"
        )


class ArchiveReader:
    """One process's part of an archive. One thread at a time.

    Attributes:
        path: The file.
        facts: The process.
        undecodable: Records with a whole entry that this version can't decode.
    """

    def __init__(self, path: Path, source: int, facts: JournalFacts) -> None:
        self.path = path
        self.facts = facts
        self.undecodable = 0
        self._source = source
        self._file: BinaryIO = path.open("rb")
        self._offset = PREFIX.size
        self._cursor = 0

    def read(self, cursor: int, limit: int = READ_LIMIT) -> tuple[list[Record], int, int]:
        """As :meth:`RingReader.read <tracekv.journal.reader.RingReader.read>`."""
        frames, cursor, lost = self.read_frames(cursor, limit)
        records, undecodable = decode_frames(frames)
        self.undecodable += undecodable
        return records, cursor, lost

    def read_frames(self, cursor: int, limit: int = READ_LIMIT) -> tuple[list[Frame], int, int]:
        """As :meth:`read`, with the records as they lie in the file."""
        if cursor != self._cursor:
            self._offset = PREFIX.size
        lost = 0
        frames: list[Frame] = []
        for entry in _entries(self._file, self._offset):
            self._offset = entry.end
            if entry.source != self._source or entry.kind != RECORD or entry.sequence < cursor:
                continue
            lost += entry.sequence - cursor
            cursor = entry.sequence + 1
            frames.append(Frame(entry.sequence, entry.payload))
            if len(frames) == limit:
                break
        self._cursor = cursor
        return frames, cursor, lost

    @property
    def truncated_bytes(self) -> int:
        """Bytes after the last whole entry: what a writer that was killed, or a full disk, left."""
        end = PREFIX.size
        for entry in _entries(self._file, self._offset):
            end = entry.end
        return os.fstat(self._file.fileno()).st_size - max(end, self._offset)

    def is_alive(self) -> bool:
        """An archive is of the past."""
        return False

    def anchors(self) -> list[ClockAnchor]:
        """Clock anchors of the process, oldest first: the one of its start, and the latest that was archived."""
        last = self._last_state()
        return last.anchors if last else [ClockAnchor(self.facts.monotonic_ns, self.facts.wall_ns)]

    def state(self) -> JournalState:
        """What the process was doing when its archiving ended; nothing where that was cut short."""
        last = self._last_state()
        return last.state if last else JournalState(0, 0, [], [], 0)

    def _last_state(self) -> SourceState | None:
        last: SourceState | None = None
        for entry in _entries(self._file, PREFIX.size):
            if entry.kind == STATE and entry.source == self._source:
                last = msgspec.msgpack.decode(entry.payload, type=SourceState)
        return last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

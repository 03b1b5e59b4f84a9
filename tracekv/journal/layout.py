"""How the bytes of a ring file lie: header, hook slots, three rings of 64-byte slots. What writer and reader share.

Numbers are little-endian. The page ``docs/journal-format.md`` is generated from the tables here and from the records; a change
to either that an older reader would misread raises :data:`FORMAT_VERSION`.
"""

from __future__ import annotations

import struct
import sys
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

MAGIC = b"TKVRING\n"
FORMAT_VERSION = 2
HEADER_BYTES = 4096
SLOT_BYTES = 64
#: Layers whose hooks have slots.
MAX_LAYERS = 512
#: One pair (started, ended) of float64 seconds per layer, for each of the two hooks.
HOOK_BYTES = MAX_LAYERS * 16
#: What the areas need at the least; a journal that is of use is far larger.
MIN_FILE_BYTES = 1 << 16
#: A longer CRC-32 is taken in pieces of this size: zlib's binding gives the GIL away above 5 KiB, and a callback that has to
#: get it back from a busy thread waits for up to the interpreter's switch interval.
CRC_PIECE_BYTES = 4096


class JournalFormatError(ValueError):
    """A file that is no journal, or one that this version can't read; the message names the file and says why."""


class JournalNotReady(JournalFormatError):
    """A ring file whose header isn't there yet, or never will be."""


class Field(NamedTuple):
    """One field of a header or frame: struct format, name, meaning."""

    format: str
    name: str
    meaning: str


def _struct(fields: tuple[Field, ...]) -> struct.Struct:
    return struct.Struct("<" + "".join(field.format for field in fields))


#: Closes and precedes a record's payload. The CRC covers everything after itself: a slot is believed only as a whole.
FRAME_FIELDS = (
    Field("I", "crc", "CRC-32 (zlib) over the 20 bytes that follow and the payload"),
    Field("I", "length", "bytes of payload"),
    Field(
        "Q", "position", "number of the record's first slot, counted from the ring's first slot on and never wrapped"
    ),
    Field("Q", "sequence", "number of the record in its process, over all three rings"),
)
FRAME = _struct(FRAME_FIELDS)
#: The part of a frame under the CRC.
FRAME_REST = _struct(FRAME_FIELDS[1:])
FRAME_BYTES = FRAME.size

#: The part of the header that never changes, from byte 16 on.
FACT_FIELDS = (
    Field("Q", "file_bytes", "size of the file"),
    Field("Q", "pid", "process id, in the writer's PID namespace"),
    Field("Q", "start_ticks", "start of the process: field 22 of /proc/PID/stat"),
    Field("Q", "pid_namespace", "inode of /proc/self/ns/pid"),
    Field("16s", "process_id", "random, this process's own"),
    Field("16s", "boot_id", "/proc/sys/kernel/random/boot_id as a UUID's bytes; zero where there is none"),
    Field("q", "monotonic_ns", "CLOCK_MONOTONIC at the start"),
    Field("q", "wall_ns", "CLOCK_REALTIME, read beside it"),
    Field("32s", "version", "version of tracekv, UTF-8, padded with zeros"),
    Field("256s", "host", "host name, UTF-8, padded with zeros"),
    Field("Q", "waits_offset", "where the pairs of `wait_for_layer_load` begin"),
    Field("Q", "saves_offset", "where the pairs of `save_kv_layer` begin"),
    Field("Q", "max_layers", "pairs in each of these two areas"),
    Field("Q", "kept_offset", "where the ring of kept records begins"),
    Field("Q", "kept_slots", "its slots"),
    Field("Q", "shared_offset", "where the ring of the other threads begins"),
    Field("Q", "shared_slots", "its slots"),
    Field("Q", "engine_offset", "where the ring of the engine thread begins"),
    Field("Q", "engine_slots", "its slots"),
)
FACTS = _struct(FACT_FIELDS)

PREFIX_FIELDS = (
    Field("8s", "magic", 'b"TKVRING\\n"; written last'),
    Field("I", "format_version", f"this page describes version {FORMAT_VERSION}"),
    Field("I", "facts_crc", "CRC-32 over the facts below, bytes 16 and following"),
)
PREFIX = _struct(PREFIX_FIELDS)

ANCHOR_FIELDS = (
    Field("Q", "number", "0 for none yet; the valid one with the greater number counts"),
    Field("q", "monotonic_ns", "CLOCK_MONOTONIC"),
    Field("q", "wall_ns", "CLOCK_REALTIME, read beside it"),
    Field("I", "crc", "CRC-32 over the 24 bytes before"),
)
ANCHOR = _struct(ANCHOR_FIELDS)

#: The part of the header that changes, each on a cache line of its own: offset, int64 cells (or an anchor), meaning.
IN_PROGRESS_OFFSET = 1024
KEPT_OFFSET = 1088
SHARED_OFFSET = 1152
ENGINE_OFFSET = 1216
CONTROL_OFFSET = 1280
ENDED_OFFSET = 1344
ANCHOR_OFFSETS = (1408, 1472)
CELLS = (
    (IN_PROGRESS_OFFSET, "in_progress", "callback entered and not left (0: none), and since when (CLOCK_MONOTONIC)"),
    (KEPT_OFFSET, "kept", "head of the kept ring: position of its next record; records too large for it, which were dropped"),
    (SHARED_OFFSET, "shared", "the same of the ring of the other threads"),
    (ENGINE_OFFSET, "engine", "the same of the engine thread's ring"),
    (CONTROL_OFFSET, "control",
     "set by a reader, read by the writer once a step: bits 0-1 detail (0 as configured, 1 economy, 2 full, 3 off)"),
    (ENDED_OFFSET, "ended", "CLOCK_MONOTONIC of an orderly end; 0 before"),
    (ANCHOR_OFFSETS[0], "anchor 0", "a clock anchor"),
    (ANCHOR_OFFSETS[1], "anchor 1", "a clock anchor; they are written in turn"),
)  # fmt: skip


class Area(NamedTuple):
    """A ring within the file: where it begins, how many slots it has, and the offset of its cells (head, dropped)."""

    offset: int
    slots: int
    cells: int


@dataclass(frozen=True)
class Layout:
    """Where the areas of a ring file lie."""

    file_bytes: int
    waits_offset: int
    saves_offset: int
    max_layers: int
    kept: Area
    shared: Area
    engine: Area

    @property
    def rings(self) -> tuple[Area, Area, Area]:
        """Kept, shared, engine: the order of everything that goes over all rings."""
        return self.kept, self.shared, self.engine

    @classmethod
    def of_size(cls, file_bytes: int) -> Layout:
        """A sixteenth for kept records, a quarter for the other threads, the rest for the engine thread.

        Raises:
            ValueError: The size is no multiple of 4096, or too small to be of use.
        """
        if file_bytes < MIN_FILE_BYTES or file_bytes % 4096:
            raise ValueError(
                f"tracekv: a journal of {file_bytes} bytes: has to be {MIN_FILE_BYTES} or more, in steps of 4096"
            )
        kept_offset = HEADER_BYTES + 2 * HOOK_BYTES
        shared_offset = kept_offset + file_bytes // 16
        engine_offset = shared_offset + file_bytes // 4
        return cls(
            file_bytes,
            HEADER_BYTES,
            HEADER_BYTES + HOOK_BYTES,
            MAX_LAYERS,
            Area(kept_offset, file_bytes // 16 // SLOT_BYTES, KEPT_OFFSET),
            Area(shared_offset, file_bytes // 4 // SLOT_BYTES, SHARED_OFFSET),
            Area(engine_offset, (file_bytes - engine_offset) // SLOT_BYTES, ENGINE_OFFSET),
        )


class JournalFacts(msgspec.Struct, frozen=True):
    """Which process wrote a journal. ``monotonic_ns`` and ``wall_ns`` were read together when it was opened."""

    pid: int
    start_ticks: int
    pid_namespace: int
    process_id: bytes
    boot_id: str
    monotonic_ns: int
    wall_ns: int
    version: str
    host: str


def pack_header(facts: JournalFacts, layout: Layout) -> bytes:
    """The constant part of a header, magic included."""
    rest = FACTS.pack(
        layout.file_bytes, facts.pid, facts.start_ticks, facts.pid_namespace, facts.process_id,
        uuid.UUID(facts.boot_id).bytes if facts.boot_id else bytes(16), facts.monotonic_ns, facts.wall_ns,
        facts.version.encode()[:32], facts.host.encode()[:256],
        layout.waits_offset, layout.saves_offset, layout.max_layers,
        layout.kept.offset, layout.kept.slots, layout.shared.offset, layout.shared.slots,
        layout.engine.offset, layout.engine.slots,
    )  # fmt: skip
    return PREFIX.pack(MAGIC, FORMAT_VERSION, zlib.crc32(rest)) + rest


def unpack_header(header: bytes, path: Path, file_bytes: int) -> tuple[JournalFacts, Layout]:
    """What :func:`pack_header` packed; ``path`` and ``file_bytes`` are of the file it was read from.

    Raises:
        JournalFormatError: No journal, a version that isn't :data:`FORMAT_VERSION`, a damaged header or a cut file.
    """
    if len(header) < HEADER_BYTES or file_bytes < MIN_FILE_BYTES:
        kind = JournalFormatError if any(header) else JournalNotReady
        raise kind(f"tracekv: {path} is no journal: it has {file_bytes} bytes")
    magic, version, crc = PREFIX.unpack_from(header)
    if magic == bytes(8):
        raise JournalNotReady(
            f"tracekv: {path} is no journal yet: its writer is just making it, or ended before it had"
        )
    if magic != MAGIC:
        raise JournalFormatError(
            f"tracekv: {path} is no journal: it begins with {bytes(magic)!r}, a journal with {MAGIC!r}"
        )
    if version != FORMAT_VERSION:
        raise JournalFormatError(
            f"tracekv: {path} has journal format {version}, this version of tracekv reads format {FORMAT_VERSION}: "
            "read it with the tracekv that wrote it"
        )
    if zlib.crc32(header[PREFIX.size : PREFIX.size + FACTS.size]) != crc:
        raise JournalFormatError(f"tracekv: {path} has a damaged header (its CRC-32 differs)")
    values: dict[str, Any] = dict(
        zip((field.name for field in FACT_FIELDS), FACTS.unpack_from(header, PREFIX.size), strict=True)
    )
    if values["file_bytes"] != file_bytes:
        raise JournalFormatError(f"tracekv: {path} has {file_bytes} bytes, its header says {values['file_bytes']}")
    boot = values["boot_id"]
    facts = JournalFacts(
        values["pid"],
        values["start_ticks"],
        values["pid_namespace"],
        values["process_id"],
        str(uuid.UUID(bytes=boot)) if any(boot) else "",
        values["monotonic_ns"],
        values["wall_ns"],
        _text(values["version"]),
        _text(values["host"]),
    )
    layout = Layout(
        file_bytes,
        values["waits_offset"],
        values["saves_offset"],
        values["max_layers"],
        Area(values["kept_offset"], values["kept_slots"], KEPT_OFFSET),
        Area(values["shared_offset"], values["shared_slots"], SHARED_OFFSET),
        Area(values["engine_offset"], values["engine_slots"], ENGINE_OFFSET),
    )
    return facts, layout


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def crc_in_pieces(payload: bytes, crc: int) -> int:
    """CRC-32 of ``payload`` going on from ``crc``, without ever giving the GIL away."""
    with memoryview(payload) as view:
        for begin in range(0, len(view), CRC_PIECE_BYTES):
            crc = zlib.crc32(view[begin : begin + CRC_PIECE_BYTES], crc)
    return crc


DETAILS = ("", "economy", "full", "off")


def detail_of(control: int) -> str:
    """The detail that a control word asks for; empty where it leaves it as configured."""
    return DETAILS[control & 3]


def with_detail(control: int, detail: str) -> int:
    """``control`` asking for ``detail``: ``economy``, ``full``, ``off``, or empty for as configured.

    Raises:
        ValueError: Another word.
    """
    if detail not in DETAILS:
        raise ValueError(f"tracekv: there is no detail {detail!r}. Valid ones: {', '.join(DETAILS[1:])}")
    return control & ~3 | DETAILS.index(detail)


def is_supported() -> bool:
    """Whether this machine can hold a journal: the hook slots are native float64, the format is little-endian."""
    return sys.byteorder == "little"

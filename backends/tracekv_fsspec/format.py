"""The segment: an immutable object that holds many blocks, every byte of it under a checksum.

::

    header 4096 B | block | block | ... | footer (64 B per block), zero padding | trailer 64 B

Blocks start at multiples of 4096 and are padded with zeros, so that they can be read and written past the page cache; so is the whole
object. All integers are little-endian. A reader trusts no length: a truncated object or a flipped byte raises :class:`BadObject`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec.keys import FORMAT_VERSION

ALIGNMENT = 4096
HEADER_BYTES = 4096
TRAILER_BYTES = 64
#: Codec of the blocks; 0: as they lie in a page.
CODEC_NONE = 0

_MAGIC = b"TKVSEG\r\n"
_TAIL_MAGIC = b"TKVEND\r\n"
_PREFIX = struct.Struct("<8sII")  # magic, version, header bytes
_HEADER = struct.Struct("<8sII32s32s32s32s16sQIIIIQB")
_ENTRY = struct.Struct("<16sIIIIQQ16s")
_TRAILER = struct.Struct("<QQQ16s8s")  # footer offset, footer bytes, total bytes, footer checksum, magic
_DTYPE_BYTES = 32
_ZEROS = bytes(ALIGNMENT)


class BadObject(ValueError):
    """An object that can't be used, with the reason as an :class:`Outcome`: truncated, altered, foreign or version."""

    def __init__(self, outcome: Outcome, what: str) -> None:
        super().__init__(what)
        self.outcome = outcome


class SegmentHeader(NamedTuple):
    """What a segment says of itself.

    Attributes:
        layout: ``LayoutView.fingerprint()`` of the pages.
        writer: 16 bytes, unique per stager.
        total_bytes: Size of the whole object.
    """

    deployment: bytes
    namespace: bytes
    layout: bytes
    dtype: str
    writer: bytes
    sequence: int
    rank: int
    world: int
    tokens_per_block: int
    blocks: int = 0
    total_bytes: int = 0
    codec: int = CODEC_NONE


class Block(NamedTuple):
    """One block inside a segment; ``length`` bytes at ``offset``, with their xxh3_128.

    ``tokens`` is the segment's ``tokens_per_block``, or less for the tail of a prompt: then the rest of the page means nothing.
    """

    key: bytes
    layer_group: int
    ordinal: int
    tokens: int
    offset: int
    length: int
    checksum: bytes


class Payload(NamedTuple):
    """One block to be packed.

    Attributes:
        data: Its bytes; with their padding (zeros) where ``length`` is told, and then they aren't copied.
        length: Bytes without padding.
        digest: Their checksum, where it was taken already.
    """

    key: bytes
    layer_group: int
    ordinal: int
    tokens: int
    data: memoryview | bytes
    length: int | None = None
    digest: bytes | None = None


def padded(length: int) -> int:
    """``length`` rounded up to the alignment."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def aligned(size: int) -> memoryview:
    """Fresh zeroed bytes that begin on a page, so that they can go past the page cache."""
    return memoryview(mmap.mmap(-1, size))


def checksum(data: memoryview | bytes | bytearray) -> bytes:
    """xxh3_128, 16 bytes: against decay and truncation. Who may have written it is the namespace's concern."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def is_zero(data: memoryview) -> bool:
    """Whether padding is what it has to be."""
    return data == _ZEROS[: len(data)] if len(data) <= ALIGNMENT else not any(data)


def pack_segment(header: SegmentHeader, payloads: Sequence[Payload]) -> tuple[list[memoryview], list[Block]]:
    """The segment as parts to be written one after the other, and where each block lies.

    Blocks that come with their padding are parts as they are. ``blocks`` and ``total_bytes`` of ``header`` are filled in.
    """
    parts = [aligned(HEADER_BYTES)]
    blocks = []
    offset = HEADER_BYTES
    for key, layer_group, ordinal, tokens, data, length, digest in payloads:
        part = memoryview(data)
        if length is None:
            length = len(part)
            part = aligned(padded(length))
            part[:length] = data
        blocks.append(Block(key, layer_group, ordinal, tokens, offset, length, digest or checksum(part[:length])))
        parts.append(part)
        offset += len(part)
    total = padded(offset + _ENTRY.size * len(blocks) + TRAILER_BYTES)
    footer = aligned(total - offset)
    for number, block in enumerate(blocks):
        _ENTRY.pack_into(footer, number * _ENTRY.size, *block[:4], 0, *block[4:])
    trailer_at = len(footer) - TRAILER_BYTES
    footer_sum = checksum(footer[:trailer_at])
    footer[trailer_at:] = sealed(_TRAILER.pack(offset, trailer_at, total, footer_sum, _TAIL_MAGIC))
    parts[0][:] = _pack_header(header._replace(blocks=len(blocks), total_bytes=total))
    return [*parts, footer], blocks


def parse_header(data: bytes | memoryview) -> SegmentHeader:
    """The checked header in the first 4096 bytes of a segment."""
    check_prefix(data, _MAGIC, "segment", HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        raise BadObject(Outcome.TRUNCATED, f"segment header of {len(data)} bytes")
    raw = unsealed(bytes(data[:HEADER_BYTES]), "segment header")
    fields = _HEADER.unpack_from(raw)
    _, _, _, deployment, namespace, layout, dtype, writer, sequence, rank, world, tokens, blocks, total, codec = fields
    if codec != CODEC_NONE:
        raise BadObject(Outcome.VERSION, f"segment with codec {codec}")
    name = dtype.rstrip(b"\0").decode("ascii", "replace")
    return SegmentHeader(
        deployment, namespace, layout, name, writer, sequence, rank, world, tokens, blocks, total, codec
    )


def parse_segment(data: bytes | memoryview) -> tuple[SegmentHeader, list[Block]]:
    """Check a whole segment, padding included; its header and blocks.

    Raises:
        BadObject: Anything is not as it was written.
    """
    view = memoryview(data)
    header = parse_header(view)
    if len(view) != header.total_bytes:
        kind = Outcome.TRUNCATED if len(view) < header.total_bytes else Outcome.ALTERED
        raise BadObject(kind, f"segment of {len(view)} bytes, of which the header says {header.total_bytes}")
    trailer_at = len(view) - TRAILER_BYTES
    raw = unsealed(bytes(view[trailer_at:]), "segment trailer")
    footer_at, footer_bytes, total, footer_sum, magic = _TRAILER.unpack_from(raw)
    if magic != _TAIL_MAGIC or total != len(view) or footer_at + footer_bytes != trailer_at:
        raise BadObject(Outcome.ALTERED, "segment trailer that doesn't fit the segment")
    footer = view[footer_at:trailer_at]
    if footer_at < HEADER_BYTES or checksum(footer) != footer_sum or len(footer) < header.blocks * _ENTRY.size:
        raise BadObject(Outcome.ALTERED, "segment footer")
    blocks = []
    end = HEADER_BYTES
    for number in range(header.blocks):
        key, layer_group, ordinal, tokens, _, offset, length, digest = _ENTRY.unpack_from(footer, number * _ENTRY.size)
        block = Block(key, layer_group, ordinal, tokens, offset, length, digest)
        if not 0 < tokens <= header.tokens_per_block:
            raise BadObject(
                Outcome.ALTERED, f"block {number} of {tokens} tokens, where one has {header.tokens_per_block}"
            )
        if offset != end or offset + padded(length) > footer_at:
            raise BadObject(Outcome.ALTERED, f"place of block {number}")
        check_block(view[offset : offset + padded(length)], length, digest)
        end = offset + padded(length)
        blocks.append(block)
    if end != footer_at:
        raise BadObject(Outcome.ALTERED, "bytes between the blocks and the footer")
    return header, blocks


def check_block(stored: memoryview, length: int, digest: bytes) -> None:
    """Check a block's bytes as stored, its padding included; BadObject if anything differs."""
    if len(stored) == length and not length % ALIGNMENT:  # as pages mostly are
        is_right = checksum(stored) == digest
    elif len(stored) != padded(length):
        raise BadObject(Outcome.TRUNCATED, f"block of {len(stored)} bytes instead of {padded(length)}")
    else:
        is_right = checksum(stored[:length]) == digest and is_zero(stored[length:])
    if not is_right:
        raise BadObject(Outcome.ALTERED, "block that differs from its checksum")


def check_prefix(data: bytes | memoryview, magic: bytes, kind: str, header_bytes: int) -> None:
    """Check magic, version and header size, which every version keeps in place."""
    if len(data) < _PREFIX.size:
        raise BadObject(Outcome.TRUNCATED, f"{kind} of {len(data)} bytes")
    found, version, size = _PREFIX.unpack_from(data)
    if found != magic:
        raise BadObject(Outcome.FOREIGN, f"object that is no {kind}")
    if version != FORMAT_VERSION:
        raise BadObject(Outcome.VERSION, f"{kind} of format version {version}, where this is {FORMAT_VERSION}")
    if size != header_bytes:
        raise BadObject(Outcome.ALTERED, f"{kind} header of {size} bytes")


def sealed(raw: bytes) -> bytes:
    """``raw`` with its checksum behind it."""
    return raw + checksum(raw)


def unsealed(data: bytes, what: str) -> bytes:
    """The bytes before the checksum in the last 16; BadObject where they differ."""
    raw, digest = data[:-16], data[-16:]
    if checksum(raw) != digest:
        raise BadObject(Outcome.ALTERED, f"{what} that differs from its checksum")
    return raw


def _pack_header(header: SegmentHeader) -> bytes:
    deployment, namespace, layout, dtype, writer, sequence, rank, world, tokens, blocks, total, codec = header
    name = dtype.encode("ascii", "replace")
    if len(name) > _DTYPE_BYTES:
        raise ValueError(f"dtype name {dtype!r} is longer than {_DTYPE_BYTES} bytes")
    fields = (deployment, namespace, layout, name, writer, sequence, rank, world, tokens, blocks, total, codec)
    raw = _HEADER.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES, *fields)
    return sealed(raw.ljust(HEADER_BYTES - 16, b"\0"))

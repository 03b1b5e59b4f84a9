"""Small checked objects beside the segments: manifests (what a commit added), tombstones (what is going to be removed), uses.

::

    header 128 B, checked | body: msgpack of one of the structs here, under a checksum in the header

A manifest is written after its segments, so it is the commit: a block that is in no manifest doesn't exist, whatever segments there
are.
"""

from __future__ import annotations

import struct
from time import time_ns
from typing import Annotated, Any, TypeVar

import msgspec

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec.format import ALIGNMENT, HEADER_BYTES, BadObject, check_prefix, checksum, padded, sealed, unsealed
from tracekv_fsspec.keys import FORMAT_VERSION, KEY_BYTES
from tracekv_fsspec.paths import segment_path

MANIFEST_HEADER_BYTES = 128
_HEADER = struct.Struct("<8sII32sQ16s")  # magic, version, header bytes, deployment, body bytes, body checksum

_WRITTEN = struct.Struct("<Q")  # behind it, once reserved and zero: when it was packed

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
#: Rows of the index have 32 bits for it.
Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Writer = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One segment: its path below the store's root, its size, and the rank whose shard it holds."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    size: Count
    rank: Count


class BlockEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One block of one layer group and rank; ``segment`` is an index into the manifest's segments.

    ``tokens`` is how many of a page's the block has; its key covers the count, so nobody finds an incomplete block for a whole one.
    """

    key: Key
    layer_group: Count
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    segment: Count
    offset: Count
    length: Length
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one commit added to the store: blocks of one namespace."""

    namespace: Digest
    writer: Writer
    sequence: Count
    world: Count
    segments: list[SegmentEntry]
    blocks: list[BlockEntry]


class Tombstone(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Commits, as (writer, sequence), whose segments are deleted some time after this was written."""

    writer: Writer
    sequence: Count
    removed: list[tuple[Writer, Count]]


class Uses(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When blocks of a commit were last read by the engine that wrote this: (writer, sequence, seconds since 1970)."""

    writer: Writer
    commits: list[tuple[Writer, Count, Count]]


Body = TypeVar("Body", Manifest, Tombstone, Uses)
_MAGIC = {Manifest: b"TKVMAN\r\n", Tombstone: b"TKVTMB\r\n", Uses: b"TKVUSE\r\n"}
_DECODERS: dict[type, Any] = {struct_: msgspec.msgpack.Decoder(struct_).decode for struct_ in _MAGIC}
_encode = msgspec.msgpack.Encoder().encode


def pack(deployment: bytes, body: Manifest | Tombstone | Uses) -> bytes:
    """The object's bytes, with the time of packing in what was reserved in the header."""
    raw_body = _encode(body)
    magic = _MAGIC[type(body)]
    raw = _HEADER.pack(magic, FORMAT_VERSION, MANIFEST_HEADER_BYTES, deployment, len(raw_body), checksum(raw_body))
    raw += _WRITTEN.pack(time_ns())
    return sealed(raw.ljust(MANIFEST_HEADER_BYTES - 16, b"\0")) + raw_body


def parse(kind: type[Body], data: bytes, deployment: bytes) -> Body:
    """The checked object.

    Args:
        deployment: Digest that the header has to carry, or the beginning of one (a folder's name).

    Raises:
        BadObject: Truncated, altered, of another version, or not of this deployment (foreign).
    """
    name = kind.__name__.lower()
    check_prefix(data, _MAGIC[kind], name, MANIFEST_HEADER_BYTES)
    if len(data) < MANIFEST_HEADER_BYTES:
        raise BadObject(Outcome.TRUNCATED, f"{name} of {len(data)} bytes")
    raw = unsealed(data[:MANIFEST_HEADER_BYTES], f"{name} header")
    _, _, _, owner, body_bytes, digest = _HEADER.unpack_from(raw)
    if not owner.startswith(deployment):
        raise BadObject(Outcome.FOREIGN, f"{name} of another deployment")
    body = data[MANIFEST_HEADER_BYTES:]
    if len(body) != body_bytes:
        outcome = Outcome.TRUNCATED if len(body) < body_bytes else Outcome.ALTERED
        raise BadObject(outcome, f"{name} body of {len(body)} bytes instead of {body_bytes}")
    if checksum(body) != digest:
        raise BadObject(Outcome.ALTERED, f"{name} body that differs from its checksum")
    try:
        parsed: Body = _DECODERS[kind](body)
    except msgspec.MsgspecError as error:
        raise BadObject(Outcome.FOREIGN, f"{name} body that isn't one: {error}") from None
    if isinstance(parsed, Manifest):
        _check_places(parsed, owner)
    return parsed


def owner_of(data: bytes) -> bytes:
    """The deployment's digest in the header of a small object that was parsed already."""
    owner: bytes = _HEADER.unpack_from(data)[3]
    return owner


def written_ns(data: bytes) -> int:
    """When a small object that was parsed already was packed: ns since 1970 by its writer's clock; 0 from writers that didn't say."""
    when: int = _WRITTEN.unpack_from(data, _HEADER.size)[0]
    return when


def _check_places(manifest: Manifest, owner: bytes) -> None:
    """A checksum says who wrote it last, not that it makes sense. A path that isn't the commit's own could lead anywhere."""
    for segment in manifest.segments:
        if segment.path != segment_path(owner, manifest.writer, manifest.sequence, segment.rank):
            raise BadObject(Outcome.FOREIGN, "segment path that isn't this commit's")
    sizes = [segment.size for segment in manifest.segments]
    for block in manifest.blocks:
        if block.segment >= len(sizes):
            raise BadObject(Outcome.FOREIGN, f"block in segment {block.segment} of {len(sizes)}")
        end = block.offset + padded(block.length)
        if block.offset < HEADER_BYTES or block.offset % ALIGNMENT or end > sizes[block.segment]:
            raise BadObject(Outcome.FOREIGN, "block that lies outside its segment")

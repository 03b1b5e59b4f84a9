"""The manifest: which blocks a set of segments holds. It is written after the segments, so it is the commit.

::

    header 128 B, checked | body: msgpack of :class:`Manifest`, under a checksum in the header

A block that is in no manifest doesn't exist, whatever segments there are.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec.format import ALIGNMENT, HEADER_BYTES, BadObject, check_prefix, checksum, padded, sealed, unsealed
from tracekv_fsspec.keys import FORMAT_VERSION, KEY_BYTES

MANIFEST_HEADER_BYTES = 128
_MAGIC = b"TKVMAN\r\n"
_HEADER = struct.Struct("<8sII32sQ16s")  # magic, version, header bytes, deployment, body bytes, body checksum

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class SegmentEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One segment: its path below the store's root, its size, and the rank whose shard it holds."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    size: Count
    rank: Count


class BlockEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One block of one layer group and rank; ``segment`` is an index into the manifest's segments."""

    key: Key
    layer_group: Count
    tokens: Count
    segment: Count
    offset: Count
    length: Count
    checksum: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one commit added to the store: blocks of one namespace."""

    namespace: Digest
    writer: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    sequence: Count
    world: Count
    segments: list[SegmentEntry]
    blocks: list[BlockEntry]


_decode = msgspec.msgpack.Decoder(Manifest).decode
_encode = msgspec.msgpack.Encoder().encode


def pack_manifest(deployment: bytes, manifest: Manifest) -> bytes:
    """The object's bytes."""
    body = _encode(manifest)
    raw = _HEADER.pack(_MAGIC, FORMAT_VERSION, MANIFEST_HEADER_BYTES, deployment, len(body), checksum(body))
    return sealed(raw.ljust(MANIFEST_HEADER_BYTES - 16, b"\0")) + body


def parse_manifest(data: bytes, deployment: bytes) -> Manifest:
    """The checked manifest.

    Raises:
        BadObject: Truncated, altered, of another version, or not of this deployment (foreign).
    """
    check_prefix(data, _MAGIC, "manifest", MANIFEST_HEADER_BYTES)
    if len(data) < MANIFEST_HEADER_BYTES:
        raise BadObject(Outcome.TRUNCATED, f"manifest of {len(data)} bytes")
    raw = unsealed(data[:MANIFEST_HEADER_BYTES], "manifest header")
    _, _, _, owner, body_bytes, digest = _HEADER.unpack_from(raw)
    if owner != deployment:
        raise BadObject(Outcome.FOREIGN, "manifest of another deployment")
    body = data[MANIFEST_HEADER_BYTES:]
    if len(body) != body_bytes:
        kind = Outcome.TRUNCATED if len(body) < body_bytes else Outcome.ALTERED
        raise BadObject(kind, f"manifest body of {len(body)} bytes instead of {body_bytes}")
    if checksum(body) != digest:
        raise BadObject(Outcome.ALTERED, "manifest body that differs from its checksum")
    try:
        manifest = _decode(body)
    except msgspec.MsgspecError as error:
        raise BadObject(Outcome.FOREIGN, f"manifest body that isn't one: {error}") from None
    for block in manifest.blocks:
        _check_place(manifest, block)
    return manifest


def _check_place(manifest: Manifest, block: BlockEntry) -> None:
    """A checksum says who wrote it last, not that it makes sense."""
    if block.segment >= len(manifest.segments):
        raise BadObject(Outcome.FOREIGN, f"block in segment {block.segment} of {len(manifest.segments)}")
    end = block.offset + padded(block.length)
    if block.offset < HEADER_BYTES or block.offset % ALIGNMENT or end > manifest.segments[block.segment].size:
        raise BadObject(Outcome.FOREIGN, "block that lies outside its segment")

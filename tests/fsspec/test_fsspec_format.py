from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec import format as segments
from tracekv_fsspec.format import BadObject, Payload, SegmentHeader, check_block, pack_segment, padded, parse_segment
from tracekv_fsspec.manifest import BlockEntry, Manifest, SegmentEntry, Tombstone, Uses, pack, parse
from tracekv_fsspec.paths import segment_path

HEADER = SegmentHeader(b"d" * 32, b"n" * 32, b"l" * 32, "torch.bfloat16", b"w" * 16, 7, 1, 2, 32)
payloads = st.lists(
    st.builds(
        Payload,
        key=st.binary(min_size=16, max_size=16),
        layer_group=st.integers(0, 3),
        ordinal=st.integers(0, 1000),
        tokens=st.integers(1, 32),
        data=st.binary(min_size=1, max_size=300) | st.integers(4000, 9000).map(bytes),
        length=st.none(),
        digest=st.none(),
    ),
    max_size=4,
)


def packed(header, blocks):
    parts, places = pack_segment(header, blocks)
    return b"".join(parts), places


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # other work on the machine is no failure
@given(payloads)
def test_a_segment_gives_back_what_was_packed(blocks):
    data, places = packed(HEADER, blocks)
    header, found = parse_segment(data)
    assert header == HEADER._replace(blocks=len(blocks), total_bytes=len(data))
    assert found == places
    for payload, place in zip(blocks, found, strict=True):
        assert place[:4] == payload[:4]
        assert bytes(data[place.offset : place.offset + place.length]) == payload.data
        assert place.offset % 4096 == 0
    assert len(data) % 4096 == 0


SAMPLE, PLACES = packed(HEADER, [Payload(b"k" * 16, 0, 0, 32, b"x" * 5000), Payload(b"q" * 16, 1, 0, 32, b"y" * 4096)])


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(SAMPLE) * 8 - 1))
def test_any_flipped_bit_of_a_segment_is_detected(bit):
    data = bytearray(SAMPLE)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadObject):
        parse_segment(bytes(data))


def test_every_flipped_byte_of_the_header_and_the_tail_is_detected():
    tail = len(SAMPLE) - 4096
    for position in [*range(200), *range(4070, 4096), *range(tail, tail + 200), *range(len(SAMPLE) - 80, len(SAMPLE))]:
        data = bytearray(SAMPLE)
        data[position] ^= 0xFF
        with pytest.raises(BadObject):
            parse_segment(bytes(data))


@given(st.integers(0, len(SAMPLE) - 1))
def test_any_truncation_of_a_segment_is_detected(length):
    with pytest.raises(BadObject) as caught:
        parse_segment(bytes(SAMPLE[:length]))
    assert caught.value.outcome is Outcome.TRUNCATED


def test_a_longer_segment_is_altered():
    with pytest.raises(BadObject) as caught:
        parse_segment(bytes(SAMPLE) + bytes(4096))
    assert caught.value.outcome is Outcome.ALTERED


@given(st.binary(max_size=9000))
def test_arbitrary_bytes_are_no_segment(data):
    with pytest.raises(BadObject):
        parse_segment(data)


def test_a_segment_of_another_version_says_so():
    data = bytearray(SAMPLE)
    data[8] += 1
    with pytest.raises(BadObject, match="version") as caught:
        parse_segment(bytes(data))
    assert caught.value.outcome is Outcome.VERSION


def test_bytes_in_a_blocks_padding_are_detected():
    block = PLACES[0]
    stored = bytearray(SAMPLE[block.offset : block.offset + padded(block.length)])
    check_block(memoryview(stored), block.length, block.checksum)
    stored[-1] = 1
    with pytest.raises(BadObject) as caught:
        check_block(memoryview(stored), block.length, block.checksum)
    assert caught.value.outcome is Outcome.ALTERED


def test_a_dtype_name_that_doesnt_fit_is_refused():
    with pytest.raises(ValueError, match="dtype"):
        pack_segment(HEADER._replace(dtype="x" * 33), [])


DEPLOYMENT = b"d" * 32
MANIFEST = Manifest(
    b"n" * 32,
    b"w" * 16,
    3,
    1,
    [SegmentEntry(segment_path(DEPLOYMENT, b"w" * 16, 3, 0), 16384, 0)],
    [BlockEntry(b"k" * 16, 0, 32, 0, 4096, 5000, b"c" * 16)],
)
PACKED = pack(DEPLOYMENT, MANIFEST)


def test_a_manifest_gives_back_what_was_packed():
    assert parse(Manifest, PACKED, DEPLOYMENT) == MANIFEST


@pytest.mark.parametrize("position", range(len(PACKED)))
def test_any_flipped_byte_of_a_manifest_is_detected(position):
    for flip in (1, 0x80, 0xFF):
        data = bytearray(PACKED)
        data[position] ^= flip
        with pytest.raises(BadObject):
            parse(Manifest, bytes(data), DEPLOYMENT)


def test_any_truncation_of_a_manifest_is_detected():
    for length in range(len(PACKED)):
        with pytest.raises(BadObject) as caught:
            parse(Manifest, PACKED[:length], DEPLOYMENT)
        assert caught.value.outcome is Outcome.TRUNCATED


def test_a_manifest_of_another_deployment_is_foreign():
    with pytest.raises(BadObject) as caught:
        parse(Manifest, PACKED, b"e" * 32)
    assert caught.value.outcome is Outcome.FOREIGN


@pytest.mark.parametrize(
    "block",
    [
        {"segment": 1},
        {"offset": 0},
        {"offset": 4097},
        {"length": 12289},
        {"offset": 16384},
        {"key": b"k"},
        {"checksum": b""},
        {"length": 1 << 61},
    ],
    ids=repr,
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(block):
    bad = msgspec.structs.replace(MANIFEST, blocks=[msgspec.structs.replace(MANIFEST.blocks[0], **block)])
    with pytest.raises(BadObject) as caught:
        parse(Manifest, pack(DEPLOYMENT, bad), DEPLOYMENT)
    assert caught.value.outcome is Outcome.FOREIGN


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "/etc/passwd",
        segment_path(DEPLOYMENT, b"w" * 16, 4, 0),
        segment_path(b"e" * 32, b"w" * 16, 3, 0),
    ],
)
def test_a_sealed_manifest_that_leads_elsewhere_is_refused(path):
    bad = msgspec.structs.replace(MANIFEST, segments=[SegmentEntry(path, 16384, 0)])
    with pytest.raises(BadObject, match="path") as caught:
        parse(Manifest, pack(DEPLOYMENT, bad), DEPLOYMENT)
    assert caught.value.outcome is Outcome.FOREIGN


@pytest.mark.parametrize("body", [Tombstone(b"w" * 16, 1, [(b"v" * 16, 7)]), Uses(b"w" * 16, [(b"v" * 16, 7, 100)])])
def test_other_small_objects_give_back_what_was_packed_and_are_no_manifests(body):
    data = pack(DEPLOYMENT, body)
    assert parse(type(body), data, DEPLOYMENT) == body
    assert parse(type(body), data, DEPLOYMENT[:8]) == body
    with pytest.raises(BadObject) as caught:
        parse(Manifest, data, DEPLOYMENT)
    assert caught.value.outcome is Outcome.FOREIGN


def test_padding_may_be_longer_than_one_alignment():
    assert segments.is_zero(memoryview(bytes(10_000)))
    assert not segments.is_zero(memoryview(bytes(9_999) + b"\x01"))


@given(st.integers(0, 2**32 - 1))
def test_a_block_has_one_token_to_as_many_as_the_header_says(tokens):
    data, _ = packed(HEADER, [Payload(b"k" * 16, 0, 0, tokens, b"x" * 100)])
    if 1 <= tokens <= HEADER.tokens_per_block:
        assert parse_segment(data)[1][0].tokens == tokens
        return
    with pytest.raises(BadObject) as caught:
        parse_segment(data)
    assert caught.value.outcome is Outcome.ALTERED


@given(st.integers(0, 2**40))
def test_a_manifest_says_of_each_block_how_many_tokens_it_has(tokens):
    entry = BlockEntry(b"k" * 16, 0, tokens, 0, 4096, 5000, b"c" * 16)
    data = pack(b"d" * 32, msgspec.structs.replace(MANIFEST, blocks=[entry]))
    if 1 <= tokens < 1 << 32:
        assert parse(Manifest, data, b"d" * 32).blocks == [entry]
        return
    with pytest.raises(BadObject) as caught:
        parse(Manifest, data, b"d" * 32)
    assert caught.value.outcome is Outcome.FOREIGN


def test_objects_of_before_there_were_incomplete_blocks_are_read_and_written_as_they_were():
    """The digests are of what the version before wrote; what it left zero in a manifest's header is now the time of writing."""
    assert hashlib.sha256(SAMPLE).hexdigest()[:16] == "d7484060913f3d2e"
    old = segments.sealed(PACKED[:72].ljust(112, b"\0")) + PACKED[128:]
    assert hashlib.sha256(old).hexdigest()[:16] == "3f1f0456c13b42aa"
    assert parse(Manifest, old, DEPLOYMENT) == MANIFEST

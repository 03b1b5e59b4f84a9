"""Objects that somebody put there: whatever their bytes, a reader gives right blocks or none, and never fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.node import Node, keys
from tracekv_fsspec.inventory import survey, verify
from tracekv_fsspec.manifest import Manifest, Tombstone, Uses, pack, parse
from tracekv_fsspec.store import open_store

BLOCKS = keys(4)
FUZZED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture
def stored(tmp_path):
    """Two commits of one writer, and what lies in each of their objects."""
    one = Node((tmp_path / "kv").as_uri())
    one.save(BLOCKS)
    one.save(keys(4, seed=1))
    one.stager.close()
    return {path: path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file()}


def restore(stored):
    for path, data in stored.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def look(folder: Path):
    """A fresh engine and the tools; every block that is given is right."""
    node = Node((folder / "kv").as_uri(), arena_bytes=1 << 20)
    try:
        for wanted in (BLOCKS, keys(4, seed=1)):
            ticket, staged, _ = node.stage(wanted)
            assert node.is_right(ticket, staged)
    finally:
        node.stager.close()
    store = open_store((folder / "kv").as_uri())
    for commit in survey(store).commits:
        verify(store, commit)


@FUZZED
@given(st.data())
def test_any_bytes_in_place_of_an_object_are_right_blocks_or_none(stored, tmp_path, data):
    restore(stored)
    for path in sorted(stored):
        how = data.draw(st.sampled_from(["keep", "flip", "cut", "grow", "replace", "swap"]), label=path.name)
        old = stored[path]
        if how == "flip":
            at = data.draw(st.integers(0, len(old) * 8 - 1))
            new = bytearray(old)
            new[at // 8] ^= 1 << at % 8
            path.write_bytes(bytes(new))
        elif how == "cut":
            path.write_bytes(old[: data.draw(st.integers(0, len(old)))])
        elif how == "grow":
            path.write_bytes(old + data.draw(st.binary(max_size=5000)))
        elif how == "replace":
            path.write_bytes(data.draw(st.binary(max_size=200)))
        elif how == "swap":
            path.write_bytes(stored[data.draw(st.sampled_from(sorted(stored)))])
    look(tmp_path)


small = st.integers(0, 1 << 40)
digest = st.binary(min_size=16, max_size=16)


@FUZZED
@given(
    st.lists(st.tuples(digest, small, small), max_size=5),
    st.lists(st.tuples(digest, small), max_size=5),
    st.sampled_from([0, 1, 999_999_999_999]),
)
def test_sealed_tombstones_and_uses_of_nonsense_hurt_nobody(stored, tmp_path, used, removed, sequence):
    restore(stored)
    manifest = next(path for path in stored if path.suffix == ".man")
    deployment = _owner(stored[manifest])
    folder = manifest.parent.parent
    stranger = folder / ("f" * 32)
    stranger.mkdir(exist_ok=True)
    (stranger / f"{sequence:012d}.tmb").write_bytes(pack(deployment, Tombstone(b"\xff" * 16, sequence, removed)))
    uses = folder.parent / "u"
    uses.mkdir(exist_ok=True)
    (uses / f"{'f' * 32}.use").write_bytes(pack(deployment, Uses(b"\xff" * 16, used)))
    node = Node((tmp_path / "kv").as_uri())
    ticket, staged, _ = node.stage(BLOCKS)
    assert (staged, node.is_right(ticket, 4)) == (4, True)
    node.stager.close()
    survey(open_store((tmp_path / "kv").as_uri()))


def test_a_sealed_manifest_that_promises_anothers_block_gives_none(stored, tmp_path):
    """A checksum of its own makes a manifest whole, not true: the block's own bytes are what counts."""
    first, second = sorted(path for path in stored if path.suffix == ".man")
    deployment = _owner(stored[first])
    one, two = (parse(Manifest, stored[path], deployment) for path in (first, second))
    lying = [entry.__class__(two.blocks[n].key, *list_of(entry)[1:]) for n, entry in enumerate(one.blocks)]
    first.write_bytes(pack(deployment, Manifest(one.namespace, one.writer, one.sequence, 1, one.segments, lying)))
    second.unlink()
    node = Node((tmp_path / "kv").as_uri())
    ticket, staged, _ = node.stage(keys(4, seed=1))
    # Whoever may write to the store can do this (docs/object-format.md); the tools tell it from the segment's footer.
    assert staged == 4
    node.release(ticket, 4)
    node.stager.close()
    store = open_store((tmp_path / "kv").as_uri())
    assert any(verify(store, commit) for commit in survey(store).commits)


def list_of(entry):
    return [getattr(entry, name) for name in entry.__struct_fields__]


def _owner(data):
    return data[16:48]

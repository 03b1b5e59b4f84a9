"""The index by itself, and what feeds it: cursors, tombstones, doubts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.node import DEPLOYMENT, FULL, NAMESPACE, WINDOW, keys
from tracekv.journal.records import StoreOperation
from tracekv.journal.vocabulary import MissReason, Operation, Outcome
from tracekv_fsspec import catalog as catalogs
from tracekv_fsspec import committing
from tracekv_fsspec import index as indexes
from tracekv_fsspec import writer as writers
from tracekv_fsspec.index import Index, Place, Shard
from tracekv_fsspec.keys import namespace_digest
from tracekv_fsspec.manifest import BlockEntry, Manifest, SegmentEntry
from tracekv_fsspec.paths import Commit, segment_path

DIGEST = DEPLOYMENT.digest()


def manifest(blocks, writer=b"w" * 16, sequence=0, layer_group=0, length=lambda number: 100 + number):
    segment = SegmentEntry(segment_path(DIGEST, writer, sequence, 0), 4096 * (len(blocks) + 2), 0)
    entries = [
        BlockEntry(key, layer_group, 32, 0, 4096 * (number + 1), length(number), number.to_bytes(16, "big"))
        for number, key in enumerate(blocks)
    ]
    return Manifest(NAMESPACE, writer, sequence, 1, [segment], entries)


def places(index, wanted, shard=FULL):
    stretches, missing = index.stretches(shard, wanted)
    found = [None] * len(wanted)
    for stretch in stretches:
        for number, checksum in enumerate(stretch.checksums):
            offset = stretch.offset + number * 4096
            assert found[stretch.first + number] is None
            found[stretch.first + number] = Place(offset, stretch.length, checksum)
    assert missing == [number for number, place in enumerate(found) if place is None]
    return found


@settings(deadline=None)
@given(
    st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=40),
    st.randoms(use_true_random=False),
    st.integers(0, 40),
    st.sampled_from([1, 2, 100]),
)
def test_every_key_is_found_where_it_is_in_whatever_order(blocks, chance, kept_in_order, sizes):
    def length(number):
        return 100 + number % sizes

    index = Index([FULL])
    assert index.add(manifest(blocks, length=length)) == len(blocks)
    expected = {key: (4096 * (n + 1), length(n), n.to_bytes(16, "big")) for n, key in enumerate(blocks)}
    shuffled = [*blocks, b"nobody's key....", *blocks]
    chance.shuffle(shuffled)
    wanted = [*blocks[:kept_in_order], *shuffled]
    assert places(index, wanted) == [expected.get(key) for key in wanted]


def test_a_key_that_two_neighbours_spell_together_is_not_found_between_them():
    first, second = bytes(8) + b"A" * 8, b"B" * 8 + bytes(8)
    between = b"A" * 8 + b"B" * 8
    index = Index([FULL])
    index.add(manifest([first, second, between]))
    assert [place.offset for place in places(index, [between, first])] == [3 * 4096, 4096]


def test_a_run_is_full_at_256_blocks_and_goes_on_in_the_next():
    wanted = keys(600)
    index = Index([FULL])
    index.add(manifest(wanted))
    assert [place.offset for place in places(index, wanted)] == [4096 * (n + 1) for n in range(600)]
    assert index.prefix(FULL, wanted) == 600
    assert index.prefix(FULL, [*wanted[:300], b"x" * 16, *wanted]) == 300
    assert index.prefix(FULL, wanted, 599) == 600


def test_blocks_that_follow_each_other_as_they_were_stored_are_one_stretch():
    wanted = keys(300)
    index = Index([FULL])
    index.add(manifest(wanted, length=lambda number: 4096))
    stretches, missing = index.stretches(FULL, [*wanted, b"x" * 16])
    assert [(stretch.first, stretch.blocks) for stretch in stretches] == [(0, 256), (256, 44)]
    assert missing == [300]
    part = stretches[1].part(3, 5)
    assert (part.first, part.offset, part.checksums) == (259, 260 * 4096, stretches[1].checksums[3:5])


def test_shards_that_nobody_asked_for_are_left_out():
    index = Index([FULL, WINDOW])
    assert index.add(manifest(keys(3), layer_group=7)) == 0
    assert index.add(manifest(keys(3), sequence=1, layer_group=1)) == 3
    assert not index.holds(FULL, keys(1)[0])
    assert index.holds(WINDOW, keys(1)[0])
    with pytest.raises(KeyError):
        index.holds(Shard(7, 0), keys(1)[0])


def test_a_removed_commit_is_forgotten_and_stays_so():
    index = Index([FULL])
    index.add(manifest(keys(3)))
    assert index.remove(Commit(b"w" * 16, 0), for_good=True) == 3
    assert index.add(manifest(keys(3))) == 0
    assert len(index) == 0
    assert index.remove(Commit(b"w" * 16, 0), for_good=True) == 0


def test_what_is_stored_twice_is_found_at_its_other_place_when_the_first_goes():
    index = Index([FULL])
    index.add(manifest(keys(3)))
    index.add(manifest(keys(5), sequence=1))
    assert len(index) == 5
    index.remove(Commit(b"w" * 16, 0), for_good=True)
    assert index.doubted() == {Commit(b"w" * 16, 1)}
    assert index.add(manifest(keys(5), sequence=1)) == 5
    assert index.prefix(FULL, keys(5)) == 5


def test_what_was_gone_is_believed_for_a_time_only(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(indexes, "monotonic", lambda: now[0])
    index = Index([FULL])
    index.add(manifest(keys(3)))
    ((_, run, *_),) = index.stretches(FULL, keys(1))[0]
    assert index.quarantine_segment(run.segment, Outcome.MISSING) == 3
    assert index.quarantine_segment(run.segment, Outcome.MISSING) == 0
    assert index.fault(FULL, keys(1)[0]) is Outcome.MISSING
    assert index.doubted() == set()
    now[0] += indexes.NEGATIVE_S
    assert index.fault(FULL, keys(1)[0]) is None
    assert index.doubted() == {Commit(b"w" * 16, 0)}
    index.looked_at(index.doubted())
    assert index.doubted() == set()


def test_a_segment_that_comes_back_is_a_hit_again(node, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(indexes, "monotonic", lambda: now[0])
    node().save(keys(3))
    (segment,) = (tmp_path / "kv").rglob("*.seg")
    reader = node()
    segment.rename(tmp_path / "away")
    assert reader.stage(keys(3))[1:] == (0, MissReason.NOT_STORED)
    segment.parent.mkdir(exist_ok=True)
    (tmp_path / "away").rename(segment)
    reader.stager.catalog.refresh()
    assert reader.stage(keys(3))[1] == 0
    now[0] += indexes.NEGATIVE_S
    reader.stager.catalog.refresh()
    assert reader.stage(keys(3))[1] == 3


def test_an_evicted_segment_between_lookup_and_read_is_a_miss(node, tmp_path):
    node().save(keys(3))
    reader = node()
    assert reader.stager.prefix(FULL, keys(3), 0) == 3
    for path in (tmp_path / "kv").rglob("*.seg"):
        path.unlink()
    assert reader.stage(keys(3))[1:] == (0, MissReason.NOT_STORED)
    assert reader.stager.prefix(FULL, keys(3), 0) == 0


def lists(records):
    return [record for record in records.of(StoreOperation) if record.operation is Operation.LIST]


def test_a_large_store_is_followed_by_cursors_and_listed_whole_every_kth_time(node, monkeypatch, records):
    monkeypatch.setattr(catalogs, "_PAGE", 1)  # so that three commits are a large store
    one = node()
    for seed in range(3):
        one.save(keys(2, seed=seed))
    reader = node()
    catalog = reader.stager.catalog
    for seed in range(3, 8):
        one.save(keys(2, seed=seed))
        assert catalog.refresh() == (1, 2)
    assert [record.blocks for record in lists(records)][-5:] == [1] * 5  # each found what was new, and nothing else
    two = node()
    two.save(keys(4, seed=20))
    assert catalog.refresh() == (1, 4)
    assert lists(records)[-1].blocks == 1
    for _ in range(catalogs.FULL_EVERY):
        catalog.refresh()
    assert max(record.blocks for record in lists(records)) == 9
    assert len(reader.stager.index) == 20


def test_a_writer_that_was_idle_goes_on_under_an_id_that_others_find(node, monkeypatch):
    monkeypatch.setattr(catalogs, "_PAGE", 1)
    monkeypatch.setattr(committing, "ROTATE_S", -1.0)
    one = node()
    for seed in range(3):
        one.save(keys(2, seed=seed))
    reader = node()
    reader.stager.catalog._seen_at.clear()  # as if they had fallen silent long ago
    one.save(keys(2, seed=9))
    assert len(one.stager.catalog._own) == 5
    assert reader.stager.catalog.refresh() == (1, 2)


def test_two_engines_see_each_others_blocks_within_one_refresh(node):
    one, two = node(), node()
    one.save(keys(3))
    two.save(keys(3, seed=1))
    one.stager.catalog.refresh()
    two.stager.catalog.refresh()
    for each in (one, two):
        assert each.stager.prefix(FULL, keys(3), 0) == 3
        assert each.stager.prefix(FULL, keys(3, seed=1), 0) == 3


def test_a_request_that_ends_seals_its_segment_unless_others_are_in_it(node, monkeypatch):
    monkeypatch.setattr(writers, "SEAL_AFTER_S", 3600.0)
    one, reader = node(), node()
    one.submit(keys(2), request_id=1)
    one.submit(keys(2, seed=1), request_id=2)
    writer = one.stager.writer
    writer.request_ended(1)
    # Another namespace's request is done behind it: by then the end of the first one was acted upon.
    one.submit(keys(1, seed=2), namespace_digest(DIGEST, cache_salt="other"), request_id=3)
    writer.request_ended(3)
    with writer._changed:
        assert writer._changed.wait_for(lambda: writer._unstored == 4, 30)
    assert reader.stager.catalog.refresh() == (1, 1)
    writer.request_ended(2)
    with writer._changed:
        assert writer._changed.wait_for(lambda: not writer._unstored, 30)
    assert reader.stager.catalog.refresh() == (1, 4)


READ_ONLY = """
    import subprocess
    from tests.store.node import FULL, Node, keys
    folder = {folder!r}
    def mount(*options):
        subprocess.run(["mount", *options, folder], check=True)
    mount("-t", "tmpfs", "tmpfs")
    one = Node("file://" + folder + "/kv")
    one.save(keys(2))
    mount("-o", "remount,ro")
    one.save(keys(2, seed=1))
    mount("-o", "remount,rw")
    one.save(keys(2, seed=2))
    one.stager.close()
    fresh = Node("file://" + folder + "/kv")
    print([fresh.stager.prefix(FULL, keys(2, seed=seed), 0) for seed in range(3)])
"""


def test_permission_lost_while_it_runs_is_a_drop_until_it_comes_back(tmp_path):
    """A real one: the store's file system becomes read-only, in a mount namespace of its own."""
    script = textwrap.dedent(READ_ONLY).format(folder=str(tmp_path))
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    done = subprocess.run(
        ["unshare", "--mount", *user, sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[2, 0, 2]", done.stderr
    assert "not saved (store_refused)" in done.stderr


def test_the_start_is_said_with_what_was_read(node, caplog):
    node().save(keys(3))
    with caplog.at_level("INFO", "tracekv.fsspec"):
        node()
    assert any("holds 3 blocks in 1 manifests" in record.message for record in caplog.records)


def test_reading_manifests_tells_its_progress(node):
    for seed in range(3):
        node().save(keys(1, seed=seed))
    reader = node()
    reader.stager.catalog._cursors.clear()
    seen = []
    reader.stager.catalog._round = 0
    reader.stager.catalog.refresh(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]

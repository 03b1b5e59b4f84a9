"""The stager by itself: no scheduler, no worker, no torch."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.store.node import DEPLOYMENT, FULL, MIB, NAMESPACE, WINDOW, keys
from tracekv.journal.records import StoreOperation
from tracekv.journal.vocabulary import MissReason, Operation
from tracekv_fsspec.format import parse_segment
from tracekv_fsspec.keys import namespace_digest
from tracekv_fsspec.writer import SaveBlock


def test_a_large_save_is_several_segments_and_every_block_comes_back(node, tmp_path, records):
    wanted = keys(80)
    node(page_bytes={FULL: MIB // 2}).save(wanted)
    segments = list((tmp_path / "kv").rglob("*.seg"))
    assert len(segments) == 3
    assert all(path.stat().st_size <= 17 * MIB for path in segments)
    reader = node(page_bytes={FULL: MIB // 2})
    ticket, taken, reason = reader.stage(wanted)
    assert (taken, reason) == (80, None)
    assert reader.is_right(ticket, 80)
    reads = [
        record for record in records.of(StoreOperation) if record.operation is Operation.READ and record.blocks < 80
    ]
    assert sum(record.blocks for record in reads if record.nbytes > 10_000) == 80


def test_one_prompts_blocks_of_a_layer_group_are_neighbours(node, tmp_path):
    node(page_bytes={FULL: 4096, WINDOW: 100}).save(keys(5))
    (path,) = (tmp_path / "kv").rglob("*.seg")
    header, blocks = parse_segment(path.read_bytes())
    assert [(block.layer_group, block.ordinal) for block in blocks] == [(g, o) for g in (0, 1) for o in range(5)]
    assert (header.rank, header.world, header.namespace) == (0, 1, NAMESPACE)


def test_namespaces_never_share_a_segment(node, tmp_path):
    one = node()
    one.save(keys(2))
    one.save(keys(2, seed=1), namespace_digest(DEPLOYMENT.digest(), cache_salt="tenant"))
    found = [parse_segment(path.read_bytes())[0].namespace for path in (tmp_path / "kv").rglob("*.seg")]
    assert len(set(found)) == len(found) == 2


def test_a_bad_header_fails_every_batch_of_its_segment(node, tmp_path):
    wanted = keys(30)
    node(page_bytes={FULL: MIB // 2}).save(wanted)
    (path,) = (tmp_path / "kv").rglob("*.seg")
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    reader = node(page_bytes={FULL: MIB // 2})
    _, taken, reason = reader.stage(wanted)
    assert (taken, reason) == (0, MissReason.CORRUPT)
    reader.stager.reader.close(30)  # the first block settles it; batches behind it may be on their way still
    assert not any(reader.stager.arena.holds(FULL, key) for key in wanted)
    assert reader.stager.arena.free_slots(FULL) == reader.stager.arena.slots_per_shard


def test_blocks_that_two_queries_want_are_read_once(node, faulty):
    node("faulty://kv").save(keys(4))
    reader = node("faulty://kv")
    may_read = threading.Event()
    faulty.before = staticmethod(lambda operation, path: operation == "read" and may_read.wait(30))
    faulty.calls.clear()
    tickets = [reader.stager.reader.stage(keys(4), 0) for _ in range(3)]
    may_read.set()
    for ticket in tickets:
        reader.stager.reader.wait(ticket, 30)
        assert reader.stager.reader.take(ticket) == (4, None)
        assert reader.is_right(ticket, 4)
        reader.release(ticket, 4)
    assert len([call for call in faulty.calls if call[0] == "read"]) == 1
    assert reader.stager.arena.free_slots(FULL) == reader.stager.arena.slots_per_shard


def test_the_tail_of_a_prompt_doesnt_evict_its_head(node):
    wanted = keys(12)
    node().save(wanted)
    reader = node(arena_bytes=8 * 4096)
    ticket, taken, reason = reader.stage(wanted)
    assert (taken, reason) == (8, MissReason.ARENA_FULL)
    assert reader.is_right(ticket, 8)
    reader.release(ticket, 8)
    assert all(reader.stager.arena.holds(FULL, key) for key in wanted[:8])


def test_a_chain_loses_its_end_before_its_beginning(node):
    first, second = keys(6), keys(4, seed=1)
    node().save([*first, *second])
    reader = node(arena_bytes=8 * 4096)
    ticket, taken, _ = reader.stage(first)
    reader.stager.release(list(reversed(ticket.slots[FULL][:taken])))
    ticket, taken, _ = reader.stage(second)
    assert taken == 4
    assert [reader.stager.arena.holds(FULL, key) for key in first] == [True] * 4 + [False] * 2


def test_two_writers_and_a_reader_share_a_store(node):
    reader = node()
    node().save(keys(3))
    node().save(keys(3, seed=1))
    assert reader.stager.catalog.refresh() == (2, 6)
    for seed in (0, 1):
        ticket, taken, _ = reader.stage(keys(3, seed=seed))
        assert taken == 3
        assert reader.is_right(ticket, 3)


def test_blocks_that_two_writers_stored_count_once(node):
    reader, one, two = node(), node(), node()
    one.save(keys(3))
    two.save(keys(4))
    assert reader.stager.catalog.refresh() == (2, 4)
    assert len(reader.stager.index) == 4


def test_a_small_save_is_stored_without_a_flush(node):
    writer, reader = node(), node(refresh_ms=10)
    block = keys(1)
    slot = writer.stager.writer.reserve(FULL, block[0])
    writer.stager.writer.submit([SaveBlock(1, NAMESPACE, block[0], 0, 32, slot)])
    seen = threading.Event()
    add = reader.stager.index.add

    def watched(*arguments):
        seen.set()
        return add(*arguments)

    reader.stager.index.add = watched
    assert seen.wait(30)


def test_a_page_of_another_size_is_never_loaded(node):
    node(page_bytes={FULL: 4096}).save(keys(2))
    reader = node(page_bytes={FULL: 4000})
    assert reader.stage(keys(2))[1:] == (0, MissReason.CORRUPT)


def test_closing_while_reads_wait_settles_them_as_misses(node, faulty):
    node("faulty://kv").save(keys(4))
    reader = node("faulty://kv")
    may_read = threading.Event()
    faulty.before = staticmethod(lambda operation, path: operation == "read" and may_read.wait(30))
    ticket = reader.stager.reader.stage(keys(4), 0)
    closing = threading.Thread(target=reader.stager.close)
    closing.start()
    may_read.set()
    closing.join()
    assert ticket.is_settled()
    late = reader.stager.reader.stage(keys(4, seed=3), 0)
    assert late.is_settled()
    assert not [thread for thread in threading.enumerate() if thread in reader.stager.reader._threads]


def test_the_arena_is_touched_only_as_far_as_it_is_used(node):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    large = node(arena_bytes=512 * MIB)
    assert resident() - before < 64 * MIB
    large.save(keys(1))

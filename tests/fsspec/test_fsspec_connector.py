"""The pair, driven as a runtime drives it."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from tests.fsspec.engine import POISON, B, LlmArgs, prompt
from tracekv.journal.records import Drop, Lookup, StoreOperation, Transfer
from tracekv.journal.vocabulary import Direction, DropReason, MissReason, Operation, Outcome, Tier

TWO_GROUPS = (None, 2 * B + 1)


def stored(engines, tokens, windows=(None,), **more):
    """Run a prompt in an engine of its own until its blocks are in the store."""
    engine = engines(windows)
    running = engine.prefill(1, tokens, **more)
    assert engine.scheduler.flush(20)
    engine.finish(running)
    engine.stop()
    return running


@pytest.mark.parametrize("windows", [(None,), TWO_GROUPS], ids=["tensor", "two groups"])
def test_a_fresh_pair_loads_what_another_saved(engines, configure, records, windows, any_url):
    configure(url=any_url)
    tokens = prompt(6)
    assert stored(engines, tokens, windows).offered == 0
    engine = engines(windows)
    running = engine.admit(5, tokens)
    assert running.offered == 6 * B
    engine.run_pass((running, len(tokens) - running.position), forward=False)
    assert engine.holds_its_kv(running, 0, 6)
    loads = [record for record in records.of(Transfer) if record.direction is Direction.LOAD]
    assert {record.layer_group for record in loads} == set(range(len(windows)))
    page_bytes = [pool[0].numel() * 4 for pool in engine.pools]
    for load in loads:
        assert load.nbytes == len(load.pages) * page_bytes[load.layer_group]
        assert load.pages == [page for page in running.pages[load.layer_group][:6] if page >= 0]
        assert load.request_id == 5
        expected = {"file": Tier.DISK, "memory": Tier.HOST, "s3": Tier.OBJECT}[any_url.split(":")[0]]
        assert load.tier is expected


def test_a_changed_page_is_noticed(engines, configure):
    tokens = prompt(3)
    stored(engines, tokens)
    engine = engines()
    running = engine.admit(5, tokens)
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 3)
    engine.pools[0][running.pages[0][1], 0, 0, 0] += 1
    assert not engine.holds_its_kv(running, 0, 3)


def test_the_whole_prompt_is_never_offered(engines, configure, records):
    tokens = prompt(4, extra=0)
    engine = engines()
    engine.prefill(1, tokens)
    assert engine.scheduler.flush(20)
    longer = engine.prefill(2, [*tokens, 1])
    assert longer.offered == 4 * B  # all four blocks are there
    same = engine.prefill(3, tokens)
    assert same.offered == 3 * B


def test_a_prompt_shorter_than_a_block_is_too_short(engines, configure, records):
    engines().prefill(1, prompt(1, extra=0))
    assert records.of(Lookup)[-1].reason is MissReason.PROMPT_TOO_SHORT


def test_only_what_the_device_lacks_is_offered(engines, configure, records):
    tokens = prompt(6)
    stored(engines, tokens)
    running = engines().admit(5, tokens, computed=2 * B)
    assert running.offered == 4 * B
    lookup = records.of(Lookup)[-1]
    assert (lookup.computed_tokens, lookup.stored_tokens, lookup.offered_tokens) == (2 * B, 6 * B, 4 * B)
    assert lookup.reason is None


def test_a_whole_prompt_on_the_device_needs_no_offer(engines, configure, records):
    tokens = prompt(3)
    stored(engines, tokens)
    assert engines().admit(5, tokens, computed=3 * B).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.ON_DEVICE


def test_a_device_hit_inside_a_block_gets_no_offer(engines, configure, records):
    tokens = prompt(4)
    stored(engines, tokens)
    assert engines().admit(5, tokens, computed=B + 1).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.UNALIGNED


def test_another_salt_never_sees_the_blocks(engines, configure, records):
    tokens = prompt(4)
    stored(engines, tokens, cache_salt="tenant-a")
    engine = engines()
    assert engine.admit(5, tokens, cache_salt="tenant-b").offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.NOT_STORED
    assert engine.admit(6, tokens).offered == 0
    assert engine.admit(7, tokens, cache_salt="tenant-a").offered == 4 * B


@pytest.mark.parametrize("setting", ["model_id", "kv_scales"])
def test_another_model_never_sees_the_blocks(engines, configure, setting):
    tokens = prompt(4)
    stored(engines, tokens)
    configure(**{setting: "another"})
    assert engines().admit(5, tokens).offered == 0
    configure(**{setting: None if setting == "kv_scales" else "test-model"})
    assert engines().admit(5, tokens).offered == 4 * B


def test_a_lora_request_bypasses_the_store_unless_its_adapter_has_a_digest(engines, configure, records):
    tokens = prompt(4)
    engine = engines()
    running = engine.prefill(1, tokens, lora_task_id=3)
    assert engine.scheduler.flush(20)
    assert records.of(Lookup)[-1].reason is MissReason.BYPASS_LORA
    assert not [record for record in records.of(Transfer) if record.request_id == running.request.request_id]
    configure(lora_digests='{"3": "adapter-digest"}')
    stored(engines, tokens, lora_task_id=3)
    fresh = engines()
    assert fresh.admit(5, tokens, lora_task_id=3).offered == 4 * B
    assert fresh.admit(6, tokens).offered == 0


def test_images_need_hashes_and_are_part_of_the_key(engines, configure, records):
    tokens = prompt(4)
    stored(engines, tokens, multimodal_hashes=[[1, 2]], multimodal_positions=[3], multimodal_lengths=[2])
    engine = engines()
    same = {"multimodal_hashes": [[1, 2]], "multimodal_positions": [3], "multimodal_lengths": [2]}
    assert engine.admit(5, tokens, **same).offered == 4 * B
    assert engine.admit(6, tokens, **{**same, "multimodal_hashes": [[1, 3]]}).offered == 0
    assert engine.admit(7, tokens, multimodal_positions=[3]).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.BYPASS_MULTIMODAL


def test_a_token_outside_uint32_bypasses_the_store(engines, configure, records):
    engine = engines()
    tokens = prompt(3)
    tokens[2] = -1
    engine.prefill(1, tokens)
    assert records.of(Lookup)[-1].reason is MissReason.BYPASS_TOKENS
    assert not records.of(Transfer)


def test_later_chunks_are_saved(engines, configure):
    tokens = prompt(8)
    stored(engines, tokens, TWO_GROUPS, chunk=3 * B - 1)
    engine = engines(TWO_GROUPS)
    running = engine.admit(5, tokens)
    assert running.offered == 8 * B
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 8)


def test_generated_blocks_are_saved_when_their_tokens_are_complete(engines, configure, records):
    tokens = prompt(2)
    engine = engines()
    running = engine.prefill(1, tokens)
    for token in range(100, 100 + 2 * B):
        running.tokens.append(token)
        engine.run_pass((running, 1))
    assert engine.scheduler.flush(20)
    saved = [len(record.pages) for record in records.of(Transfer)]
    assert saved == [2, 1, 1]
    assert engines().admit(5, [*running.tokens, 1]).offered == 4 * B


def test_pages_of_blocks_without_one_are_skipped(engines, configure, records):
    tokens = prompt(8)
    stored(engines, tokens, TWO_GROUPS)
    engine = engines(TWO_GROUPS)
    untouched = [pool.clone() for pool in engine.pools]
    running = engine.admit(5, tokens)
    assert running.offered == 8 * B
    assert -1 in running.pages[1]
    assert -1 not in running.pages[0]
    plan = engine.run_pass((running, 1), forward=False)
    assert all(page >= 0 for copy in plan.loads for page in copy.pages)
    for group, pool in enumerate(engine.pools):
        others = [slot for slot in range(len(pool)) if slot not in running.pages[group]]
        assert torch.equal(pool[others], untouched[group][others])
    assert (untouched[0] == POISON).all()


def test_what_was_loaded_or_stored_is_not_saved_again(engines, configure, records):
    tokens = prompt(4)
    stored(engines, tokens)
    before = len([record for record in records.of(Transfer) if record.direction is Direction.SAVE])
    engine = engines()
    engine.prefill(5, tokens)
    engine.prefill(6, tokens, honour=0)
    assert engine.scheduler.flush(20)
    saves = [record for record in records.of(Transfer) if record.direction is Direction.SAVE]
    assert len(saves) == before


def test_less_honoured_than_offered_loads_less_and_gives_the_rest_back(engines, configure):
    tokens = prompt(6)
    stored(engines, tokens)
    engine = engines()
    running = engine.admit(5, tokens, honour=2 * B)
    plan = engine.run_pass((running, len(tokens) - running.position), forward=False)
    assert [len(copy.pages) for copy in plan.loads] == [2]
    assert engine.holds_its_kv(running, 0, 2)
    assert not engine.holds_its_kv(running, 2, 3)
    assert_nothing_is_pinned(engine)


@pytest.mark.parametrize("honour", [None, 2 * B, 0])
def test_an_unknown_honoured_amount_never_loads_less_nor_saves_uncomputed_blocks(engines, configure, honour):
    tokens = prompt(6)
    stored(engines, tokens[: 4 * B + 1])
    engine = engines()
    running = engine.admit(5, tokens, honour=honour, tells_honoured=False)
    engine.run_pass((running, B), forward=False)
    assert engine.holds_its_kv(running, 0, running.honoured // B)
    engine._compute(running, running.position, running.position + B)
    engine.worker.wait_for_save(engine.stream)
    running.position += B
    while running.position < len(tokens):
        engine.run_pass((running, min(B, len(tokens) - running.position)))
    assert engine.scheduler.flush(20)
    fresh = engines()
    again = fresh.admit(6, tokens)
    assert again.offered == 6 * B
    fresh.run_pass((again, 1), forward=False)
    assert fresh.holds_its_kv(again, 0, 6)


def test_a_replay_starts_afresh_on_other_pages(engines, configure):
    tokens = prompt(6)
    stored(engines, tokens[: 3 * B + 1])
    engine = engines()
    first = engine.admit(5, tokens, capacity=4 * B)
    engine.run_pass((first, B))
    replay = engine.admit(5, tokens)
    assert replay.offered >= 3 * B
    engine.run_pass((replay, len(tokens) - replay.position))
    assert engine.holds_its_kv(replay, 0, 6)
    assert engine.scheduler.flush(20)
    fresh = engines()
    again = fresh.admit(6, tokens)
    assert again.offered == 6 * B
    fresh.run_pass((again, 1), forward=False)
    assert fresh.holds_its_kv(again, 0, 6)


def test_a_request_that_was_never_queried_is_left_alone(engines, configure, records):
    engine = engines()
    running = engine.admit(5, prompt(4))
    running.request.request_id = 6
    engine.scheduler.update_state_after_alloc(running.request, list(running.pages[0]))
    plan = engine.run_pass((running, len(running.tokens)))
    assert (plan.loads, plan.saves) == ([], [])


def test_a_replay_without_a_query_is_saved_from_its_new_pages(engines, configure):
    tokens = prompt(4)
    engine = engines()
    first = engine.admit(5, tokens)
    engine.run_pass((first, B))
    first.pages, first.position, first.is_reported, first.reported_blocks = [[]], 0, False, 0
    engine.run_pass((first, len(tokens)))
    assert engine.scheduler.flush(20)
    fresh = engines()
    again = fresh.admit(6, tokens)
    assert again.offered == 4 * B
    fresh.run_pass((again, 1), forward=False)
    assert fresh.holds_its_kv(again, 0, 4)


def test_blocks_are_keyed_by_the_tokens_that_were_reported(engines, configure):
    queried, reported = prompt(4), prompt(4, seed=3)
    engine = engines()
    running = engine.admit(1, queried)
    running.tokens = reported
    engine.run_pass((running, len(reported)))
    assert engine.scheduler.flush(20)
    assert engine.admit(2, queried).offered == 0
    assert engine.admit(3, reported).offered == 4 * B


def assert_nothing_is_pinned(engine):
    """Every slot can be had again, once the copies of the last pass are over."""
    stager = engine.scheduler._engine.stager
    assert stager.copies.wait(20)
    assert stager.writer.flush(20)
    for shard in stager.arena.shards:
        assert stager.arena.free_slots(shard) == stager.arena.slots_per_shard


def test_pins_of_a_request_that_is_not_scheduled_are_dropped_with_the_next_plan(engines, configure):
    tokens = prompt(6)
    stored(engines, tokens)
    engine = engines()
    engine.admit(5, tokens)
    stager = engine.scheduler._engine.stager
    shard = stager.arena.shards[0]
    assert stager.arena.free_slots(shard) == stager.arena.slots_per_shard - 6
    engine.run_pass()
    assert_nothing_is_pinned(engine)


def test_a_request_that_comes_back_late_for_its_offer_still_gets_its_kv(engines, configure):
    tokens = prompt(6)
    stored(engines, tokens)
    engine = engines()
    running = engine.admit(5, tokens)
    engine.run_pass()
    running.honoured = 0  # its record counts the load as computed by then
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 6)
    assert_nothing_is_pinned(engine)


def test_an_offer_that_is_gone_when_its_request_comes_back_stops_the_engine(engines, configure, tmp_path):
    tokens = prompt(6)
    stored(engines, tokens)
    configure(arena_bytes=6 * 4096)
    engine = engines()
    running = engine.admit(5, tokens)
    engine.run_pass()
    for segment in (tmp_path / "kv").rglob("*.seg"):
        segment.unlink()
    other = engine.admit(6, prompt(6, seed=9))
    engine.run_pass((other, len(other.tokens)))
    assert engine.scheduler.flush(20)
    running.honoured = 0
    with pytest.raises(RuntimeError, match="ARENA_BYTES"):
        engine.run_pass((running, 1))


def test_saves_of_a_pass_that_raised_are_dropped_and_counted(engines, configure, records):
    tokens = prompt(3)
    engine = engines()
    running = engine.admit(1, tokens)
    engine.run_pass((running, len(tokens)), forward=False)  # the forward raised: no wait_for_save
    engine.run_pass()
    drops = records.of(Drop)
    assert sum(drop.blocks for drop in drops) == 3
    assert {drop.reason for drop in drops} == {DropReason.ERROR}
    assert_nothing_is_pinned(engine)


def test_metadata_that_stays_bound_is_acted_on_once(engines, configure, records):
    tokens = prompt(3)
    stored(engines, tokens)
    engine = engines()
    engine.prefill(1, [*tokens, *prompt(2, seed=1)])
    transfers = [record.direction for record in records.of(Transfer)]
    assert transfers == [Direction.SAVE, Direction.LOAD, Direction.SAVE]
    engine.worker.start_load_kv(engine.stream)
    engine.worker.wait_for_save(engine.stream)
    assert len(records.of(Transfer)) == 3


def test_the_arena_serves_what_this_process_has_saved_itself(engines, configure, records):
    tokens = prompt(3)
    engine = engines()
    engine.prefill(1, tokens)
    assert engine.scheduler.flush(20)
    running = engine.admit(2, tokens)
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 3)
    assert records.of(Transfer)[-1].tier is Tier.HOST
    assert not [r for r in records.of(StoreOperation) if r.operation is Operation.READ and r.request_id == 2]


def test_without_a_wait_the_first_query_misses_and_a_later_one_hits(engines, configure, records):
    tokens = prompt(4)
    stored(engines, tokens)
    configure(offer_wait_ms=0)
    engine = engines()
    first = engine.admit(5, tokens)
    lookup = records.of(Lookup)[-1]
    if first.offered < 4 * B:
        assert lookup.reason is MissReason.NOT_STAGED
        assert lookup.stored_tokens == 4 * B
    reader = engine.scheduler._engine.stager.reader
    keys = engine.scheduler._requests.get(5).chain.keys[:4]
    ticket = reader.stage(keys, 0)
    reader.wait(ticket, 20)
    reader.take(ticket)
    assert engine.admit(6, tokens).offered == 4 * B


def test_the_query_keeps_its_deadline_and_does_no_io(engines, configure, faulty, records):
    configure(url="faulty://kv")
    tokens = prompt(4)
    stored(engines, tokens)
    configure(url="faulty://kv", offer_wait_ms=30)
    engine = engines()
    may_read = threading.Event()
    faulty.before = staticmethod(lambda operation, path: operation == "read" and may_read.wait(20))
    faulty.calls.clear()
    assert engine.admit(5, tokens).offered == 0  # it came back while the read is still held up
    lookup = records.of(Lookup)[-1]
    assert lookup.reason is MissReason.NOT_STAGED
    assert lookup.waited_ns > 0
    may_read.set()
    reader = engine.scheduler._engine.stager.reader
    ticket = reader.stage(engine.scheduler._requests.get(5).chain.keys[:4], 0)
    reader.wait(ticket, 20)
    reader.take(ticket)
    assert engine.admit(6, tokens).offered == 4 * B
    engine.run_pass()
    reads = [call for call in faulty.calls if call[0] == "read"]
    assert reads
    assert threading.current_thread() not in {thread for _, _, thread in faulty.calls}


def test_saving_does_no_io_on_the_engines_thread_and_waits_for_no_store(engines, configure, faulty):
    configure(url="faulty://kv")
    engine = engines()
    may_write = threading.Event()
    faulty.before = staticmethod(lambda operation, path: operation == "put" and may_write.wait(20))
    faulty.calls.clear()
    running = engine.prefill(1, prompt(4))
    engine.finish(running)  # all of it came back while the store is held up
    may_write.set()
    assert engine.scheduler.flush(20)
    assert {call[0] for call in faulty.calls} >= {"put"}
    assert threading.current_thread() not in {thread for _, _, thread in faulty.calls}


def test_a_full_queue_drops_the_tail_of_a_chain_and_counts_it(engines, configure, faulty, records):
    page = 4096
    configure(url="faulty://kv", write_queue_bytes=4 * page)
    tokens = prompt(6)
    engine = engines()
    running = engine.prefill(1, tokens)
    assert engine.scheduler.flush(20)
    drops = records.of(Drop)
    assert [(drop.reason, drop.blocks, drop.request_id) for drop in drops] == [(DropReason.QUEUE_FULL, 3, 1)]
    assert drops[0].nbytes == 3 * engine.pools[0][0].numel() * 4
    engine.finish(running)
    assert engine.admit(2, tokens).offered == 3 * B


def test_a_full_arena_drops_saves_and_the_run_goes_on(engines, configure, records, faulty):
    configure(url="faulty://kv", arena_bytes=4 * 4096)
    engine = engines()
    may_write = threading.Event()
    faulty.before = staticmethod(lambda operation, path: operation == "put" and may_write.wait(20))
    engine.prefill(1, prompt(3))
    engine.prefill(2, prompt(3, seed=1))
    may_write.set()
    assert engine.scheduler.flush(20)
    assert sum(drop.blocks for drop in records.of(Drop) if drop.reason is DropReason.ARENA_FULL) == 2
    engine.prefill(3, prompt(3, seed=2))
    assert engine.scheduler.flush(20)
    assert Counter(drop.reason for drop in records.of(Drop)) == {DropReason.ARENA_FULL: 1}


def test_a_prompt_larger_than_the_arena_is_served_as_far_as_it_fits(engines, configure, records):
    tokens = prompt(8)
    stored(engines, tokens)
    configure(arena_bytes=5 * 4096)
    engine = engines()
    running = engine.admit(5, tokens)
    assert running.offered == 5 * B
    assert records.of(Lookup)[-1].reason is MissReason.ARENA_FULL
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 5)
    assert_nothing_is_pinned(engine)


def test_an_error_in_the_query_is_an_offer_of_nothing_said_once(engines, configure, records, caplog):
    engine = engines()

    class Broken:
        request_id = 9
        prompt_len = 20

        def get_tokens(self, beam):
            raise RuntimeError("no tokens today")

    for _ in range(3):
        assert engine.scheduler.get_num_new_matched_tokens(Broken(), 0) == (0, False)
    assert [lookup.reason for lookup in records.of(Lookup)] == [MissReason.ERROR] * 3
    assert len([record for record in caplog.records if "no tokens today" in (record.exc_text or "")]) == 1


def test_nothing_is_offered_before_the_layout_is_known(engines, configure, records):
    engine = engines(start=False)
    running = engine.admit(1, prompt(3))
    assert running.offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.NOT_READY
    plan = engine.run_pass((running, 5))
    assert (plan.loads, plan.saves) == ([], [])


def test_a_finished_request_may_be_finished_again_or_never(engines, configure):
    engine = engines()
    running = engine.prefill(1, prompt(3))
    assert engine.scheduler.request_finished(running.request, []) is False
    assert engine.scheduler.request_finished(running.request, []) is False
    assert engine.scheduler.request_finished_by_layer_group(running.request, [[]]) is False


def test_requests_that_are_never_finished_dont_pile_up(engines, configure, monkeypatch):
    monkeypatch.setattr("tracekv_fsspec.requests.MAX_REQUESTS", 10)
    engine = engines()
    for number in range(50):
        engine.free = [list(range(64))]
        engine.admit(number, prompt(2, seed=number))
        engine.run_pass()
    assert len(engine.scheduler._requests) == 10
    assert_nothing_is_pinned(engine)


def test_two_engines_of_one_process_dont_mix(engines, configure):
    first, second = engines(start=False), engines(TWO_GROUPS, start=False)
    second.start()
    first.start()
    tokens = prompt(3)
    for engine in (first, second):
        running = engine.prefill(1, tokens)
        assert engine.scheduler.flush(20)
        again = engine.admit(2, tokens)
        assert again.offered == 3 * B
        engine.run_pass((again, 1), forward=False)
        assert engine.holds_its_kv(again, 0, 3)
        engine.finish(running)


def test_engines_with_arguments_of_their_own_pair_in_any_order(engines, configure):
    first, second = engines(start=False), engines(start=False)
    for engine in (first, second):
        engine.worker.register_kv_caches(engine.pools[0])
    for engine in (first, second):
        engine.scheduler.wait_for_initialization()
        assert engine.worker._seat.stager is engine.scheduler._engine.stager


def test_engines_without_arguments_pair_in_the_order_of_their_bring_up(engines, configure):
    class NoArgs(LlmArgs):
        pass

    shared = NoArgs()
    first = engines(llm_args=shared)
    second = engines(llm_args=shared)
    assert first.worker._seat.stager is first.scheduler._engine.stager
    assert second.worker._seat.stager is second.scheduler._engine.stager
    assert first.worker._seat.stager is not second.worker._seat.stager


def test_another_engine_sees_new_blocks_within_a_refresh(engines, configure):
    configure(refresh_ms=10)
    tokens = prompt(4)
    reader = engines()
    writer = engines()
    writer.prefill(1, tokens)
    assert writer.scheduler.flush(20)
    catalog = reader.scheduler._engine.stager.catalog
    catalog.refresh()
    assert reader.admit(5, tokens).offered == 4 * B


def test_a_device_hit_whose_save_was_dropped_is_saved_with_the_next_request(engines, configure, faulty, records):
    configure(url="faulty://kv")
    tokens = prompt(4)
    engine = engines()

    def full(operation, path):
        if operation == "put":
            raise OSError(28, "No space left on device")

    faulty.before = staticmethod(full)
    first = engine.prefill(1, tokens)
    assert engine.scheduler.flush(20)
    assert {drop.reason for drop in records.of(Drop)} == {DropReason.NO_SPACE}
    faulty.before = staticmethod(lambda operation, path: None)
    second = engine.admit(2, tokens, computed=4 * B)
    second.pages = first.pages
    engine.run_pass((second, 1))
    assert engine.scheduler.flush(20)
    assert engines().admit(3, tokens).offered == 4 * B


def test_a_store_operation_says_what_it_moved(engines, configure, records):
    stored(engines, prompt(4))
    puts = [record for record in records.of(StoreOperation) if record.operation is Operation.PUT]
    assert [record.outcome for record in puts] == [Outcome.OK, Outcome.OK]  # the segment, then its manifest
    assert puts[0].blocks == puts[1].blocks == 4
    assert puts[0].engine == "local"
    assert puts[0].nbytes > 4 * 4096
    assert isinstance(puts[0].key, bytes)


def test_a_page_that_a_window_has_passed_is_not_saved_late(engines, configure, records):
    """What was honoured isn't told, so the saves of a first chunk come a pass later; by then its first page is someone else's."""
    windows = (None, B + 1)
    tokens = prompt(8)
    stored(engines, tokens[: 4 * B + 1], windows)
    engine = engines(windows)
    running = engine.admit(5, tokens, tells_honoured=False, capacity=6 * B)
    assert running.honoured == 4 * B
    engine.run_pass((running, 2 * B))
    engine.pools[1][running.pages[1][4]] = 3.0  # given to another request: 6 * B >= 5 * B + window - 1
    while running.position < len(tokens):
        engine.run_pass((running, min(B, len(tokens) - running.position)))
    assert engine.scheduler.flush(20)
    fresh = engines(windows)
    again = fresh.admit(6, tokens)
    assert again.offered == 4 * B
    lookup = records.of(Lookup)[-1]
    assert (lookup.reason, lookup.bounding_layer_group) == (MissReason.LAYER_GROUP_MISSING, 1)
    assert lookup.group_tokens == [8 * B, 4 * B]

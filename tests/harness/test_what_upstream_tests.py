"""Every given / when / then of contract-v2.md section 8: the test that holds it here, or why a simulator can't."""

from __future__ import annotations

import pytest
import torch

from tests.harness import (
    test_bringup,
    test_cancel,
    test_golden_classes,
    test_golden_manager,
    test_graphs_and_dummies,
    test_manager,
    test_page_rules,
    test_partial_honour,
    test_persistence,
    test_refusals,
    test_replay,
    test_transfer_deadlines,
    test_upstream_e2e,
)
from tests.harness.test_page_rules import Offering, cache_of
from tests.ranks import test_attention_dp
from tracekv.harness.cache_v2 import CacheV2
from tracekv.harness.pages import GroupShape
from tracekv.harness.requests import Batch, Request

BLOCK = 32


class Counting(CacheV2):
    """Notes every resize: capacity and history asked for."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.resizes = []

    def _resize(self, allocation, capacity, history):
        self.resizes.append((capacity, history))
        return super()._resize(allocation, capacity, history)


def scheduled(prompt, chunk, offered=0, **options):
    shape = GroupShape(0, (0,), None, 1, 4, torch.float32)
    cache = Counting([shape], 16, BLOCK, torch.device("cpu"), **options)
    request, manager = Request(1, list(range(prompt)), 1), Offering(offered)
    request.context_chunk_size = cache.schedule_context(request, chunk)
    return cache, request, manager


def test_a_scheduling_pass_never_asks():
    cache, request, manager = scheduled(256, 128, 64)
    assert manager.committed == manager.allocated == []
    assert cache.holds(request)


def test_an_empty_offer_commits_nothing_and_resizes_nothing():
    cache, request, manager = scheduled(256, 256)
    cache.resizes.clear()
    cache.prepare_resources(Batch(last_chunk=[request]), manager)
    assert manager.committed == [0]
    assert cache.resizes == []


def test_an_unchunked_offer_keeps_the_end_with_one_resize():
    cache, request, manager = scheduled(256, 256, 64)
    cache.resizes.clear()
    cache.prepare_resources(Batch(last_chunk=[request]), manager)
    assert cache.resizes == [(256, 64)]
    assert (request.context_current_position, request.context_chunk_size) == (64, 192)
    assert request.is_first_context_chunk


def test_the_lists_are_rebuilt_where_something_was_served():
    """What was a chunk is the last one now; the order in the output follows the rebuilt lists."""
    cache, request, manager = scheduled(96, 64, 64)
    batch = Batch(chunking=[request])
    cache.prepare_resources(batch, manager)
    assert (batch.chunking, batch.last_chunk) == ([], [request])


def test_a_pool_without_pages_drops_the_request_and_never_asks():
    cache, manager = cache_of(1, None), Offering(64)
    first, second = (Request(number, list(range(number, number + 32)), 1) for number in (1, 2))
    assert cache.schedule_context(first, 32) == 32
    assert cache.schedule_context(second, 32) == 0
    cache.prepare_resources(Batch(last_chunk=[first]), manager)
    assert len(manager.committed) == 1


def test_an_async_flag_reaches_the_commit_also_when_short():
    for chunk, honoured in ((64, 32), (32, 0)):
        cache, request, manager = scheduled(256, chunk, 128, grow_limit=0)
        seen = []
        manager.query_num_new_matched_tokens = lambda *_: (128, True)
        manager.commit_new_matched_tokens = lambda _, count, flag, seen=seen: seen.append((count, flag))
        cache.prepare_resources(Batch(chunking=[request]), manager)
        assert seen == [(honoured, True)]


def test_without_a_connector_nothing_is_asked_or_reported():
    cache, request, _ = scheduled(96, 96)
    cache.prepare_resources(Batch(last_chunk=[request]), None)
    assert not request.py_connector_allocation_reported


HELD = {
    "simple": test_upstream_e2e.test_simple,
    "async_onboard": test_upstream_e2e.test_async_onboard,
    "async_save": test_upstream_e2e.test_async_save,
    "scheduler_output": test_upstream_e2e.test_scheduler_output,
    "chunked_context": test_upstream_e2e.test_chunked_context,
    "prefix_is_asked_once": test_upstream_e2e.test_prefix_is_asked_once,
    "prefix_under_chunked_prefill": test_upstream_e2e.test_prefix_under_chunked_prefill,
    "uniform_sliding_window": test_upstream_e2e.test_uniform_sliding_window,
    "sliding_window_prefix": test_upstream_e2e.test_sliding_window_prefix_backed_by_real_pages,
    "vswa_reports_page_indices": test_upstream_e2e.test_vswa_reports_page_indices,
    "vswa_out_of_window_blocks": test_upstream_e2e.test_vswa_out_of_window_blocks,
    "transfers_only_in_window_blocks": test_persistence.test_transfers_only_in_window_blocks,
    "multi_pool_e2e": test_persistence.test_a_loaded_prefix_gives_the_tokens_and_logits_of_a_reused_one,
    "e2e_persistent_cache": test_persistence.test_a_loaded_prefix_gives_the_tokens_and_logits_of_a_reused_one,
    "block_reuse_off": test_bringup.test_v2_without_block_reuse_is_refused_and_v1_discards_the_offer,
    "rejects_unsupported": test_refusals.test_rejects_unsupported,
    "priorities": test_upstream_e2e.test_priorities,
    "stub: the scheduling pass never asks": test_a_scheduling_pass_never_asks,
    "stub: two passes, one query, one alloc": test_page_rules.test_a_second_prepare_asks_nothing,
    "stub: excluded kinds": test_graphs_and_dummies.test_excluded_kinds_have_no_query_and_one_alloc,
    "stub: memo cleared, asked again": test_page_rules.test_a_released_request_has_empty_lists_and_is_asked_again,
    "stub: completed async load, neither": test_replay.test_after_a_completed_asynchronous_load_it_is_not_asked_again,
    "stub: the last prompt token stays local": test_page_rules.test_an_offer_is_placed_as_upstream_places_it,
    "stub: empty offer": test_an_empty_offer_commits_nothing_and_resizes_nothing,
    "stub: unchunked": test_an_unchunked_offer_keeps_the_end_with_one_resize,
    "stub: past the chunk": test_page_rules.test_a_cache_with_pages_grows_for_an_offer_past_the_chunk,
    "stub: extra tokens": test_page_rules.test_extra_tokens_are_part_of_the_growth,
    "stub: failed grow": test_page_rules.test_without_more_pages_an_offer_is_cut_to_the_pages_there_are,
    "stub: async flag reaches the commit": test_an_async_flag_reaches_the_commit_also_when_short,
    "stub: lists rebuilt": test_the_lists_are_rebuilt_where_something_was_served,
    "stub: no connector": test_without_a_connector_nothing_is_asked_or_reported,
    "stub: re-entry": test_partial_honour.test_without_the_memo_of_the_served_position_an_asynchronous_load_is_for_nothing,
    "real: dropped request never asked": test_a_pool_without_pages_drops_the_request_and_never_asks,
    "real: waiting request never asked": test_cancel.test_a_request_that_waits_for_pages_is_never_asked,
    "real: free, reset, asked again": test_replay.test_a_replay_is_new_again_and_asked_again,
    "real: stale range": test_page_rules.test_blocks_go_stale_when_the_window_has_passed_them,
    "real: mask only the sliding group": test_page_rules.test_growth_takes_no_pages_for_blocks_that_are_out_of_the_window,
    "real: released": test_page_rules.test_a_released_request_has_empty_lists_and_is_asked_again,
    "real: served prefix under SWA": (
        test_partial_honour.test_an_asynchronous_load_runs_whatever_is_honoured_and_what_is_not_is_computed
    ),
    "manager: commit, external loads, parking": (
        test_golden_manager.test_what_reaches_the_connector_is_what_the_real_manager_let_through
    ),
    "manager: the flat form of a grouped-only scheduler": (
        test_golden_classes.test_a_scheduler_class_is_probed_and_called_as_the_real_manager_does
    ),
    "manager: query has no side effects": (
        test_manager.test_an_asynchronous_offer_of_nothing_is_refused_and_leaves_no_trace
    ),
    "ADP: no collectives": test_attention_dp.test_the_manager_enters_no_collective,
    "ADP: counts per rank": test_attention_dp.test_each_rank_asks_its_own_scheduler_and_all_of_them_run,
    "ADP: dummies invisible": test_attention_dp.test_dummies_are_invisible,
    "ADP: grouped finish": test_attention_dp.test_a_grouped_finish_lets_get_finished_return_the_request,
    "ADP: padded batch": test_attention_dp.test_a_batch_that_parking_emptied_is_padded_and_not_reported_again,
    "ADP: cancel waits for the load": test_attention_dp.test_a_cancelled_request_waits_for_its_load,
    "ADP: recovery, time-out, poll and start error": test_attention_dp.test_what_goes_wrong_in_it_ends_every_rank,
    "ADP: recovery, cancel and shutdown": (
        test_transfer_deadlines.test_what_is_asked_of_a_rank_that_waits_inside_a_pass_shortens_the_wait
    ),
    "ADP: recovery, complete": test_transfer_deadlines.test_a_wait_that_is_over_within_the_grace_goes_on_with_its_pass,
    "ADP: deadlines across passes": (
        test_transfer_deadlines.test_a_load_that_is_not_done_in_time_ends_every_rank_although_they_can_compute
    ),
    "ADP: failure keeps pages": test_transfer_deadlines.test_pages_of_a_failed_transfer_are_not_given_back,
}

OUT_OF_REACH = {
    "disagg_prefill": "there is no transceiver, and the asserts were not read",
    "runs_on_v2, v2_contract": "about the runtime's own manager classes and a log line of their selection",
    "stub: scratch reuse": "the harness's pages are never scratch",
    "stub: draft manager": "there is no draft model",
    "real (B): reservations": "branch extras, off by default",
    "order across managers: trim": "there is one cache manager, and no token-budget trim",
    "ADP: cancel of a child": "no request has children",
    "ADP: a failed forward or clean-up under a transfer": "in the newest branch only; what it does without a transfer was not read",
}


def test_nothing_is_named_twice_and_everything_held_is_a_test():
    assert not set(HELD) & set(OUT_OF_REACH)
    assert all(callable(test) and test.__name__.startswith("test_") for test in HELD.values())


@pytest.mark.parametrize("held", ["stub: failed grow", "real: stale range"])
def test_the_numbers_of_section_8_are_among_the_cases(held):
    """The table is no list of names alone: two of its rows, by the numbers in the document."""
    (mark,) = [mark for mark in HELD[held].pytestmark if mark.name == "parametrize"]
    cases = list(mark.args[1])
    if held == "stub: failed grow":
        assert ((0, 128, 256, 64, 64), (32, 32, 64)) in cases
    else:
        assert {history for history, window, sinks, _ in cases if window == 64 and sinks == 0} >= {
            0,
            32,
            64,
            96,
            128,
            200,
        }

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.harness.recording import Recorder, recording_pair, scenario
from tests.harness.two_threads import on_two_ranks
from tracekv.harness.collectives import OneRank
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import Batch, Request


class Meta:
    """Metadata that is equal to nothing but itself."""


class Counting(OneRank):
    def __init__(self):
        super().__init__()
        self.entered = []

    def broadcast(self, value):
        self.entered.append([self.rank, "broadcast"])
        return super().broadcast(value)

    def allgather(self, value):
        self.entered.append([self.rank, "allgather"])
        return super().allgather(value)


def make_manager(collectives=None, answers=None, metadata=None):
    recorder = Recorder(answers)
    scheduler, worker = recording_pair(recorder)
    if metadata is not None:
        scheduler.build_connector_meta = lambda self, output: metadata
    worker.bind_connector_meta = lambda self, bound: setattr(self, "bound", bound)
    leads = collectives is None or collectives.rank == 0
    return KvCacheConnectorManager(worker(None), scheduler(None) if leads else None, collectives=collectives), recorder


NO_PAGES = SimpleNamespace(page_indices=lambda request: ([], None), block_hashes=lambda request: [])


def hand_over(manager):
    manager.build_scheduler_output(Batch(), NO_PAGES)
    manager.handle_metadata()


def test_the_bound_metadata_is_the_very_object_with_one_rank_and_a_copy_with_two():
    meta = Meta()
    managers = {}

    def rank_main(ranks):
        managers[ranks.rank], _ = make_manager(ranks, metadata=meta)
        hand_over(managers[ranks.rank])

    on_two_ranks(rank_main)

    counting = Counting()
    alone, _ = make_manager(counting, metadata=meta)
    request = Request(1, [1, 2], 1)
    alone.get_num_new_matched_tokens(request, 0)
    hand_over(alone)
    alone.request_finished(request, [0])
    alone.get_finished()
    assert all(isinstance(manager.worker.bound, Meta) for manager in managers.values())
    assert {
        "rank 0 of 2": managers[0].worker.bound is meta,
        "rank 1 of 2": managers[1].worker.bound is meta,
        "rank 0 of 1": alone.worker.bound is meta,
        "collectives entered": counting.entered,
    } == scenario("l.meta_identity")["facts"]


def test_one_rank_can_pickle_what_it_hands_over():
    meta = Meta()
    manager, _ = make_manager(OneRank(pickled=True), metadata=meta)
    hand_over(manager)
    assert isinstance(manager.worker.bound, Meta)
    assert manager.worker.bound is not meta


def test_an_asynchronous_offer_of_nothing_is_refused_and_leaves_no_trace():
    manager, _ = make_manager(answers={"get_num_new_matched_tokens": [(0, True)]})
    request = Request(1, [1, 2], 1)
    with pytest.raises(RuntimeError, match="load_kv_async must be False"):
        manager.get_num_new_matched_tokens(request, 0)
    assert not manager.new_async_requests
    assert request.py_num_connector_matched_tokens is None


@pytest.mark.parametrize("answer", [([999], []), ([], [1]), (["1"], []), ([1, 1], [])])
def test_an_id_that_is_not_pending_is_a_key_error(answer):
    manager, _ = make_manager(answers={"request_finished": [True], "get_finished": [answer]})
    manager.request_finished(Request(1, [1], 1), [0])
    with pytest.raises(KeyError):
        manager.get_finished()


def test_an_id_before_an_unknown_one_is_lost():
    manager, _ = make_manager(answers={"request_finished": [True], "get_finished": [([1, 999], [])]})
    manager.request_finished(Request(1, [1], 1), [0])
    with pytest.raises(KeyError, match="999"):
        manager.get_finished()
    assert manager.get_pending_transfer_requests() == []


def test_any_iterable_of_ids_is_taken():
    manager, _ = make_manager(answers={"request_finished": [True], "get_finished": [({1}, ())]})
    request = Request(1, [1], 1)
    manager.request_finished(request, [0])
    assert manager.get_finished() == [request]


def test_a_build_that_raised_keeps_its_output():
    manager, recorder = make_manager()
    recorder.note = lambda *_: (_ for _ in ()).throw(ValueError("inner"))
    manager.build_scheduler_output(Batch(), NO_PAGES)
    with pytest.raises(ValueError, match="inner"):
        manager.handle_metadata()
    del recorder.note
    manager.handle_metadata()
    assert len(recorder.of("build_connector_meta")) == 1


def test_a_reset_request_is_new_again_and_its_honoured_tokens_are_forgotten():
    manager, recorder = make_manager(answers={"get_num_new_matched_tokens": [(64, False)]})
    request = Request(1, list(range(96)), 1)
    request.context_current_position = manager.get_num_new_matched_tokens(request, 0)
    manager.reset_request_state(request)
    for _ in range(2):
        manager.build_scheduler_output(Batch(last_chunk=[request]), NO_PAGES)
        manager.handle_metadata()
        manager.reset_request_state(request)
    assert [(is_new, r["computed_position"], len(r["new_tokens"])) for is_new, r in recorder.reports()] == [
        (True, 64, 96)
    ] * 2


def test_a_list_that_shrank_counts_from_the_longest_one_seen():
    manager, recorder = make_manager()
    request = Request(1, list(range(96)), 1)
    for lists in ([[1, 2, 3]], [[1, 9]], [[1, 9, 8, 7]]):
        cache = SimpleNamespace(page_indices=lambda _, lists=lists: (lists[0], lists), block_hashes=lambda _: [])
        manager.build_scheduler_output(Batch(last_chunk=[request]), cache)
        manager.handle_metadata()
    assert [report["new_block_ids"] for _, report in recorder.reports()] == [[1, 2, 3], [], [7]]


def test_with_one_layer_group_both_id_fields_are_the_same_list():
    manager, _ = make_manager()
    outputs = []
    manager.scheduler.__class__.build_connector_meta = lambda self, output: outputs.append(output)
    cache = SimpleNamespace(page_indices=lambda _: ([1], [[1]]), block_hashes=lambda _: [])
    manager.build_scheduler_output(Batch(last_chunk=[Request(1, [1], 1)]), cache)
    manager.handle_metadata()
    report = outputs[0].new_requests[0]
    assert report.new_block_ids is report.new_block_ids_by_layer_group[0]


def test_every_call_is_counted_by_side_and_name():
    manager, _ = make_manager()
    manager.wait_for_initialization()
    hand_over(manager)
    manager.layer_pre_hook(SimpleNamespace(layer_idx=3))
    manager.get_finished()
    assert dict(manager.calls) == {
        "scheduler.wait_for_initialization": 1,
        "scheduler.build_connector_meta": 1,
        "worker.bind_connector_meta": 1,
        "worker.wait_for_layer_load": 1,
        "worker.get_finished": 1,
    }

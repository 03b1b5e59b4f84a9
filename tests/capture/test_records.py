from __future__ import annotations

import gc
import threading
import weakref
from time import perf_counter_ns

import pytest
import torch

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker, request
from tracekv.contract import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    RequestData,
    SchedulerOutput,
)
from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    FinishCall,
    FinishedCall,
    ForwardCallableCall,
    IdlePolls,
    LayerHooks,
    QueryCall,
    RegisterCall,
    RunJoined,
)
from tracekv.journal.vocabulary import Callback


def test_a_query_tells_what_was_asked_and_offered(records):
    scheduler = tracekv.trace(FlatScheduler)(None)
    asked = request(11, prompt_len=100, py_client_id=5, cache_salt="tenant", lora_task_id=3)
    assert scheduler.get_num_new_matched_tokens(asked, 16) == (32, False)
    (query,) = records(QueryCall)
    assert (query.request_id, query.client_id, query.prompt_tokens) == (11, 5, 100)
    assert (query.computed_tokens, query.offered_tokens, query.is_async, query.answer) == (16, 32, False, None)
    assert query.lora_id == 3
    assert query.started_ns < query.ended_ns
    assert len(query.salt_digest) == 8
    assert b"tenant" not in query.salt_digest


@pytest.mark.parametrize(
    ("answer", "offered", "is_async", "odd"),
    [
        (None, 0, False, "NoneType"),
        ((-5, True), -5, True, None),
        ((2.0, False), 2, False, "(float, bool)"),
        ((4, 1), 4, True, "(int, int)"),
        ((1, 2, 3), 0, False, "tuple"),
    ],
)
def test_an_odd_offer_is_recorded_and_passed_on(records, answer, offered, is_async, odd):
    class Odd(FlatScheduler):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return answer

    assert tracekv.trace(Odd)(None).get_num_new_matched_tokens(request(), 0) is answer
    (query,) = records(QueryCall)
    assert (query.offered_tokens, query.is_async, query.answer) == (offered, is_async, odd)


def test_an_allocation_tells_the_pages_and_what_was_honoured(records):
    scheduler = tracekv.trace(FlatScheduler)(None)
    scheduler.update_state_after_alloc(request(7, py_num_connector_matched_tokens=64), [3, 4, -1])
    (alloc,) = records(AllocCall)
    assert (alloc.request_id, alloc.honoured_tokens, alloc.pages) == (7, 64, [[3, 4, -1]])


def test_a_build_lists_requests_and_only_the_pages_that_are_new(records):
    scheduler = tracekv.trace(FlatScheduler)(None)
    scheduler.build_connector_meta(
        SchedulerOutput(
            [RequestData(1, [5] * 64, [0, 1], 0, 32)],
            [RequestData(2, [9], [], 80, 1), RequestData(3, [9], [7], 96, 1)],
        )
    )
    (build,) = records(BuildCall)
    assert build.step == 1
    assert (build.new_requests, build.request_ids) == (1, [1, 2, 3])
    assert (build.computed_positions, build.scheduled_tokens) == ([0, 80, 96], [32, 1, 1])
    assert build.prompt_tokens == [64]
    assert build.pages == [(0, [[0, 1]]), (2, [[7]])]
    assert build.has_metadata


def test_pages_by_layer_group_are_read_in_either_form(records):
    scheduler = tracekv.trace(FlatScheduler)(None)
    as_list = RequestData(1, [1], [], 0, 1, new_block_ids_by_layer_group=[[-1, 2], [5, 6]])
    as_dict = RequestData(2, [1], [], 0, 1, new_block_ids_by_layer_group={1: [8], 0: [9]})
    scheduler.build_connector_meta(SchedulerOutput([as_list, as_dict], []))
    (build,) = records(BuildCall)
    assert build.pages == [(0, [[-1, 2], [5, 6]]), (1, [[9], [8]])]


def test_an_answer_of_request_finished_that_is_no_bool_is_named(records):
    class Counting(FlatScheduler):
        def request_finished(self, request, cache_block_ids):
            return 1

    assert tracekv.trace(Counting)(None).request_finished(request(7), [1]) == 1
    (finish,) = records(FinishCall)
    assert (finish.request_id, finish.keeps_pages, finish.answer, finish.pages) == (7, True, "int", [[1]])


def test_idle_polls_become_one_record(records):
    worker = tracekv.trace(TensorWorker)(None)
    for _ in range(5):
        assert worker.get_finished([], []) == ([], [])
    worker.start_load_kv(None)
    (idle,) = records(IdlePolls)
    assert idle.count == 5
    assert idle.max_ns <= idle.sum_ns <= idle.last_ended_ns - idle.first_started_ns


def test_a_poll_with_ids_is_a_record_of_its_own(records):
    class Echo(TensorWorker):
        def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
            answer = (set(finished_gen_req_ids), list(started_loading_req_ids))
            finished_gen_req_ids.clear()
            return answer

    tracekv.trace(Echo)(None).get_finished([1], [2])
    (poll,) = records(FinishedCall)
    assert (poll.saving_given, poll.loading_given) == ([1], [2])
    assert (poll.saving_returned, poll.loading_returned, poll.answer) == ([1], [2], "(set, list)")


def test_layer_hooks_of_a_pass_are_one_record_by_layer(records):
    worker = tracekv.trace(TensorWorker)(None)
    worker.register_kv_caches(torch.zeros(4, 3, 2, 8))
    for layer in (0, 2):
        worker.wait_for_layer_load(layer, None)
    worker.save_kv_layer(1, None)
    worker.wait_for_save(None)
    worker.wait_for_save(None)
    (hooks,) = records(LayerHooks)
    waits = memoryview(hooks.waits).cast("q").tolist()
    saves = memoryview(hooks.saves).cast("q").tolist()
    assert [start > 0 and end >= start for start, end in zip(waits[::2], waits[1::2], strict=True)] == [
        True,
        False,
        True,
    ]
    assert waits[2:4] == [0, 0]
    assert saves[:2] == [0, 0]
    assert 0 < saves[2] <= saves[3]


def test_a_layer_outside_the_registered_caches_is_still_seen(records):
    worker = tracekv.trace(TensorWorker)(None)
    worker.register_kv_caches(torch.zeros(4, 3, 2, 8))
    worker.wait_for_layer_load(40, None)
    worker.wait_for_layer_load(100_000, None)
    worker.wait_for_save(None)
    (hooks,) = records(LayerHooks)
    assert memoryview(hooks.waits).cast("q")[80] > 0


def test_registering_tells_the_layout(records):
    worker = tracekv.trace(TensorWorker)(None)
    worker.register_kv_caches(torch.zeros(10, 3, 2, 64, dtype=torch.bfloat16))
    (register,) = records(RegisterCall)
    (group,) = register.groups
    assert (register.dtype, register.tokens_per_block) == ("torch.bfloat16", 0)
    assert (group.layer_group_id, group.window_size, group.layer_ids) == (0, None, [0, 1, 2])
    assert (group.num_slots, group.bytes_per_page) == (10, 3 * 2 * 64 * 2)


def test_registering_a_layout_tells_its_groups(records):
    class ByLayout(TensorWorker):
        def register_kv_cache_layout(self, layout):
            pass

    region = KvCacheRegion(4096, 512, 1024, 6, (KvCacheBufferRef(1, "key"), KvCacheBufferRef(1, "value")), "cpu")
    layout = KvCacheLayout(32, (KvCacheLayerGroupLayout(1, (1, 4), 128, (region, region)),))
    tracekv.trace(ByLayout)(None).register_kv_cache_layout(layout)
    (register,) = records(RegisterCall)
    assert register.callback == Callback.REGISTER_KV_CACHE_LAYOUT
    assert register.tokens_per_block == 32
    assert (register.groups[0].layer_group_id, register.groups[0].window_size) == (1, 128)
    assert register.groups[0].bytes_per_page == 1024


def test_none_from_register_forward_pass_callable_stays_none(records):
    class Never(TensorWorker):
        def register_forward_pass_callable(self):
            return None

    assert tracekv.trace(Never)(None).register_forward_pass_callable() is None
    assert [record.has_callable for record in records(ForwardCallableCall)] == [False]


def test_the_forward_pass_callable_is_traced_too(records):
    ran = []

    class Ever(TensorWorker):
        def register_forward_pass_callable(self):
            return lambda: ran.append(1)

    tracekv.trace(Ever)(None).register_forward_pass_callable()()
    assert ran == [1]
    assert Callback.FORWARD_PASS_CALLABLE in [record.callback for record in records(Call)]


def test_callbacks_that_the_document_leaves_out_are_recorded(records):
    class Branchy(FlatScheduler):
        def cancel_load(self, request, start, end):
            return "cancelled"

        def request_reset(self, request):
            return "reset"

        def shutdown(self):
            return "down"

    scheduler = tracekv.trace(Branchy)(None)
    assert scheduler.cancel_load(request(7), 0, 32) == "cancelled"
    assert scheduler.request_reset(request(7)) == "reset"
    assert scheduler.shutdown() == "down"
    seen = {record.callback for record in records(Call)}
    assert {Callback.CANCEL_LOAD, Callback.REQUEST_RESET, Callback.SCHEDULER_SHUTDOWN} <= seen


def test_a_callback_that_calls_others_of_its_own_counts_once(records):
    class Chatty(TensorWorker):
        def start_load_kv(self, stream):
            self.wait_for_layer_load(0, stream)
            thread = threading.Thread(target=self.save_kv_layer, args=(0, stream))
            thread.start()
            thread.join()
            self.wait_for_save(stream)

    tracekv.trace(Chatty)(None).start_load_kv(None)
    assert [record.callback for record in records(Call)] == [Callback.WORKER_INIT, Callback.START_LOAD_KV]
    assert records(LayerHooks) == []


def test_a_call_on_a_thread_of_the_connector_does_not_count(records):
    worker = tracekv.trace(TensorWorker)(None)
    worker.start_load_kv(None)
    thread = threading.Thread(target=worker.wait_for_save, args=(None,))
    thread.start()
    thread.join()
    assert [record.callback for record in records(Call)] == [Callback.WORKER_INIT, Callback.START_LOAD_KV]


def test_calls_made_while_constructing_do_not_count(records):
    class Eager(TensorWorker):
        def __init__(self, llm_args):
            super().__init__(llm_args)
            self.get_finished([], [])

    tracekv.trace(Eager)(None)
    assert [record.callback for record in records(Call)] == [Callback.WORKER_INIT]


def test_a_base_default_that_folds_to_a_flat_form_counts_as_the_flat_form(records):
    scheduler = tracekv.trace(FlatScheduler)(None)
    scheduler.update_state_after_alloc_by_layer_group(request(7), [[4, 5]])
    (alloc,) = records(AllocCall)
    assert (alloc.callback, alloc.pages) == (Callback.UPDATE_STATE_AFTER_ALLOC, [[4, 5]])


def test_run_and_rank_are_told_by_the_leader(records):
    tracekv.trace(FlatScheduler)(None)
    (joined,) = records(RunJoined)
    assert (len(joined.run_id), joined.rank, joined.world) == (16, 0, 1)


def test_nothing_of_the_runtime_is_kept_alive(records):
    class Weak:
        request_id = 7
        prompt_len = 4

    scheduler = tracekv.trace(FlatScheduler)(None)
    asked, blocks = Weak(), [1, 2, 3]
    gone = weakref.ref(asked)
    scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.update_state_after_alloc(asked, blocks)
    scheduler.request_finished(asked, blocks)
    blocks.append(99)
    del asked
    gc.collect()
    assert gone() is None
    assert records(AllocCall)[0].pages == [[1, 2, 3]]


def test_nothing_is_recorded_when_detail_is_off(monkeypatch):
    from tracekv.journal.current import current

    monkeypatch.setenv("TRACEKV_DETAIL", "off")
    scheduler = tracekv.trace(FlatScheduler)(None)
    assert scheduler.get_num_new_matched_tokens(request(), 0) == (32, False)
    assert scheduler.build_connector_meta(SchedulerOutput()) == {"plan": 1}
    assert current.journal is None


def test_what_the_engines_arguments_will_make_of_the_run_is_recorded(records, caplog):
    from types import SimpleNamespace

    from tracekv.journal.records import Finding

    cache = SimpleNamespace(enable_block_reuse=False, enable_partial_reuse=False)
    tracekv.trace(FlatScheduler)(SimpleNamespace(kv_cache_config=cache, disable_overlap_scheduler=True))
    (finding,) = records(Finding)
    assert (finding.rule, finding.severity, finding.subject) == ("L3", "problem", "kv_cache_config.enable_block_reuse")
    assert "L3 kv_cache_config.enable_block_reuse" in caplog.text


def test_a_hook_of_an_unregistered_layer_raises_what_the_connector_raised(records):
    class Raises(TensorWorker):
        def wait_for_layer_load(self, layer_idx, stream):
            raise LookupError(layer_idx)

    worker = tracekv.trace(Raises)(None)
    worker.register_kv_caches(torch.zeros(4, 3, 2, 8))
    before = perf_counter_ns()
    with pytest.raises(LookupError, match="40"):
        worker.wait_for_layer_load(40, None)
    (raised,) = [call for call in records(Call) if call.error]
    assert (raised.callback, raised.error) == (Callback.WAIT_FOR_LAYER_LOAD, "LookupError")
    assert before - 2 <= raised.started_ns <= raised.ended_ns

"""Attention data parallelism: a scheduler and requests on each rank (contract-v2.md section 8, ADP; contract.md section 1.6)."""

from __future__ import annotations

import pytest

from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_manager import NO_PAGES
from tests.harness.two_threads import on_two_ranks
from tests.ranks.test_tensor_parallel import HERE, SMALL, alone, tokens
from tracekv.harness import Executor, build_model
from tracekv.harness.data_parallel import Deadlines
from tracekv.harness.jobs import Prompt, RankJob
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import Batch, Request
from tracekv.harness.versions import RuntimeVersion


class NoCollectives:
    """A rank of two whose collectives must not be entered."""

    rank, world = 1, 2

    def broadcast(self, value):
        raise AssertionError("broadcast")

    def allgather(self, value):
        raise AssertionError("allgather")


def declaring(recorder, forms=("flat", "grouped")):
    return tuple(type(c.__name__, (c,), {"supports_attention_dp": True}) for c in recording_pair(recorder, forms))


def manager_of(answers=None):
    recorder = Recorder(answers)
    scheduler, worker = declaring(recorder)
    manager = KvCacheConnectorManager(
        worker(None), scheduler(None), enable_attention_dp=True, collectives=NoCollectives()
    )
    return manager, recorder


def dummy():
    request = Request(0, [0], 1)
    request.is_dummy_request = True
    return request


def test_the_manager_enters_no_collective():
    manager, recorder = manager_of({"get_num_new_matched_tokens": [(32, True)], "request_finished": [True]})
    loading, saving = Request(2, list(range(64)), 1), Request(4, [1], 1)
    manager.reject_flat_only_scheduler(2)
    manager.query_num_new_matched_tokens(loading, 0)
    manager.commit_new_matched_tokens(loading, 32, True)
    manager.build_scheduler_output(Batch(last_chunk=[loading]), NO_PAGES)
    manager.handle_metadata()
    manager.request_finished(saving, [0])
    recorder.answers["get_finished"].append(([4], [2]))
    assert manager.get_finished() == [saving]  # whatever the other ranks have
    assert list(manager.finished_async_loading_requests) == [2]
    assert recorder.of("build_connector_meta")[0]["args"][0]["attention_dp_rank"] == 1


def test_a_grouped_finish_lets_get_finished_return_the_request():
    manager, recorder = manager_of({"request_finished_by_layer_group": [True]})
    request = Request(4, [1], 1)
    manager.request_finished(request, [], [[0], [1]])
    recorder.answers["get_finished"].append(([4], []))
    assert manager.get_finished() == [request]


def test_dummies_are_invisible():
    manager, recorder = manager_of()
    request = dummy()
    assert manager.query_num_new_matched_tokens(request, 0) == (0, False)
    manager.commit_new_matched_tokens(request, 4, True)
    manager.update_state_after_alloc(request, [0], [[0]])
    manager.build_scheduler_output(Batch(generation=[request]), NO_PAGES)
    manager.handle_metadata()
    assert manager.request_finished(request, [0], [[0]]) is False
    assert recorder.reports() == []
    assert [call["m"] for call in recorder.calls] == ["build_connector_meta", "bind_connector_meta"]
    assert not manager.has_pending_transfers(request)


def test_a_finished_request_is_forgotten():
    """contract.md section 1.8: with tensor parallelism on V1 nothing ever forgets it."""
    manager, _ = manager_of()
    request = Request(4, [1], 1)
    manager.build_scheduler_output(Batch(last_chunk=[request]), NO_PAGES)
    manager.commit_new_matched_tokens(request, 4, False)
    manager.request_finished(request, [0])
    assert manager._reports.kept == []
    assert manager.external_loads == {}


@pytest.mark.parametrize("undeclared", [0, 1])
def test_a_connector_that_does_not_declare_it_is_refused(undeclared):
    pair = list(declaring(Recorder()))
    pair[undeclared] = recording_pair(Recorder())[undeclared]
    with pytest.raises(NotImplementedError, match="supports_attention_dp"):
        Executor(build_model("llama", **SMALL), *pair, attention_dp=True)


def test_v1_and_older_versions_refuse_it():
    model = build_model("llama", **SMALL)
    with pytest.raises(NotImplementedError, match="attention data parallelism"):
        Executor(model, *declaring(Recorder()), attention_dp=True, mode="v1")
    with pytest.raises(NotImplementedError, match="attention data parallelism"):
        Executor(model, *declaring(Recorder()), attention_dp=True, version=RuntimeVersion(knows_attention_dp=False))


# -- two ranks --------------------------------------------------------------------------------------------------------


def on_both(work, answers=({}, {}), *, mixin=None, **options):
    """``work(executor, rank)`` on two ranks that are threads; what reached each rank's connector, by rank."""
    models = [build_model("llama", **SMALL) for _ in range(2)]
    recorders = [Recorder(each) for each in answers]

    def rank_main(ranks):
        recorder = recorders[ranks.rank]
        scheduler, worker = declaring(recorder)
        if mixin is not None:
            worker = type("Mixed", (mixin, worker), {})
        executor = Executor(models[ranks.rank], scheduler, worker, attention_dp=True, collectives=ranks, **options)
        recorder.calls.clear()
        return work(executor, ranks.rank)

    return on_two_ranks(rank_main), recorders


@pytest.mark.parametrize("overlap", [False, True])
def test_each_rank_asks_its_own_scheduler_and_all_of_them_run(overlap):
    prompts = [tokens(100), tokens(40, seed=6)]

    def work(executor, rank):
        request = executor.submit(prompts[rank], [3, 6][rank])
        executor.run()
        return request.request_id, request.output_tokens, executor.passes

    (first, second), recorders = on_both(work, overlap=overlap)
    expected = [alone("llama", [Prompt(prompts[rank], [3, 6][rank])])[0].output_tokens for rank in range(2)]
    assert [first[1], second[1]] == expected
    assert (first[0], second[0]) == (1, 2)
    assert first[2] == second[2] == 6  # rank 0 pads its last three passes
    for rank, recorder in enumerate(recorders):
        assert [call["args"][0] for call in recorder.of("get_num_new_matched_tokens")] == [{"req": rank + 1}]
        outputs = [call["args"][0] for call in recorder.of("build_connector_meta")]
        assert {output["attention_dp_rank"] for output in outputs} == {rank}
        assert {report["request_id"] for _, report in recorder.reports()} == {rank + 1}
        assert len(outputs) == len(recorder.of("start_load_kv")) == len(recorder.of("wait_for_save")) == 6
    idle = [o for o in (c["args"][0] for c in recorders[0].of("build_connector_meta")) if not o["cached_requests"]]
    assert len(idle) == 4  # its first pass has a new request, three have none


class Letting:
    """A worker that returns the ids of its loads once the test lets it."""

    lets = False

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        super().get_finished(finished_gen_req_ids, started_loading_req_ids)
        self.loading = [*getattr(self, "loading", []), *started_loading_req_ids]
        done, self.loading = (self.loading, []) if self.lets else ([], self.loading)
        return [], done


PARKS_ON_RANK_0 = ({"get_num_new_matched_tokens": [(32, True)]}, {})


def test_a_batch_that_parking_emptied_is_padded_and_not_reported_again():
    def work(executor, rank):
        request = executor.submit(tokens(100), 2)
        executor.step()
        passes = executor.passes
        executor.worker.lets = True
        executor.run()
        return passes, request.output_tokens

    (parked, other), (recorder, _) = on_both(work, PARKS_ON_RANK_0, mixin=Letting)
    assert (parked[0], other[0]) == (1, 1)
    assert len(parked[1]) == len(other[1]) == 2
    calls = [call["m"] for call in recorder.calls]
    assert calls.count("update_state_after_alloc_by_layer_group") == 1
    first_pass = calls[: calls.index("get_finished")]
    assert first_pass.count("build_connector_meta") == 1
    assert first_pass[-1] == "wait_for_save"


# -- the loop inside a pass: contract.md section 1.6, "poll get_finished in a 1 ms sleep loop" ---------------------------

#: Rank 0's prompt takes all of its pages, so that nothing is left to pad a pass with.
NO_PAGE_LEFT = {"num_blocks": 4, "tokens_per_block": 32}


class InThirdPoll(Letting):
    """Returns the ids of its loads in the third poll, the one that gave them included."""

    polls = 0

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.polls = 1 if started_loading_req_ids else self.polls + 1
        self.lets = self.polls == 3
        return super().get_finished(finished_gen_req_ids, started_loading_req_ids)


def test_a_rank_that_cannot_pad_polls_inside_the_pass_until_a_load_is_done():
    def work(executor, rank):
        request = executor.submit([tokens(100), tokens(40, seed=6)][rank], 2)
        executor.step()
        first = executor.passes, list(request.output_tokens)
        executor.run()
        return first, request.output_tokens, request.passes

    answers = ({"get_num_new_matched_tokens": [(32, True)]}, {})
    (parked, other), (recorder, peer) = on_both(work, answers, mixin=InThirdPoll, **NO_PAGE_LEFT)
    # One pass, in which both have computed: the peer has waited, and nobody has padded.
    assert (parked[0][0], other[0][0]) == (1, 1)
    assert (len(parked[0][1]), len(other[0][1])) == (1, 1)
    assert parked[2] == [(32, 68), (100, 1)][: len(parked[2])]
    calls = [call["m"] for call in recorder.calls]
    first_pass = calls[: calls.index("wait_for_save") + 1]
    started = [at for at, name in enumerate(first_pass) if name == "start_load_kv"]
    assert len(started) == 2
    between = first_pass[started[0] + 1 : started[1]]
    assert between == ["get_finished"] * 3 + ["build_connector_meta", "bind_connector_meta"]
    assert first_pass.count("update_state_after_alloc_by_layer_group") == 1
    assert first_pass.count("get_num_new_matched_tokens") == 1
    outputs = [call["args"][0] for call in recorder.of("build_connector_meta")]
    assert outputs[0]["new_requests"] == []
    (report,) = outputs[1]["new_requests"]
    assert (report["computed_position"], report["num_scheduled_tokens"]) == (32, 68)
    assert "get_finished" not in [call["m"] for call in peer.calls][: first_pass.index("get_finished")]


def test_a_rank_that_can_pad_does_not_poll_inside_the_pass():
    def work(executor, rank):
        executor.submit([tokens(100), tokens(40, seed=6)][rank], 2)
        executor.run()

    _, (recorder, _) = on_both(work, PARKS_ON_RANK_0, mixin=InThirdPoll)
    calls = [call["m"] for call in recorder.calls]
    assert "get_finished" not in calls[: calls.index("wait_for_save")]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({}, "Timed out"),
        ({"get_finished": [([], []), OSError("the store is gone")]}, "the store is gone"),
        ({"start_load_kv": [OSError("the store is gone")]}, "the store is gone"),
    ],
    ids=["a load that never ends", "a poll that raises", "a start that raises"],
)
def test_what_goes_wrong_in_it_ends_every_rank(answers, told):
    def work(executor, rank):
        executor.submit([tokens(100), tokens(40, seed=6)][rank], 2)
        with pytest.raises(RuntimeError, match="KV connector failed") as failure:
            executor.run()
        return str(failure.value)

    answers = {"get_num_new_matched_tokens": [(32, True)], **answers}
    failures, _ = on_both(work, (answers, {}), deadlines=Deadlines(transfer_s=0.05), **NO_PAGE_LEFT)
    assert failures[0] == failures[1]
    assert told in failures[0]


class InSixthPoll(Letting):
    """Returns every id that it was given in the sixth poll and after."""

    polls = 0

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.polls += 1
        self.lets = self.polls >= 6
        _, loaded = super().get_finished(finished_gen_req_ids, started_loading_req_ids)
        self.saving = [*getattr(self, "saving", []), *finished_gen_req_ids]
        saved, self.saving = (self.saving, []) if self.lets else ([], self.saving)
        return saved, loaded


def test_ranks_with_work_only_poll_while_one_can_neither_compute_nor_pad():
    """Its one request is being saved, the other is parked, and they have all of its pages: no rank runs without it."""

    def work(executor, rank):
        lengths = [[(20, 1), (70, 2)], [(40, 8)]][rank]
        requests = [executor.submit(tokens(length, seed=length), new) for length, new in lengths]
        executor.run()
        return [len(request.output_tokens) for request in requests], executor.passes

    answers = {
        "get_num_new_matched_tokens": [(0, False), (32, True)],
        "request_finished_by_layer_group": [True],
    }
    (first, second), recorders = on_both(work, (answers, {}), mixin=InSixthPoll, **NO_PAGE_LEFT)
    assert (first[0], second[0]) == ([1, 2], [8])
    assert first[1] == second[1]
    for recorder in recorders:
        calls = [call["m"] for call in recorder.calls]
        # The first pass's poll, then five of passes that nobody runs, then what the next pass begins with.
        polls = calls.index("get_finished")
        assert calls[polls : polls + 6] == ["get_finished"] * 6
        assert calls[polls + 6] == "build_connector_meta"


def test_a_cancelled_request_waits_for_its_load():
    def work(executor, rank):
        request = executor.submit(tokens(100), [2, 12][rank])
        executor.step()
        if rank == 0:
            executor.cancel(request)
        executor.step()
        executor.step()
        was_cancelled = request.is_cancelled
        executor.worker.lets = True
        executor.run()
        return was_cancelled, request.is_cancelled, len(executor.cache.unheld(0)) == executor.cache.num_blocks

    states, _ = on_both(work, PARKS_ON_RANK_0, mixin=Letting, deadlines=Deadlines(grace_s=60))
    assert states == [(False, True, True), (False, False, True)]


def test_ranks_that_are_processes_share_out_a_job(two_ranks):
    prompts = [Prompt(tokens(150), 4), Prompt(tokens(77, seed=6), 6), Prompt(tokens(150), 5)]
    job = RankJob(
        rounds=[prompts],
        model_options=SMALL,
        executor_options={"attention_dp": True, "chunk_tokens": 64},
        scheduler=f"{HERE}:DataParallelScheduler",
        worker=f"{HERE}:DataParallelWorker",
        observe=f"{HERE}:forget",
    )
    expected = [request.output_tokens for request in alone("llama", prompts, chunk_tokens=64)]
    results = two_ranks.run(job)
    assert [[r.tokens for r in result.requests] for result in results] == [expected[0::2], expected[1::2]]
    assert [[r.request_id for r in result.requests] for result in results] == [[1, 3], [2]]
    assert all(result.calls["scheduler.build_connector_meta"] for result in results)

"""Golden scenarios that are facts about the manager's verbs rather than passes; and that no scenario is left out."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from tests.harness import test_golden_classes, test_golden_manager, test_manager
from tests.harness.recording import _golden, named_in, scenario
from tests.harness.test_golden_classes import outcome, scheduler_class, worker
from tests.harness.test_manager import NO_PAGES, hand_over, make_manager
from tests.ranks import test_golden_ranks
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, RequestData, SchedulerOutput
from tracekv.harness.collectives import OneRank
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import Batch, Request, RequestState


def request_of(length=96, request_id=1):
    return Request(request_id, list(range(length)), 1)


def what_it_does(manager, answer_position):
    """A fused query, then one build at the position that it answered."""
    request = request_of()
    try:
        fact = {"fused_call": manager.get_num_new_matched_tokens(request, 0)}
        if isinstance(fact["fused_call"], int):  # the scenario's driver moves to whole numbers only
            request.context_current_position = fact["fused_call"]
    except Exception as error:
        fact = {"fused_call": named_in(error, answer_position.get("fused_call", {}))}
    fact["registered_loading"] = sorted(manager.new_async_requests.loading)
    fact["py_num"] = request.py_num_connector_matched_tokens
    if "build" in answer_position:
        try:
            manager.build_scheduler_output(Batch(last_chunk=[request]), NO_PAGES)
            manager.handle_metadata()
            reports = manager.scheduler.seen[-1].new_requests
            keys = ("computed_position", "num_scheduled_tokens")
            fact["build"] = {k: getattr(reports[0], k) for k in keys} if reports else "request not in the output"
        except Exception as error:
            fact["build"] = named_in(error, {})
    return fact


@pytest.mark.parametrize("answer", scenario("h.query_answers")["facts"])
def test_an_answer_to_the_query_is_taken_as_the_real_manager_takes_it(answer):
    golden = scenario("h.query_answers")["facts"][answer]
    seen = []
    scheduler = scheduler_class(("update_state_after_alloc", "request_finished"))
    body = {
        "seen": seen,
        "get_num_new_matched_tokens": lambda self, request, computed: eval(answer),  # of our own file
        "build_connector_meta": lambda self, output: seen.append(output),
    }
    manager = KvCacheConnectorManager(worker(), type("Sched", (scheduler,), body)(None))
    assert what_it_does(manager, golden) == golden


def test_a_generation_only_request_is_refused_by_the_fused_call_alone():
    request = request_of()
    request.is_generation_only_request = lambda: True
    fused, query = scenario("h.generation_only")["steps"]
    manager, recorder = make_manager(answers={"get_num_new_matched_tokens": [(0, False)]})
    with pytest.raises(RuntimeError) as error:
        manager.get_num_new_matched_tokens(request, 0)
    assert named_in(error.value, {}) == fused["raised"]
    assert recorder.calls == []
    assert list(manager.query_num_new_matched_tokens(request, 0)) == query["ret"]
    assert len(recorder.calls) == len(query["calls"])


@pytest.mark.parametrize("answer", scenario("l.finish_values")["facts"])
def test_any_true_answer_keeps_the_pages(answer):
    golden = scenario("l.finish_values")["facts"][answer]
    value = eval(answer)  # of our own file
    manager, _ = make_manager(answers={"request_finished": [value]})
    request = request_of()
    request.state = RequestState.GENERATION_COMPLETE
    returned = manager.request_finished(request, [0])
    assert {
        "manager returns": returned,
        "state": request.state.value,
        "saving": sorted(manager.new_async_requests.saving),
    } == golden


def test_the_batch_s_object_takes_the_place_of_the_one_that_was_queried():
    first, second = request_of(64), request_of(64)
    manager, _ = make_manager(answers={"get_num_new_matched_tokens": [(32, True)], "get_finished": [([], [1])]})
    manager.get_num_new_matched_tokens(first, 0)
    manager.take_scheduled_requests_pending_load(Batch(last_chunk=[second]))
    facts = {
        "after take: manager holds B": manager.new_async_requests.loading[1] is second,
        "states A, B after take": [first.state.value, second.state.value],
    }
    manager.get_finished()
    facts["states A, B after get_finished"] = [first.state.value, second.state.value]
    facts["py_num_connector_matched_tokens on A, B"] = [
        request.py_num_connector_matched_tokens for request in (first, second)
    ]
    assert facts == scenario("l.canonical_request")["facts"]


def test_an_empty_output_that_is_put_in_is_handed_over():
    manager, recorder = make_manager()
    manager.handle_metadata()
    assert recorder.calls == []
    manager.set_scheduler_output(SchedulerOutput())
    manager.handle_metadata()
    golden = scenario("l.set_scheduler_output")["steps"][1]["calls"]
    assert recorder.calls[0]["args"] == golden[0]["args"]
    assert len(recorder.of("build_connector_meta")) == 1


def test_an_allgather_that_hands_back_the_bare_object_is_fatal_in_the_first_pass():
    bare = OneRank()
    bare.allgather = lambda value: value
    manager, _ = make_manager(bare)
    with pytest.raises(IndexError) as error:
        manager.get_finished()
    assert named_in(error.value, {}) == scenario("l.allgather_unwrapped")["steps"][0]["raised"]


def test_the_classes_have_the_names_of_the_real_file():
    facts = scenario("env")["facts"]
    assert [f.name for f in dataclasses.fields(RequestData)] == facts["RequestData fields in order"]
    assert [f.name for f in dataclasses.fields(SchedulerOutput)] == facts["SchedulerOutput fields in order"]
    assert sorted(KvCacheConnectorScheduler.__abstractmethods__) == facts["scheduler abstract methods"]
    assert sorted(KvCacheConnectorWorker.__abstractmethods__) == facts["worker abstract methods"]
    assert set(facts["manager public names"]) <= set(dir(KvCacheConnectorManager))


# -- attention data parallelism and construction ----------------------------------------------------------------------

RANK_1 = SimpleNamespace(rank=1, world=2)
FLAT = ("update_state_after_alloc", "request_finished")


def half(base, declared, duck=False, instance=False):
    made = base
    if declared is not None and not instance:
        made = type("Declaring", (base,), {"supports_attention_dp": declared})
    built = made() if duck else made(None)
    if instance:
        built.supports_attention_dp = declared
    return built


def opting_in(title):
    declared = {
        "neither": (None, None), "worker only": (None, True), "scheduler only": (True, None), "both True": (True, True),
        "both 1": (1, 1), "both 'yes'": ("yes", "yes"),
    }  # fmt: skip
    if title == "duck classes without the attribute":
        return type("Duck", (), {})(), type("Duck", (), {})()
    is_instance = title == "set on the instances only"
    of_scheduler, of_worker = (True, True) if is_instance else declared[title]
    return (
        half(scheduler_class(FLAT), of_scheduler, instance=is_instance),
        half(type(worker()), of_worker, instance=is_instance),
    )


@pytest.mark.parametrize("fact", scenario("h.validate_attention_dp")["facts"])
def test_attention_dp_needs_a_declaration_of_exactly_true_on_both_classes(fact):
    title, _, through_constructor = fact.partition(", ")
    scheduler, worker_ = opting_in(title)

    def construct():
        if not through_constructor:
            return KvCacheConnectorManager.validate_attention_dp(scheduler, worker_)
        return KvCacheConnectorManager(worker_, scheduler, enable_attention_dp=True).enable_attention_dp

    golden = scenario("h.validate_attention_dp")["facts"][fact]
    try:
        got = {"ret": construct()}
    except NotImplementedError as error:
        got = {"raised": named_in(error, golden["raised"])}
    assert got == golden


def test_who_needs_a_scheduler():
    scheduler = scheduler_class(FLAT)(None)
    manager = KvCacheConnectorManager

    def of(*args, **more):
        return outcome(lambda: manager(*args, **more).enable_attention_dp)

    assert {
        "rank 0, TP, no scheduler": of(worker(), None),
        "rank 1, TP, with a scheduler": of(worker(), scheduler, collectives=RANK_1),
        "rank 1, TP, no scheduler": of(worker(), None, collectives=RANK_1),
        "rank 1, ADP, no scheduler": of(worker(), None, collectives=RANK_1, enable_attention_dp=True),
        "enable_attention_dp given by position": of(worker(), scheduler, True),
    } == scenario("h.constructor")["facts"]


# -- and nothing is left out ------------------------------------------------------------------------------------------

#: Scenarios that other tests reproduce, each under its own name there.
ELSEWHERE = {
    "j.scheduler_classes": test_golden_classes.test_a_scheduler_class_is_probed_and_called_as_the_real_manager_does,
    "j.dispatch": test_golden_classes.test_a_non_empty_list_of_lists_selects_the_grouped_form,
    "j.inheritance": test_golden_classes.test_the_probe_looks_at_the_type_along_its_inheritance,
    "j.worker_classes": test_golden_classes.test_worker_classes_fold_and_refuse_as_the_real_base_class_does,
    "l.meta_identity": test_manager.test_the_bound_metadata_is_the_very_object_with_one_rank_and_a_copy_with_two,
    "h.query_answers": test_an_answer_to_the_query_is_taken_as_the_real_manager_takes_it,
    "h.generation_only": test_a_generation_only_request_is_refused_by_the_fused_call_alone,
    "h.validate_attention_dp": test_attention_dp_needs_a_declaration_of_exactly_true_on_both_classes,
    "h.constructor": test_who_needs_a_scheduler,
    "l.finish_values": test_any_true_answer_keeps_the_pages,
    "l.canonical_request": test_the_batch_s_object_takes_the_place_of_the_one_that_was_queried,
    "l.set_scheduler_output": test_an_empty_output_that_is_put_in_is_handed_over,
    "l.allgather_unwrapped": test_an_allgather_that_hands_back_the_bare_object_is_fatal_in_the_first_pass,
    "env": test_the_classes_have_the_names_of_the_real_file,
}

#: Facts of scenarios that a simulator has no say in.
OUT_OF_REACH = {
    ("env", "torch.cuda.current_stream on a CPU wheel"): "how torch was built",
    ("env", "layer hooks need it"): "of the real file's own import of torch.cuda; ours is handed its stream",
    ("env", "other manager methods need it"): "the same",
}


def test_every_scenario_is_reproduced():
    step_by_step = {*test_golden_manager.PASSES, *test_golden_manager.STEPS}
    reproduced = step_by_step | set(test_golden_ranks.SCENARIOS) | set(ELSEWHERE)
    assert reproduced == set(_golden())
    assert len(reproduced) == 54
    assert {name for name, _ in OUT_OF_REACH} <= reproduced


def test_every_fact_beside_steps_is_compared_or_named():
    """Facts of scenarios that are steps too; the others are compared whole."""
    for name in (*test_golden_manager.PASSES, *test_golden_manager.STEPS):
        facts = set(scenario(name).get("facts", {}))
        compared = set(test_golden_manager.facts_of(name, None))
        assert facts - compared <= set(STATED.get(name, {})), name


def test_the_facts_that_are_said_beside_the_steps(caplog):
    caplog.set_level(logging.INFO, "tracekv.harness")
    for name, check in STATED.items():
        for fact, holds in check.items():
            assert holds(scenario(name)["facts"][fact], caplog), (name, fact)


def _warns_once(_, caplog):
    driver = test_golden_manager.Driver("c.retention", ("flat", "grouped"))
    caplog.clear()
    for step in scenario("c.retention")["steps"]:
        driver.do(step)
    return [entry.getMessage()[:36] for entry in caplog.records] == ["KvCacheRetentionConfig has no effect"]


def _drops_honoured(value, _):
    manager, _recorder = make_manager(answers={"get_num_new_matched_tokens": [(64, False)]})
    request = request_of()
    manager.commit_new_matched_tokens(request, manager.query_num_new_matched_tokens(request, 0)[0], False)
    before = dict(manager.external_loads)
    manager.reset_request_state(request)
    return value in ({str(k): v for k, v in before.items()}, manager.external_loads)


def _hands_the_object_over(value, _):
    meta = test_manager.Meta()
    manager, _recorder = make_manager(metadata=meta)
    hand_over(manager)
    return (manager.worker.bound is meta) is value


def _remembers_the_load(value, _):
    manager, _recorder = make_manager(answers={"get_num_new_matched_tokens": [(32, True)], "get_finished": [([], [1])]})
    request = request_of()
    manager.get_num_new_matched_tokens(request, 0)
    manager.get_finished()
    return manager.should_add_sequence(request) is value


def _shares_the_list(value, _):
    outputs = []
    manager, _recorder = make_manager()
    type(manager.scheduler).build_connector_meta = lambda self, output: outputs.append(output)
    cache = SimpleNamespace(page_indices=lambda _: ([1], [[1]]), block_hashes=lambda _: [])
    manager.build_scheduler_output(Batch(last_chunk=[request_of(1)]), cache)
    manager.handle_metadata()
    (report,) = outputs[0].new_requests
    return (report.new_block_ids is report.new_block_ids_by_layer_group[0]) is value


STATED = {
    "c.retention": {"log": _warns_once, "warned once only": lambda value, caplog: _warns_once(value, caplog) is value},
    "i3": {"external_loads before": _drops_honoured, "after": _drops_honoured},
    "h.unpicklable_tp1": {"worker got the very object": _hands_the_object_over},
    "l.finished_loading_memo": {"should_add_sequence after the load": _remembers_the_load},
    "l.drafts_and_alias": {
        "new_block_ids is the same list object as new_block_ids_by_layer_group[0]": _shares_the_list
    },
}

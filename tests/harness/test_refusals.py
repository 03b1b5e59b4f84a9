"""What bring-up refuses, and what it only warns of (contract-v2.md section 3)."""

from __future__ import annotations

import logging

import pytest

from tests.harness.memory_connector import memory_pair
from tests.harness.recording import Recorder, recording_pair
from tests.harness.test_device_reuse import serve, tokens
from tests.harness.test_overlap import alone
from tests.harness.test_upstream_e2e import _uniform
from tracekv.harness import Executor
from tracekv.harness.bringup import KvCacheConfig, LlmArgs, SchedulerConfig, SpeculativeConfig
from tracekv.harness.versions import RuntimeVersion

MAX = SchedulerConfig("MAX_UTILIZATION")
HOST, DISK = KvCacheConfig(host_cache_size=1 << 20), KvCacheConfig(host_cache_size=0, disk_cache_size=1 << 20)


def bring_up(model, mode="v2", *, forms=("flat", "grouped"), **options):
    return Executor(model, *recording_pair(Recorder(), forms), mode=mode, num_blocks=8, **options)


@pytest.mark.parametrize(
    ("mode", "args", "message"),
    [
        *[(mode, {"pipeline_parallel_size": 2}, "pipeline or context parallelism") for mode in ("v1", "v2")],
        *[(mode, {"context_parallel_size": 2}, "pipeline or context parallelism") for mode in ("v1", "v2")],
        *[(mode, {"max_beam_width": 2}, "beam search") for mode in ("v1", "v2")],
        ("v1", {"scheduler_config": MAX}, "use_kv_cache_manager_v2=True"),
        ("v1", {"kv_cache_config": HOST}, "host offloading"),
        ("v2", {"kv_cache_config": HOST}, r"cache tiers below GPU \(found host\).*host_cache_size.*disk_cache_size"),
        ("v2", {"kv_cache_config": DISK}, r"cache tiers below GPU \(found disk\)"),
        ("v2", {"speculative_config": SpeculativeConfig(3)}, "speculative decoding.*page list shrinks"),
    ],
)
def test_rejects_unsupported(mode, args, message, model):
    with pytest.raises(NotImplementedError, match=message):
        bring_up(model("llama"), mode, llm_args=LlmArgs(**args))


@pytest.mark.parametrize(
    ("mode", "args"),
    [
        ("v2", {"scheduler_config": MAX}),
        ("v1", {"speculative_config": SpeculativeConfig(3)}),
        ("v1", {"kv_cache_config": KvCacheConfig(host_cache_size=0)}),
        ("v2", {"kv_cache_config": KvCacheConfig(host_cache_size=0, disk_cache_size=0)}),
    ],
)
def test_takes_what_its_manager_can_do(mode, args, model):
    assert bring_up(model("llama"), mode, llm_args=LlmArgs(**args)).worker is not None


def test_the_first_reason_in_the_runtime_s_order_is_given(model):
    args = LlmArgs(pipeline_parallel_size=2, max_beam_width=2, kv_cache_config=HOST)
    with pytest.raises(NotImplementedError, match="parallelism"):
        bring_up(model("llama"), llm_args=args)
    with pytest.raises(NotImplementedError, match="beam search"):
        bring_up(model("llama"), llm_args=LlmArgs(max_beam_width=2, kv_cache_config=HOST))
    with pytest.raises(NotImplementedError, match="host offloading"):
        bring_up(model("gemma3"), "v1", llm_args=LlmArgs(kv_cache_config=HOST))


def test_nothing_is_refused_without_a_connector(model):
    assert Executor(model("llama"), mode="v1", llm_args=LlmArgs(max_beam_width=2, kv_cache_config=HOST)).cache


def test_a_refused_connector_was_constructed_and_warmed_up_but_has_no_cache(model):
    """The refusals come behind the warm-up (contract.md section 4.1)."""
    seen = []
    scheduler, worker = recording_pair(recorder := Recorder())

    def forward_callable(self):
        return lambda: seen.append("forward")

    worker = type("Worker", (worker,), {"register_forward_pass_callable": forward_callable})
    with pytest.raises(NotImplementedError):
        Executor(model("llama"), scheduler, worker, llm_args=LlmArgs(max_beam_width=2))
    assert seen == ["forward"]
    assert recorder.calls == []


def said(caplog):
    return [(entry.levelname, entry.getMessage()) for entry in caplog.records]


def test_a_transceiver_beside_a_connector_is_warned_of(model, caplog):
    bring_up(model("llama"), "v1", llm_args=LlmArgs(cache_transceiver_config=object()))
    assert [level for level, text in said(caplog) if "transceiver" in text] == ["WARNING"]


def test_the_default_host_tier_is_dropped_and_that_is_told(model, caplog):
    caplog.set_level(logging.INFO, "tracekv.harness")
    bring_up(model("llama"))
    assert [level for level, text in said(caplog) if text.startswith("host tier disabled")] == ["INFO"]
    caplog.clear()
    bring_up(model("llama"), llm_args=LlmArgs(kv_cache_config=KvCacheConfig(host_cache_size=0)))
    assert said(caplog) == []


@pytest.mark.parametrize("forms", [("flat",), ("flat", "grouped")])
def test_flat_forms_under_one_window_are_warned_of(forms, caplog):
    """It isn't refused: the flat list is given, with -1 in it."""
    bring_up(_uniform(), forms=forms)
    assert sum("valid_page_slots" in text for _, text in said(caplog)) == (forms == ("flat",))


# -- where versions disagree ------------------------------------------------------------------------------------------


def test_who_takes_the_policy_is_a_switch(model, caplog):
    args = LlmArgs(scheduler_config=MAX)
    with pytest.raises(NotImplementedError, match="capacity policy MAX_UTILIZATION"):
        bring_up(model("llama"), llm_args=args, version=RuntimeVersion(v2_policy="refused"))
    bring_up(model("llama"), "v1", llm_args=args, version=RuntimeVersion(v1_policy="warned"))
    assert any("capacity policy MAX_UTILIZATION" in text for _, text in said(caplog))


@pytest.mark.parametrize(("policy", "begin_anew"), [("accepted", False), ("coerced", True)])
def test_a_version_that_coerces_the_policy_evicts(policy, begin_anew, model):
    version = RuntimeVersion(v2_policy=policy)
    executor = Executor(model("llama"), *memory_pair({}), num_blocks=8, version=version)
    prompts = [tokens(60, 1), tokens(40, 2), tokens(70, 3)]
    requests = serve(executor, *prompts, new=60)
    assert any(request.replays for request in requests) == begin_anew
    assert [r.output_tokens for r in requests] == [alone(model("llama"), prompt, 60) for prompt in prompts]


def test_an_older_version_lets_a_flat_connector_meet_the_layout(model):
    scheduler, worker = recording_pair(Recorder(), ("flat",))[0], recording_pair(Recorder(), ("grouped",))[1]
    executor = Executor(model("gemma3"), scheduler, worker, version=RuntimeVersion(probes_layer_groups=False))
    executor.submit(tokens(40), 1)
    with pytest.raises(NotImplementedError, match="update_state_after_alloc_by_layer_group"):
        executor.run()


def test_an_older_version_takes_drafts(model):
    args = LlmArgs(speculative_config=SpeculativeConfig(3))
    assert bring_up(model("llama"), llm_args=args, version=RuntimeVersion(refuses_drafts=False)).worker


def test_an_older_version_gives_no_list_per_group_for_a_released_request(model):
    expected = alone(model("llama"), tokens(20), 10)
    recorder = Recorder()
    executor = Executor(
        model("llama"),
        *recording_pair(recorder),
        overlap=True,
        stop_tokens=[expected[2]],
        version=RuntimeVersion(lists_of_released=False),
    )
    serve(executor, tokens(20), new=10)
    assert len(recorder.of("request_finished_by_layer_group")) == 1
    assert [call["args"][1] for call in recorder.of("request_finished")] == [[]]

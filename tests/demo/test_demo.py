"""The main job as a newcomer runs it: the command line, fresh processes, a folder and S3, both presets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULER = {"build_connector_meta", "get_num_new_matched_tokens", "shutdown", "wait_for_initialization"}
WORKER = {
    "bind_connector_meta",
    "get_finished",
    "save_kv_layer",
    "shutdown",
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
}
BY_PRESET = {
    "llama": ({"update_state_after_alloc", "request_finished"}, {"register_kv_caches"}),
    "gemma3": (
        {"update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"},
        {"register_kv_cache_layout"},
    ),
}


#: How fast a store is read is none of a test's business: where many tests share a machine, ten seconds may be too few for S3.
PATIENT = {"TRACEKV_FSSPEC__OFFER_WAIT_MS": "100000", "TRACEKV_FSSPEC__READ_DEADLINE_MS": "60000"}


def run_demo(*arguments: str, home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_"))}
    return subprocess.run(
        [sys.executable, "-m", "tracekv.cli", "demo", *arguments],
        env={**clean, **PATIENT, "XDG_CACHE_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        timeout=240,
    )


def outcome_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def assert_restored(outcome: dict, preset: str) -> None:
    assert outcome["differences"] == []
    assert outcome["outputs_match"] is True
    assert outcome["bit_equal_to_reuse"] is True
    assert outcome["max_logit_diff"] <= 1e-3
    assert outcome["prompt_tokens"] >= 1024
    assert outcome["offered_tokens"] == outcome["honoured_tokens"] == outcome["loaded_tokens"]
    assert outcome["honoured_tokens"] == (outcome["prompt_tokens"] - 1) // 32 * 32
    assert outcome["saved_bytes"] == sum(group["saved_bytes"] for group in outcome["layer_groups"]) > 0
    assert outcome["loaded_bytes"] == sum(group["loaded_bytes"] for group in outcome["layer_groups"]) > 0
    assert outcome["ttft_cold_s"] > 0
    assert outcome["ttft_warm_s"] > 0

    scheduler, worker = BY_PRESET[preset]
    expected = {f"scheduler.{name}" for name in SCHEDULER | scheduler} | {f"worker.{name}" for name in WORKER | worker}
    assert set(outcome["callbacks"]) == expected
    for name, count in outcome["callbacks"].items():
        assert count["calls"] == count["spanned_calls"] > 0, name
        assert 0 < count["spans"] <= count["calls"], name


@pytest.mark.parametrize("path", ["/proc/none/trace.jsonl", "/proc"])
def test_a_trace_file_that_cannot_be_written_is_said_so(path, tmp_path):
    done = run_demo("--trace-file", path, home=tmp_path)
    assert done.returncode == 1
    assert f"tracekv demo: {path} can't be written" in done.stderr
    assert "--trace-file" in done.stderr
    assert "Traceback" not in done.stderr


def test_llama_is_restored_from_a_folder(tmp_path):
    outcome = outcome_of(run_demo("--json", "--preset", "llama", home=tmp_path))
    assert_restored(outcome, "llama")
    (group,) = outcome["layer_groups"]
    assert (group["id"], group["window"]) == (0, None)
    assert group["saved_bytes"] == group["loaded_bytes"]
    assert Path(outcome["trace_file"]).is_relative_to(tmp_path)
    assert outcome["store"].startswith(tmp_path.as_uri())


@pytest.mark.slow
def test_gemma3_is_restored_by_layer_group(tmp_path):
    trace = tmp_path / "trace.jsonl"
    store = (tmp_path / "kv").as_uri()
    outcome = outcome_of(
        run_demo("--json", "--preset", "gemma3", "--store", store, "--trace-file", str(trace), home=tmp_path)
    )
    assert_restored(outcome, "gemma3")
    assert sorted(group["window"] or 0 for group in outcome["layer_groups"]) == [0, 128]
    sliding, full = sorted(outcome["layer_groups"], key=lambda group: group["window"] or 1 << 30)
    assert 0 < sliding["loaded_pages"] <= 128 // 32 + 1 < full["loaded_pages"]
    assert sliding["saved_pages"] == full["saved_pages"]
    assert outcome["trace_file"] == str(trace)


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_it_is_restored_from_s3(tmp_path, s3, preset):
    url = f"s3://{s3.bucket}/demo-{preset}"
    outcome = outcome_of(run_demo("--json", "--preset", preset, "--store", url, home=tmp_path, **s3.environ()))
    assert_restored(outcome, preset)


@pytest.mark.slow
def test_a_local_checkpoint_is_restored(tmp_path):
    from tracekv.harness.models import build_model

    build_model("llama", seed=5).save_pretrained(tmp_path / "model")
    outcome = outcome_of(run_demo("--json", "--model", str(tmp_path / "model"), home=tmp_path))
    assert_restored(outcome, "llama")


@pytest.mark.slow
def test_a_person_sees_progress_tables_and_where_the_trace_lies(tmp_path):
    done = run_demo(home=tmp_path)
    assert done.returncode == 0, done.stderr
    for said in (
        "computing the prompt and saving its KV",
        "get_num_new_matched_tokens",
        "layer group",
        "honoured",
        "time to first token",
        "tokens: equal to a run without a connector",
        "trace  ",
    ):
        assert said in done.stdout


@pytest.mark.slow
def test_with_no_time_to_wait_nothing_is_restored_and_it_says_so(tmp_path):
    """The negative control of the whole job: without a hit the demo fails."""
    done = run_demo("--json", home=tmp_path, TRACEKV_FSSPEC__OFFER_WAIT_MS="0")
    assert done.returncode == 1
    assert "nothing was restored" in done.stderr
    assert json.loads(done.stdout)["outputs_match"] is False


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        ((), {"TRACEKV_DETIAL": "full"}, "Did you mean TRACEKV_DETAIL"),
        (("--store", "file:///proc/tracekv"), {}, "file:///proc/tracekv"),
        (("--store", "nonsense://x"), {}, "nonsense"),
    ],
)
def test_bad_input_gets_a_clear_error_and_no_traceback(tmp_path, arguments, environ, said):
    done = run_demo(*arguments, home=tmp_path, **environ)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_with_for_an_engine_is_kept_busy_with_hits_and_misses(tmp_path):
    outcome = outcome_of(run_demo("--json", "--for", "5", home=tmp_path))
    assert_restored(outcome, "llama")
    served = outcome["traffic"]
    assert served["requests"] == sum(served.get(kind, 0) for kind in ("document", "fresh", "short", "adapter"))
    assert 0 < served["hits"] < served["requests"]
    assert 0 < served["honoured_tokens"] < served["prompt_tokens"]


@pytest.mark.slow
def test_without_for_there_is_no_traffic(tmp_path):
    assert "traffic" not in outcome_of(run_demo("--json", home=tmp_path))


def test_the_same_seed_draws_the_same_traffic_and_another_one_another():
    from tracekv.cli.demo_traffic import Traffic

    def drawn(seed):
        traffic = Traffic(2048, 640, "salt", seed)
        return [traffic.draw() for _ in range(60)]

    assert drawn(1) == drawn(1) != drawn(2)
    kinds = {kind for kind, _, _ in drawn(1)}
    assert kinds == {"document", "fresh", "short", "adapter"}

"""What reaches the two halves of a connector on two ranks, and how ranks that fail are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.recording import scenario
from tests.harness.test_golden_manager import comparable
from tests.ranks.test_tensor_parallel import HERE, SMALL, tokens
from tracekv.harness.ranks import Prompt, RankJob, RanksFailed
from tracekv.journal.process import start_ticks

ROOT = Path(__file__).parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}


def job(scheduler="MemoryScheduler", worker="MemoryWorker", *, outputs=3, **more):
    return RankJob(
        rounds=[[Prompt(tokens(64), outputs)]],
        model_options=SMALL,
        scheduler=f"{HERE}:{scheduler}",
        worker=f"{HERE}:{worker}",
        **more,
    )


@pytest.fixture(scope="module")
def late(two_ranks):
    """A run in which rank 1 returns the saved id one poll after rank 0."""
    prompts = job("SavingScheduler", "LateOnRank1", outputs=1, observe=f"{HERE}:recorded")
    return two_ranks.run(RankJob(**{**vars(prompts), "executor_options": {"mode": "v1"}}))


BRING_UP = ("wait_for_initialization", "register_kv_caches")
HOOKS = ("wait_for_layer_load", "save_kv_layer")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_asynchronous_save_of_two_ranks_goes_as_in_the_golden_trace(rank, late):
    steps = scenario("g1")["ranks"][str(rank)]
    golden = [call for step in steps for call in step.get("calls", [])]
    got = [call for call in late[rank].observed["calls"] if call["m"] not in (*BRING_UP, *HOOKS)]
    assert [call["m"] for call in got] == [call["m"] for call in golden][: len(got)]
    polls = [(call["args"], call["ret"]) for call in comparable(got) if call["m"] == "get_finished"]
    expected = [(call["args"], call["ret"]) for call in comparable(golden) if call["m"] == "get_finished"]
    # The trace polls once more after the last request has gone; the executor is done then.
    assert polls == expected[:3]


def test_pages_are_given_back_on_both_ranks_once_the_last_one_reported(late):
    for result in late:
        assert [call["m"] for call in result.observed["calls"]].count("get_finished") == 3
        # What is left is known to device reuse, and held by nobody.
        assert result.observed["pages held"] == [0]


def test_the_scheduler_lives_on_the_leader_and_a_worker_on_every_rank(late):
    leader, other = late
    assert leader.calls["scheduler.request_finished"] == 1
    assert not any(name.startswith("scheduler.") for name in other.calls)
    workers = [{name: n for name, n in r.calls.items() if name.startswith("worker.")} for r in late]
    assert workers[0] == workers[1]
    assert workers[0]["worker.bind_connector_meta"] == 1


def test_every_rank_binds_a_copy_of_what_the_leader_built(late):
    leader = late[0].observed["pid"]
    assert [result.observed["made by"] for result in late] == [[leader], [leader]]
    assert late[1].observed["pid"] != leader
    assert [result.observed["is the leader's own object"] for result in late] == [False, False]


def test_the_runtime_is_set_before_the_connector_is_made(late):
    for result in late:
        assert result.observed["tensor_parallel_size"] == 2
        assert result.observed["gathered"] == [("from", 0), ("from", 1)]


def failure_of(ranks, asked, **limits):
    pids = ranks.pids
    with pytest.raises(RanksFailed) as failed:
        ranks.run(asked, **limits)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return failed.value


def kinds(error):
    return {rank: (failure.kind, failure.what) for rank, failure in error.failures.items()}


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(mortal_ranks):
    error = failure_of(mortal_ranks, job(worker="DiesOnRank1"))
    assert error.failures[1].kind == "died"
    assert error.failures[0].kind == "blocked"
    assert "rank 1 ended with signal 9 (SIGKILL)" in str(error)
    with pytest.raises(RuntimeError, match="start new ones"):
        mortal_ranks.run(job())


@pytest.mark.slow
def test_a_leader_that_raises_leaves_the_others_waiting_for_its_answer(mortal_ranks):
    error = failure_of(mortal_ranks, job("AsksWithAnError"))
    assert kinds(error) == {0: ("raised", "ValueError: own error of the connector"), 1: ("blocked", "broadcast")}
    assert any("get_num_new_matched_tokens" in note for note in error.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "waiting"), [("FailsASaveOnRank1", [0]), ("FailsALayerOnRank1", [0, 1])])
def test_a_forward_that_fails_on_one_rank_only_is_found_out(worker, waiting, mortal_ranks, monkeypatch):
    """Rank 1 gives its requests up and goes on without them; rank 0 doesn't, and one waits for the other."""
    monkeypatch.setattr("tracekv.harness.ranks._STUCK_S", 1.5)
    error = failure_of(mortal_ranks, job(worker=worker))
    assert {rank: failure.kind for rank, failure in error.failures.items()} == dict.fromkeys(waiting, "blocked")
    assert "rank 0 waits in" in str(error)
    assert (
        "Before, on rank 1: a forward failed; 1 active requests end here (OSError: the store of rank 1 is full)"
        in str(error)
    )


@pytest.mark.slow
def test_a_rank_that_never_comes_back_is_ended_when_the_time_is_over(mortal_ranks):
    mortal_ranks.run(job())
    error = failure_of(mortal_ranks, job(worker="NeverComesBack"), timeout_s=2)
    assert error.failures[1].kind == "unfinished"
    assert "inside the connector, after 2 s" in str(error)


_LAUNCHER = """
import os, sys, threading, time
from tests.ranks.test_rank_protocol import job
from tracekv.harness.ranks import Ranks

if __name__ == "__main__":
    ranks = Ranks(2)
    ranks.run(job())
    threading.Thread(target=ranks.run, args=(job(worker="NeverComesBack"),), daemon=True).start()
    deadline = time.monotonic() + 60
    while not ranks._whereabouts[0]:  # until rank 0 waits for rank 1
        if time.monotonic() > deadline:
            sys.exit("rank 0 does not wait for rank 1")
        time.sleep(0.01)
    print(*ranks.pids, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_was_killed(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(_LAUNCHER)
    launcher = subprocess.run([sys.executable, str(script)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=ENVIRON)
    assert launcher.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in launcher.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(start_ticks(pid) is not None for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [start_ticks(pid) for pid in pids] == [None, None]

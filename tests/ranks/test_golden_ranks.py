"""Golden scenarios with two ranks: what reached each rank's connector, what was raised, and who was left waiting."""

from __future__ import annotations

import logging

import pytest

from tests.harness.recording import named_in, plain, scenario
from tests.harness.test_golden_manager import Driver, comparable
from tests.harness.two_threads import Blocked, on_two_ranks

SCENARIOS = [
    "g1",
    "h.zero_async_tp2",
    "h.leader_raises_tp2",
    "h.unknown_id_tp2",
    "h.unpicklable_tp2",
    "h.flat_only_tp2",
    "h.alloc_raises_tp2",
]


def outcome(driver, step):
    golden = step.get("raised", {})
    try:
        return {"ret": plain(driver.do(step))}
    except Blocked as blocked:
        return {"raised": {"blocked_in": blocked.collective, "simulated": golden.get("simulated")}}
    except Exception as error:
        return {"raised": named_in(error, golden)}


def replay(name, ranks, steps):
    """Do a rank's steps; each with what came of it, and with what the trace says."""
    driver = Driver(name, ("flat",) if name == "h.flat_only_tp2" else ("flat", "grouped"), ranks)
    if name == "h.flat_only_tp2" and ranks.rank == 0:
        type(driver.manager.scheduler).__name__ = type(driver.manager.scheduler).__qualname__ = "Sched"
    pairs, tables = [], {}
    for step in steps:
        ours = {"do": step["do"], **outcome(driver, step), "calls": comparable(driver.recorder.calls)}
        theirs = {key: step[key] for key in ("do", "ret", "raised") if key in step}
        theirs["calls"] = comparable(step.get("calls", []))
        if "state" in step:
            ours["state"] = {str(i): driver.requests[i].state.value for i in driver.requests}
            theirs["state"] = step["state"]
        tables = step.get("mgr", tables)
        pairs.append(({**ours, "mgr": driver.tables()}, {**theirs, "mgr": tables}))
    return pairs, ranks.entered


def replay_both(name):
    golden = scenario(name)["ranks"]
    return on_two_ranks(lambda ranks: replay(name, ranks, golden[str(ranks.rank)]))


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_does_what_the_real_manager_did(name, caplog):
    caplog.set_level(logging.INFO, "tracekv.harness")
    replayed = replay_both(name)
    for rank, (pairs, _) in enumerate(replayed):
        for number, (ours, theirs) in enumerate(pairs):
            assert ours == theirs, f"rank {rank}, step {number}"
    if "facts" in scenario(name):
        facts = scenario(name)["facts"]
        said = [[entry.levelname.lower(), " ".join(entry.getMessage().split()[:4])] for entry in caplog.records]
        assert said == facts["warnings"]
        assert [entered for _, entered in replayed] == [facts["collectives per rank"]] * 2


def test_every_scenario_with_ranks_is_replayed():
    from tests.harness.recording import _golden

    assert sorted(SCENARIOS) == sorted(name for name, found in _golden().items() if "ranks" in found)


def test_a_rank_that_reports_earlier_is_noticed():
    """Negative control: in g1 rank 1 reports in pass 3; were it pass 2, both ranks would release there."""
    golden = scenario("g1")["ranks"]
    polls = [step for step in golden["1"] if step["do"] == "manager.get_finished"]
    for step, saved in zip(polls, ([], [1], [], []), strict=True):
        step["calls"][0]["ret"] = [saved, []]
    replayed = on_two_ranks(lambda ranks: replay("g1", ranks, golden[str(ranks.rank)]))
    for pairs, _ in replayed:
        assert any(ours != theirs for ours, theirs in pairs)

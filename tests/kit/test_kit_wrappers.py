"""Wrappers and journal assertions that connector authors use."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

import tracekv
from tracekv.capture import implemented_callbacks
from tracekv.cli.app import app
from tracekv.harness import Executor
from tracekv.journal.vocabulary import Direction
from tracekv.testing import journal_of, minimal, recorded, with_fault, with_io_counted, with_latency
from tracekv.testing.playing import model_of
from tracekv.testing.wrappers import IoCounts


def serve(worker=minimal.Worker, scheduler=minimal.Scheduler, seed=1):
    engine = Executor(
        model_of("llama"), tracekv.trace(scheduler), tracekv.trace(worker), tokens_per_block=16, num_blocks=16
    )
    request = engine.submit([seed] * 40, 2)
    engine.run()
    return request


@pytest.fixture(autouse=True)
def _own_store(monkeypatch, tmp_path):
    monkeypatch.setenv(minimal.VARIABLE, str(tmp_path))


def test_latency_is_added_to_the_named_callback_only():
    with recorded() as run:
        serve(with_latency(minimal.Worker, 0.05, "start_load_kv"))
    calls = [call for _, call in run.records if getattr(call, "callback", None) is not None]
    slow = {call.callback for call in calls if call.ended_ns - call.started_ns >= 50_000_000}
    assert {callback.name for callback in map(tracekv.journal.vocabulary.Callback, slow)} == {"START_LOAD_KV"}


def test_a_fault_comes_after_so_many_calls_and_so_often():
    faulty = with_fault(minimal.Worker, OSError("no space"), "wait_for_save", after=1, times=1)
    with recorded():
        outcomes = [serve(faulty, seed=seed).error for seed in (1, 2)]
    assert [type(error) for error in outcomes] == [OSError, type(None)]


def test_a_wrapped_class_implements_what_the_class_implements():
    faulty = with_fault(minimal.Worker, OSError(), "wait_for_save")
    assert set(implemented_callbacks(faulty)) == set(implemented_callbacks(minimal.Worker))


def test_a_callback_that_a_class_does_not_implement_cannot_be_wrapped():
    with pytest.raises(ValueError, match="does not implement wait_for_everything; it implements .*get_finished"):
        with_latency(minimal.Worker, 1.0, "wait_for_everything")


def test_io_is_counted_by_callback_and_bytes(tmp_path):
    class Writes(minimal.Worker):
        def wait_for_save(self, stream):
            (tmp_path / "kv").write_bytes(bytes(10_000))

        def start_load_kv(self, stream):
            time.monotonic()

    counts = IoCounts()
    with recorded():
        serve(with_io_counted(Writes, counts, "wait_for_save", "start_load_kv"))
    assert counts.of["wait_for_save"].written_bytes == 10_000 * counts.of["wait_for_save"].calls
    assert (counts.of["start_load_kv"].written_bytes, counts.of["start_load_kv"].read_bytes) == (0, 0)


def test_what_was_recorded_is_counted_and_clean():
    with recorded() as run:
        request = serve()
    page = 16 * 2 * 2 * 2 * 32 * 4  # tokens, layers, key and value, heads, head size, float32
    assert request.error is None
    assert run.nbytes(Direction.SAVE) == 2 * page
    assert run.calls()["scheduler.get_num_new_matched_tokens"] == 1
    run.assert_clean()


def test_a_broken_rule_is_an_assertion_that_names_it():
    class AnswersNone(minimal.Worker):
        def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
            return [99], []

    with recorded() as run, pytest.raises(KeyError):
        serve(AnswersNone)
    with pytest.raises(AssertionError, match=r"W3 violation at get_finished.*Fix:"):
        run.assert_clean()


def test_where_nothing_was_recorded_nothing_is_clean():
    with recorded() as run:
        pass
    with pytest.raises(AssertionError, match="no callback was recorded"):
        run.assert_clean()


def test_a_folder_of_journals_is_read(tmp_path):
    with recorded(TRACEKV_JOURNAL_DIR=str(tmp_path / "journals")) as run:
        serve()
    assert run.calls()["scheduler.build_connector_meta"] == 2
    assert journal_of(tmp_path / "journals").calls()["scheduler.build_connector_meta"] == 2


MINIMAL = "tracekv.testing.minimal:Scheduler,Worker"


def test_the_command_prints_one_json_object_and_exits_well():
    own = f"{minimal.VARIABLE}={{folder}}"
    result = CliRunner().invoke(app, ["test", MINIMAL, "--cells", "v2/w*", "--env", own, "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code == 0
    assert told["verdicts"] == {"ok": 2}
    assert [cell["name"] for cell in told["cells"]] == ["v2/warm", "v2/whole-blocks"]
    assert told["cells"][0]["nbytes"]["load observed"] == told["cells"][0]["nbytes"]["load reported"] > 0


def test_the_command_exits_with_1_and_names_what_is_broken():
    result = CliRunner().invoke(app, ["test", "tests.kit.test_kit:KeysByOwnTokens,W", "--cells", "v2/prefix"])
    assert result.exit_code == 2
    broken = "tests.kit.broken:Scheduler,Worker"
    result = CliRunner().invoke(
        app, ["test", broken, "--cells", "v2/prefix", "--env", f"{minimal.VARIABLE}={{folder}}"]
    )
    assert result.exit_code == 1
    assert "is answered differently without a connector" in result.stdout
    assert "1 broken" in result.stdout


def test_a_connector_and_self_exclude_each_other():
    assert CliRunner().invoke(app, ["test"]).exit_code == 2
    assert CliRunner().invoke(app, ["test", MINIMAL, "--self"]).exit_code == 2

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import threading
import traceback
from pathlib import Path

import pytest

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker, request
from tracekv import capture
from tracekv.contract import SchedulerOutput, reading
from tracekv.journal.current import current
from tracekv.journal.opening import open_journals
from tracekv.journal.records import BindCall, Call, IdlePolls, ProcessStarted, QueryCall, TracerFault
from tracekv.journal.vocabulary import Callback
from tracekv.settings import SettingsError


class Boom(Exception):
    pass


@pytest.mark.parametrize("method", ["start_load_kv", "wait_for_layer_load", "get_finished", "bind_connector_meta"])
def test_an_inner_exception_passes_unmodified(records, method):
    planted = Boom("as it was")

    def explode(self, *args):
        raise planted

    inner = type("Exploding", (TensorWorker,), {method: explode})
    worker = tracekv.trace(inner)(None)
    arguments = {"wait_for_layer_load": (3, None), "get_finished": ([], [])}.get(method, (None,))
    with pytest.raises(Boom) as caught:
        getattr(worker, method)(*arguments)
    assert caught.value is planted
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "explode"
    assert records(Call)[-1].error == "Boom"


def test_after_an_exception_the_next_call_counts_again(records):
    class Once(TensorWorker):
        failed = False

        def start_load_kv(self, stream):
            if not self.failed:
                self.failed = True
                raise Boom

    worker = tracekv.trace(Once)(None)
    with pytest.raises(Boom):
        worker.start_load_kv(None)
    worker.start_load_kv(None)
    assert [record.error for record in records(Call)][-2:] == ["Boom", None]


def test_an_error_of_ours_leaves_the_run_unharmed_and_is_reported_once(records, monkeypatch, caplog):
    def planted(request):
        raise Boom("ours")

    monkeypatch.setattr(reading, "cache_salt", planted)
    scheduler = tracekv.trace(FlatScheduler)(None)
    with caplog.at_level(logging.WARNING, "tracekv"):
        for _ in range(3):
            assert scheduler.get_num_new_matched_tokens(request(), 0) == (32, False)
            scheduler.update_state_after_alloc(request(), [1])
    assert records(QueryCall) == []
    assert [(fault.instrument, fault.error) for fault in records(TracerFault)] == [("query", "Boom")]
    assert len([line for line in caplog.records if "instrument query failed" in line.getMessage()]) == 1
    assert "ours" not in caplog.text  # a message could carry a prompt


class Incomparable:
    def __eq__(self, other):
        raise Boom

    __hash__ = None


@pytest.mark.parametrize(
    ("given", "answer"), [((None, None), ([], [])), (([], []), (Incomparable(), [])), (([], []), Incomparable())]
)
def test_ids_and_answers_of_another_kind_harm_nothing(records, given, answer):
    class Odd(TensorWorker):
        def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
            return answer

    worker = tracekv.trace(Odd)(None)
    for _ in range(2):
        assert worker.get_finished(*given) is answer
    worker.start_load_kv(None)
    assert records(Call)[-1].callback == Callback.START_LOAD_KV


def test_a_journal_that_fails_harms_nothing(monkeypatch, caplog):
    scheduler, worker = tracekv.trace(FlatScheduler)(None), tracekv.trace(TensorWorker)(None)

    def full(record):
        raise OSError("no journal")

    monkeypatch.setattr(current.journal, "write", full)
    with caplog.at_level(logging.WARNING, "tracekv"):
        for _ in range(3):
            assert scheduler.get_num_new_matched_tokens(request(), 0) == (32, False)
            worker.bind_connector_meta(scheduler.build_connector_meta(SchedulerOutput()))
            worker.start_load_kv(None)
            worker.wait_for_layer_load(0, None)
            worker.wait_for_save(None)
            assert worker.get_finished([], []) == ([], [])
    assert worker.get_connector_meta() == {"plan": 1}
    messages = [line.getMessage() for line in caplog.records]
    assert len(messages) == len(set(messages)) + len([m for m in messages if "journal can't be written" in m]) - 1


def test_metadata_travels_in_an_envelope_and_arrives_as_it_was(records):
    scheduler, worker = tracekv.trace(FlatScheduler)(None), tracekv.trace(TensorWorker)(None)
    sent = scheduler.build_connector_meta(SchedulerOutput())
    assert type(sent).__name__ == "Envelope"
    worker.bind_connector_meta(sent)
    assert worker._metadata == {"plan": 1}
    worker.bind_connector_meta(pickle.loads(pickle.dumps(sent)))
    assert worker.get_connector_meta() == {"plan": 1}
    bare, pickled = records(BindCall)
    assert (bare.has_envelope, bare.nbytes, bare.digest, bare.step) == (True, None, None, 1)
    assert pickled.nbytes == len(pickle.dumps({"plan": 1}, protocol=pickle.HIGHEST_PROTOCOL))
    assert len(pickled.digest) == 8


def test_with_one_rank_the_very_object_is_bound():
    plan = object()

    class Planning(FlatScheduler):
        def build_connector_meta(self, scheduler_output):
            return plan

    scheduler, worker = tracekv.trace(Planning)(None), tracekv.trace(TensorWorker)(None)
    worker.bind_connector_meta(scheduler.build_connector_meta(SchedulerOutput()))
    assert worker.get_connector_meta() is plan


def test_without_a_traced_worker_in_the_process_metadata_stays_bare():
    scheduler = tracekv.trace(FlatScheduler)(None)
    assert scheduler.build_connector_meta(SchedulerOutput()) == {"plan": 1}
    worker = tracekv.trace(TensorWorker)(None)
    assert scheduler.build_connector_meta(SchedulerOutput()) != {"plan": 1}
    del worker
    assert scheduler.build_connector_meta(SchedulerOutput()) == {"plan": 1}


def test_bare_metadata_passes_through_a_traced_worker():
    worker = tracekv.trace(TensorWorker)(None)
    worker.bind_connector_meta(b"bare")
    assert worker.get_connector_meta() == b"bare"


def test_metadata_that_cannot_be_pickled_raises_what_it_would_have_raised():
    class Unpicklable(FlatScheduler):
        def build_connector_meta(self, scheduler_output):
            return threading.Lock()

    scheduler, worker = tracekv.trace(Unpicklable)(None), tracekv.trace(TensorWorker)(None)
    sent = scheduler.build_connector_meta(SchedulerOutput())
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object"):
        pickle.dumps(sent)
    worker.bind_connector_meta(sent)


def test_the_callback_in_progress_is_visible_from_outside():
    seen = []

    class Peeking(TensorWorker):
        def start_load_kv(self, stream):
            seen.append(current.journal.in_progress[0])

        def save_kv_layer(self, layer_idx, stream):
            seen.append(tuple(current.journal.saves[2 * layer_idx : 2 * layer_idx + 2]))

    worker = tracekv.trace(Peeking)(None)
    worker.start_load_kv(None)
    worker.save_kv_layer(37, None)
    assert seen[0] == 38
    assert seen[1][0] > 0
    assert seen[1][1] == 0
    assert current.journal.in_progress[0] == 0


def test_an_unknown_setting_stops_the_bring_up(monkeypatch):
    monkeypatch.setenv("TRACEKV_DETIAL", "full")
    with pytest.raises(SettingsError, match="TRACEKV_DETIAL.*Did you mean TRACEKV_DETAIL"):
        tracekv.trace(TensorWorker)(None)


def test_a_forked_child_writes_nothing_into_its_parents_journal(records):
    worker = tracekv.trace(TensorWorker)(None)
    before = len(records())
    pid = os.fork()
    if pid == 0:
        os._exit(0 if current.journal is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    worker.start_load_kv(None)
    assert len(records()) == before + 1


def loads_in_a_child(passes):
    worker = tracekv.trace(TensorWorker)(None)
    for _ in range(passes):
        worker.start_load_kv(None)
    os._exit(0)  # as an engine's process that is ended from outside


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_started_anew_writes_a_journal_of_its_own(records, tmp_path, method):
    worker = tracekv.trace(TensorWorker)(None)
    worker.start_load_kv(None)
    before = len(records())
    child = multiprocessing.get_context(method).Process(target=loads_in_a_child, args=(3,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert len(records()) == before
    loads = {}
    for reader in open_journals(tmp_path / "journals"):
        found, _, lost = reader.read(0)
        reader.close()
        assert lost == 0
        (started,) = [record for record in found if isinstance(record, ProcessStarted)]
        loads[started.pid] = sum(
            isinstance(record, Call) and record.callback == Callback.START_LOAD_KV for record in found
        )
    assert loads == {os.getpid(): 1, child.pid: 3}


def test_polls_that_no_record_came_after_are_told_at_the_end(tmp_path):
    worker = tracekv.trace(TensorWorker)(None)
    for _ in range(5):
        worker.get_finished([], [])
    assert capture.shutdown()
    (reader,) = open_journals(tmp_path / "journals")
    found, _, _ = reader.read(0)
    assert [record.count for record in found if isinstance(record, IdlePolls)] == [5]
    reader.close()


def test_a_session_can_end_and_begin_again(records):
    tracekv.trace(TensorWorker)(None)
    first = current.journal
    assert capture.shutdown()
    tracekv.trace(TensorWorker)(None)
    assert current.journal is not first


@pytest.mark.parametrize("agent", ["external", "thread"])
def test_a_session_that_ended_holds_no_file_open(monkeypatch, tmp_path, agent):
    monkeypatch.setenv("TRACEKV_AGENT", agent)
    monkeypatch.setenv("TRACEKV_TRACE_FILE", str(tmp_path / "trace.jsonl"))
    capture.shutdown()
    for _ in range(2):
        worker = tracekv.trace(TensorWorker)(None)
        worker.start_load_kv(None)
        capture.shutdown()
        del worker
    gc.collect()
    held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [path for path in held if str(tmp_path) in path] == []

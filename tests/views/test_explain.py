"""A request explained from records written by hand: what is told, and that the parts of its time add up."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.journaled import write_journals
from tracekv.journal.records import (
    CallCounts,
    ConnectorWrapped,
    Enqueued,
    FinishedCall,
    RunJoined,
    StoreOperation,
    Transfer,
)
from tracekv.journal.ring import RingJournal
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome, Side, Source, Tier
from tracekv.testing.corpus.tape import Tape
from tracekv.views.explain import explain
from tracekv.views.runs import runs_of
from tracekv.views.spent import PARTS
from tracekv.views.verdict import MISSES, kind, served_tokens, verdict

MS = 1_000_000


@pytest.fixture
def told(tmp_path):
    scans = []

    def tell(tape, request=1):
        folder = tmp_path / str(len(scans))
        folder.mkdir()
        scans.append(scan([write_journals(folder, tape.records)]))
        (run,) = runs_of(scans[-1].processes)
        return explain(run, request)

    yield tell
    for each in scans:
        each.close()


def move(tape, begin, end, *, rank=0, group=0, read=0, verify=0, copy=0, stall=0, way=Direction.LOAD, error=None):
    tape.add(
        Transfer(
            way, Source.REPORTED, Tier.DISK, 1, tape.step, group, [1, 2], 8192, 64, begin, end, 0, read, verify, copy, stall, error
        ),
        rank,
    )  # fmt: skip


def test_a_hit_is_told_with_its_tokens_its_bytes_and_its_time(told):
    tape = Tape(ranks=2, groups=2)
    tape.lookup(1, 100, 0, 64, stored=64, group_tokens=[64, 64], reason=MissReason.NOT_STORED, bounding=1)
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4], [1, 2, 3, 4]])
    tape.after(5)
    tape.build([(1, 64, 36, 100, [[1, 2, 3, 4], [1, 2, 3, 4]])])
    for rank in (0, 1):
        tape.bind(rank)
        for group in (0, 1):
            move(tape, tape.now, tape.now + 200_000, rank=rank, group=group)
        tape.worker(38, rank)
        tape.after(1)
        tape.worker(41, rank)
    tape.finish(1)
    found = told(tape)
    story = found.story
    assert (story.prompt_tokens, story.offered_tokens, story.honoured_tokens) == (100, 64, 64)
    assert found.tokens(Direction.LOAD) == 64
    assert found.nbytes(Direction.LOAD) == 4 * 8192
    assert [(rank, moved.layer_group, moved.tier) for rank, moved in found.moved()] == [
        (rank, group, Tier.DISK) for group in (0, 1) for rank in (0, 1)
    ]
    assert sum(found.parts.values()) == found.whole_ns > 5 * MS
    assert found.parts["queue"] >= 5 * MS
    assert found.parts["lookup"] == 10_000
    assert found.parts["hidden"] > 0
    assert found.is_finished
    assert verdict(found).startswith("partial hit: 64 of 100 prompt tokens came from the store in ")
    assert "layer group 1 bounds it" in verdict(found)
    assert kind(found) == "partial"


@pytest.mark.parametrize("reason", MissReason)
def test_every_reason_for_a_miss_has_words_and_advice(told, reason):
    tape = Tape()
    tape.lookup(1, 100, reason=reason)
    tape.query(1, 100)
    found = told(tape)
    assert verdict(found) == f"miss: {reason.value} - {MISSES[reason][0]}; {MISSES[reason][1]}"
    assert kind(found) == "miss"


def test_a_store_read_before_the_pass_is_time_of_its_own(told):
    tape = Tape()
    tape.query(1, 100, 0, 64, is_async=True)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    begun = tape.now
    read = StoreOperation(
        Operation.READ, Outcome.OK, "local", None, None, 1, 0, 0, 2, 8192, 1, begun, begun + 9 * MS, MS, 6 * MS, 2 * MS, "closed", None
    )  # fmt: skip
    tape.after(10)
    tape.add(read)
    tape.polled(loading=[1], loaded=[1])
    tape.build([(1, 64, 36, 100, [[1, 2, 3, 4]])])
    move(tape, tape.now, tape.now + 5_000, copy=5_000)
    tape.forward()
    tape.finish(1)
    found = told(tape)
    assert (found.parts["read"], found.parts["verify"]) == (6 * MS, 2 * MS)
    assert sum(found.parts.values()) == found.whole_ns
    assert found.story.store_reads.nbytes == 8192


def test_store_operations_of_all_ranks_are_added_up_with_what_a_bill_counts(told):
    tape = Tape(ranks=2)
    tape.query(1, 100, 0, 64)
    for rank in (0, 1):
        for operation, requests in ((Operation.READ, 3), (Operation.READ, 1), (Operation.PUT, 2)):
            at = tape.now
            record = StoreOperation(
                operation, Outcome.OK, "s3", "kv", None, 1, 0, rank, 2, 8192, 1, at, at + MS, 0, 0, 0, "closed", None, requests
            )  # fmt: skip
            tape.add(record, rank=rank)
    found = told(tape).stored()
    assert {operation.value: (each.operations, each.requests, each.nbytes) for operation, each in found.items()} == {
        "read": (4, 8, 4 * 8192),
        "put": (2, 4, 2 * 8192),
    }


def test_a_pass_that_waits_for_its_layers_stalls(told):
    tape = Tape(layers=2)
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    tape.build([(1, 64, 36, 100, [[1, 2, 3, 4]])])
    tape.bind()
    tape.worker(38)
    began = tape.now
    tape.after(8)
    move(tape, began, began + 6 * MS)
    tape.hooks([(began, began + 2 * MS), (began + 4 * MS, began + 5 * MS)], [(0, 0), (0, 0)])
    tape.worker(41)
    tape.finish(1)
    found = told(tape)
    assert found.parts["stall"] == 3 * MS + 10_000 + 10_000  # both waits, start_load_kv and wait_for_save
    assert found.parts["hidden"] == 3 * MS
    assert found.load_hidden_ns == 3 * MS
    assert sum(found.parts.values()) == found.whole_ns


def test_held_pages_and_the_rank_that_was_last_are_told(told):
    tape = Tape(ranks=2)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.polled(0, saving=[1], saved=[1])
    tape.after(7)
    tape.polled(1, saving=[1], saved=[1])
    found = told(tape)
    assert found.story.held_pages == 4
    rank, skew_ns = found.last_rank(Direction.SAVE)
    assert rank == 1
    assert skew_ns == 7 * MS + 10_000
    assert found.last_rank(Direction.LOAD) is None
    assert found.parts["held"] >= 7 * MS
    assert sum(found.parts.values()) == found.whole_ns


@pytest.mark.parametrize("is_asked", [True, False])
def test_pages_are_held_until_the_last_rank_has_given_them_back(told, is_asked):
    tape = Tape(ranks=2)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.polled(0, saving=[1], saved=[1])
    if is_asked:
        tape.polled(1, saving=[1])
    tape.after(7)
    tape.idle(1)
    found = told(tape)
    assert not found.is_finished
    assert (found.holding, found.held_ns) == ([1], None)
    assert verdict(found).startswith("cut short: when the records ended, 4 pages are held for its save since ")
    assert verdict(found).endswith(": rank 1 hasn't given them back")


def test_a_leader_without_a_worker_waits_for_the_workers_only(tmp_path):
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.polled(saving=[1], saved=[1])
    of_workers = (FinishedCall, ConnectorWrapped, RunJoined)
    records = [("leader", r) for _, r in tape.records if not (isinstance(r, FinishedCall) or is_worker(r))]
    records += [("worker", r) for _, r in tape.records if isinstance(r, of_workers) and not is_scheduler(r)]
    with scan([write_journals(tmp_path, records)]) as found:
        (run,) = runs_of(found.processes)
        told = explain(run, 1)
    assert told.is_finished
    assert told.held_ns > 0


def is_worker(record):
    return isinstance(record, ConnectorWrapped) and record.side is Side.WORKER


def is_scheduler(record):
    return isinstance(record, ConnectorWrapped) and record.side is Side.SCHEDULER


def test_where_the_runtime_does_not_tell_what_it_took_nothing_is_said_of_it(told):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.alloc(1, None, [[1, 2, 3, 4]])
    tape.build([(1, 64, 36, 100, [[1, 2, 3, 4]])])
    found = told(tape)
    assert verdict(found) == "hit: 64 of 100 prompt tokens were offered; how many the runtime took isn't told"
    assert (kind(found), served_tokens(found)) == ("hit", 64)


def test_an_offer_to_a_request_that_never_got_pages_was_not_taken(told):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    found = told(tape)
    assert verdict(found) == "not taken: 64 tokens were offered, and no pages are recorded to have been given to it"
    assert (kind(found), served_tokens(found)) == ("miss", 0)


def test_what_the_device_gave_beside_a_hit_makes_it_no_partial_one(told):
    tape = Tape()
    tape.lookup(1, 100, 32, 64, stored=96, reason=MissReason.ON_DEVICE)
    tape.query(1, 100, 32, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    tape.build([(1, 96, 4, 100, [[1, 2, 3, 4]])])
    found = told(tape)
    assert verdict(found).startswith("hit: ")
    assert kind(found) == "hit"


def test_the_whole_begins_where_the_request_was_enqueued_and_joins_its_callers_trace(told):
    tape = Tape()
    tape.add(Enqueued(tape.now, 1, None, 100, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    tape.after(20)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    found = told(tape)
    assert found.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert found.parts["queue"] >= 20 * MS
    assert found.whole_ns == sum(found.parts.values())


def test_tokens_are_estimated_from_pages_where_a_connector_tells_pages_only(told):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    tape.add(Transfer(Direction.LOAD, Source.REPORTED, Tier.HOST, 1, 1, 0, [1, 2], 8192, 0, 1, 2, 0, 0, 0, 0, 0, None))
    found = told(tape)
    assert found.tokens(Direction.LOAD) == 0
    assert found.estimated_tokens(Direction.LOAD) == 64
    assert found.estimated_tokens(Direction.SAVE) is None


def test_a_failed_load_is_the_verdict(told):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    move(tape, tape.now, tape.now + MS, error="TimeoutError")
    assert verdict(told(tape)).startswith("failed: load: TimeoutError")


def test_time_in_which_calls_were_only_counted_is_nobodys(told):
    tape = Tape()
    tape.query(1, 100)
    began = tape.now
    tape.after(30)
    tape.add(CallCounts(0, began, tape.now, [(38, 10, 1000, 100)]))
    tape.finish(1)
    found = told(tape)
    assert found.parts["untold"] == 30 * MS
    assert any("TRACEKV_BUDGET_PCT" in note for note in found.notes)


def test_a_request_in_flight_says_what_its_engine_is_inside_of_and_so_does_a_dead_one(tmp_path):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    tape.build([(1, 64, 36, 100, [[1, 2, 3, 4]])])
    journal = RingJournal.create(tmp_path / "test.tkvring", 1 << 20)
    for _, record in tape.records:
        journal.write(record)
    journal.in_progress[0] = int(Callback.WAIT_FOR_LAYER_LOAD)
    journal.waits[2 * 3] = 1
    with scan([tmp_path]) as found:
        told = explain(runs_of(found.processes)[0], 1)
        assert verdict(told) == "in flight: it was in 1 pass, inside worker.wait_for_layer_load of layer 3 on rank 0"
        assert kind(told) == "unfinished"
    journal.close()
    with scan([tmp_path]) as found:
        told = explain(runs_of(found.processes)[0], 1)
        assert verdict(told) == "cut short: its engine ended inside worker.wait_for_layer_load of layer 3 on rank 0"


def test_nothing_names_a_request_that_was_not_there(told):
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    assert told(tape, 2) is None


moments = st.integers(-3_000_000, 30_000_000)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loads=st.lists(st.tuples(moments, moments, *[st.integers(0, 5_000_000)] * 4, st.sampled_from([0, 1])), max_size=5),
    reads=st.lists(st.tuples(moments, moments, *[st.integers(0, 5_000_000)] * 3), max_size=3),
    hooks=st.lists(st.tuples(moments, moments), min_size=1, max_size=4),
    keeps=st.booleans(),
)
def test_the_parts_add_up_to_the_whole_whatever_is_recorded(told, loads, reads, hooks, keeps):
    tape = Tape(ranks=2, layers=4)
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    zero = tape.now
    tape.after(3)
    tape.build([(1, 64, 36, 100, [[1, 2, 3, 4]])])
    for rank in (0, 1):
        tape.bind(rank)
        tape.worker(38, rank)
        for begin, end, read, verify, copy, stall, owner in loads:
            if owner == rank:
                move(tape, zero + begin, zero + end, rank=rank, read=read, verify=verify, copy=copy, stall=stall)
        tape.after(8)
        tape.hooks([(zero + begin, zero + end) for begin, end in hooks], [(0, 0)] * len(hooks), rank)
        tape.worker(41, rank)
    for begin, end, queued, transfer, verify in reads:
        tape.add(
            StoreOperation(
                Operation.READ, Outcome.OK, "local", None, None, 1, 0, 0, 2, 8192, 1, zero + begin, zero + end, queued, transfer,
                verify, "closed", None,
            )
        )  # fmt: skip
    tape.finish(1, keeps=keeps, pages=[[1, 2]])
    tape.after(2)
    tape.polled(0, saving=[1], saved=[1])
    found = told(tape)
    assert list(found.parts) == list(PARTS)
    assert sum(found.parts.values()) == found.whole_ns
    assert all(part >= 0 for part in found.parts.values())
    assert 0 <= found.load_hidden_ns <= found.load_ns

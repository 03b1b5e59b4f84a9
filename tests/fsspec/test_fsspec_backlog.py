"""Write-behind: bounded in bytes and in seconds, and what is dropped first when it is full."""

from __future__ import annotations

import threading

import pytest

from tests.fsspec.engine import B, prompt
from tracekv.journal.records import Drop, Transfer
from tracekv.journal.vocabulary import Direction, DropReason
from tracekv_fsspec.backlog import MEASURED_BYTES, Backlog

MIB = 1 << 20
PAGE = 4096


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def commit(self, backlog, nbytes, seconds):
        backlog.commit_begins()
        self.now += seconds
        backlog.commit_ends(nbytes)


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_refused_for_its_time_before_a_commit_was_measured(clock):
    backlog = Backlog(100 * MIB, 1.0, clock)
    backlog.add(99 * MIB)
    assert backlog.bytes_per_second is None
    assert backlog.refusal(MIB, is_new_chain=False) is None
    assert backlog.refusal(2 * MIB, is_new_chain=False) is DropReason.QUEUE_FULL


def test_what_a_measured_store_cant_take_in_time_is_refused(clock):
    backlog = Backlog(1000 * MIB, 10.0, clock)
    clock.commit(backlog, 8 * MIB, 1.0)
    assert backlog.bytes_per_second == 8 * MIB
    backlog.add(79 * MIB)
    assert backlog.refusal(MIB, is_new_chain=False) is None
    assert backlog.refusal(2 * MIB, is_new_chain=False) is DropReason.QUEUE_SLOW
    backlog.remove(2 * MIB)
    assert backlog.refusal(2 * MIB, is_new_chain=False) is None


def test_the_rate_follows_a_store_that_grows_slow(clock):
    backlog = Backlog(1000 * MIB, 10.0, clock)
    clock.commit(backlog, 32 * MIB, 0.1)
    fast = backlog.bytes_per_second
    for _ in range(6):
        clock.commit(backlog, 32 * MIB, 8.0)
    assert backlog.bytes_per_second < fast / 50


def test_small_and_failed_commits_measure_nothing(clock):
    backlog = Backlog(1000 * MIB, 10.0, clock)
    clock.commit(backlog, MEASURED_BYTES - 1, 5.0)
    clock.commit(backlog, 0, 30.0)
    assert backlog.bytes_per_second is None


def test_a_commit_that_hangs_counts_while_it_does(clock):
    backlog = Backlog(1000 * MIB, 10.0, clock)
    backlog.commit_begins()
    clock.now += 9.0
    assert backlog.refusal(1, is_new_chain=False) is None
    clock.now += 2.0
    assert backlog.refusal(1, is_new_chain=False) is DropReason.QUEUE_SLOW
    backlog.commit_ends(0)
    assert backlog.refusal(1, is_new_chain=False) is None


def test_commits_that_are_written_side_by_side_measure_the_store_together(clock):
    backlog = Backlog(1000 * MIB, 10.0, clock)
    backlog.commit_begins()
    backlog.commit_begins()
    clock.now += 1.0
    backlog.commit_ends(8 * MIB)
    backlog.commit_begins()
    clock.now += 1.0
    backlog.commit_ends(8 * MIB)
    assert backlog.bytes_per_second == 8 * MIB


def test_the_oldest_of_several_commits_is_the_one_that_hangs(clock):
    backlog = Backlog(1000 * MIB, 10.0, clock)
    backlog.commit_begins()
    clock.now += 8.0
    backlog.commit_begins()
    clock.now += 3.0
    assert backlog.refusal(1, is_new_chain=False) is DropReason.QUEUE_SLOW
    backlog.commit_ends(0)
    assert backlog.refusal(1, is_new_chain=False) is None


def test_new_chains_leave_a_quarter_of_both_bounds(clock):
    backlog = Backlog(100 * MIB, 1000.0, clock)
    backlog.add(75 * MIB)
    assert backlog.refusal(MIB, is_new_chain=True) is DropReason.QUEUE_FULL
    assert backlog.refusal(MIB, is_new_chain=False) is None
    timed = Backlog(1000 * MIB, 100.0, clock)
    clock.commit(timed, 2 * MIB, 2.0)
    timed.add(75 * MIB)
    assert timed.refusal(MIB, is_new_chain=True) is DropReason.QUEUE_SLOW
    assert timed.refusal(MIB, is_new_chain=False) is None


def held_up(faulty):
    """A store whose writes wait until the returned event is set."""
    may_write = threading.Event()
    faulty.before = staticmethod(lambda operation, path: operation == "put" and may_write.wait(20))
    return may_write


def test_when_the_queue_is_full_the_tail_of_a_new_chain_goes_and_a_chain_under_way_goes_on(
    engines, configure, faulty, records
):
    configure(url="faulty://kv", write_queue_bytes=8 * PAGE)
    engine = engines()
    may_write = held_up(faulty)
    begun, new = prompt(8), prompt(8, seed=1)
    first = engine.admit(1, begun)
    engine.run_pass((first, 4 * B))
    second = engine.prefill(2, new)
    while first.position < len(begun):
        engine.run_pass((first, min(2 * B, len(begun) - first.position)))
    may_write.set()
    assert engine.scheduler.flush(20)
    drops = [(drop.request_id, drop.blocks, drop.reason) for drop in records.of(Drop)]
    # 6 of 8 are open to new chains, 4 of them the first one's; then that one takes the last two.
    assert drops == [(2, 6, DropReason.QUEUE_FULL), (1, 2, DropReason.QUEUE_FULL)]
    fresh = engines()
    assert fresh.admit(3, begun).offered == 6 * B
    assert fresh.admit(4, new).offered == 2 * B
    assert second.request.request_id == 2


def test_a_store_that_hangs_longer_than_its_time_drops_what_is_new(engines, configure, faulty, records):
    configure(url="faulty://kv", write_queue_ms=1)
    engine = engines()
    may_write, is_writing = threading.Event(), threading.Event()

    def hang(operation, path):
        if operation == "put":
            is_writing.set()
            may_write.wait(20)

    faulty.before = staticmethod(hang)
    engine.finish(engine.prefill(1, prompt(2)))
    assert is_writing.wait(20)
    backlog = engine.scheduler._engine.stager.writer._backlog
    while backlog.seconds() <= 0.001:
        pass
    engine.prefill(2, prompt(3, seed=1))
    may_write.set()
    assert engine.scheduler.flush(20)
    assert [(drop.request_id, drop.blocks, drop.reason) for drop in records.of(Drop)] == [(2, 3, DropReason.QUEUE_SLOW)]
    engine.prefill(3, prompt(3, seed=1))
    assert engine.scheduler.flush(20)
    assert engines().admit(4, prompt(3, seed=1)).offered == 3 * B


def test_what_is_stored_or_in_flight_is_not_saved_twice(engines, configure, faulty, records):
    configure(url="faulty://kv")
    engine = engines()
    may_write = held_up(faulty)
    tokens = prompt(4)
    engine.prefill(1, tokens)
    engine.prefill(2, tokens, honour=0)  # the first one's save waits for the store
    may_write.set()
    assert engine.scheduler.flush(20)
    engine.prefill(3, tokens, honour=0)
    saves = [record for record in records.of(Transfer) if record.direction is Direction.SAVE]
    assert [(save.request_id, len(save.pages)) for save in saves] == [(1, 4)]

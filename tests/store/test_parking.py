"""Parked requests' tickets: staged with retries, told to every rank through the table, pinned until they are claimed."""

from __future__ import annotations

import threading

import pytest

from tests.store.node import FULL, keys
from tracekv_fsspec import parking
from tracekv_fsspec.arena_tables import Parked
from tracekv_fsspec.reader import Priority

WAIT_S = 30


class Parked1:
    """One parked run, and the table's changes to wait for."""

    def __init__(self, node, wanted):
        self.stager = node.stager
        self.changed = threading.Condition()
        self.states = []
        table_set = self.stager.parked.set

        def watched(number, state):
            table_set(number, state)
            with self.changed:
                self.states.append(state)
                self.changed.notify_all()

        self.stager.parked.set = watched
        ticket = self.stager.reader.stage(wanted, 0, request_id=1, priority=Priority.WAITED)
        self.number = self.stager.parking.park(ticket)

    def wait_for(self, state):
        with self.changed:
            assert self.changed.wait_for(lambda: state in self.states, WAIT_S), self.states


def free(node):
    return node.stager.arena.free_slots(FULL)


def test_a_parked_run_is_staged_and_pinned_until_it_is_claimed(node):
    node().save(keys(4))
    here = node(arena_bytes=8 * 4096)
    parked = Parked1(here, keys(4))
    parked.wait_for(Parked.STAGED)
    assert here.stager.parked.state(parked.number) is Parked.STAGED
    assert free(here) == 4
    ticket = here.stager.parking.claim(parked.number)
    assert here.is_right(ticket, 4)
    assert here.stager.parked.state(parked.number) is Parked.FORGOTTEN
    here.release(ticket, 4)
    assert free(here) == 8
    assert here.stager.parking.claim(parked.number) is None


def test_staging_is_tried_again_until_the_store_is_back(node, faulty):
    node("faulty://kv").save(keys(4))
    here = node("faulty://kv", read_deadline_ms=2000)
    failures = iter(range(2))

    def before(operation, path):
        if operation == "read" and next(failures, None) is not None:
            raise OSError("for now")

    faulty.before = staticmethod(before)
    parked = Parked1(here, keys(4))
    parked.wait_for(Parked.STAGED)
    assert Parked.FAILED not in parked.states


def test_what_never_comes_is_failed_and_its_pins_are_given_back(node):
    node().save(keys(2))
    here = node(read_deadline_ms=50)
    parked = Parked1(here, keys(4))  # two are nowhere
    parked.wait_for(Parked.FAILED)
    assert here.stager.parked.state(parked.number) is Parked.FAILED
    assert here.stager.parking.claim(parked.number) is None
    assert free(here) == here.stager.arena.slots_per_shard


def test_pins_of_a_request_that_is_never_reported_end(node, monkeypatch):
    monkeypatch.setattr(parking, "PINS_S", 0.0)
    node().save(keys(4))
    here = node()
    given_back = threading.Semaphore(0)
    unpin_run = here.stager.arena.unpin_run

    def watched(shard, numbers):
        numbers = list(numbers)
        unpin_run(shard, numbers)
        if len(numbers) == 4:
            given_back.release()

    here.stager.arena.unpin_run = watched
    parked = Parked1(here, keys(4))
    parked.wait_for(Parked.STAGED)
    for _ in ("the reader's own", "the ticket's"):
        assert given_back.acquire(timeout=WAIT_S)
    assert free(here) == here.stager.arena.slots_per_shard
    assert here.stager.parking.claim(parked.number) is None
    assert all(here.stager.arena.holds(FULL, key) for key in keys(4))


def test_a_forgotten_run_is_unpinned(node):
    node().save(keys(4))
    here = node()
    parked = Parked1(here, keys(4))
    parked.wait_for(Parked.STAGED)
    here.stager.parking.forget(parked.number)
    assert here.stager.parked.state(parked.number) is Parked.FORGOTTEN
    assert free(here) == here.stager.arena.slots_per_shard


def test_no_more_than_half_of_the_arena_is_promised_to_parked_requests(node):
    node().save(keys(8))
    here = node(arena_bytes=8 * 4096)
    first = here.stager.parking.park(here.stager.reader.stage(keys(8)[:3], 0))
    second = here.stager.reader.stage(keys(8)[3:5], 3)
    assert first is not None
    assert here.stager.parking.park(second) is None
    here.stager.reader.cancel(second)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_needs_no_read_is_settled_at_once(node, is_there):
    here = node(read_deadline_ms=50)
    if is_there:
        here.save(keys(2))
    parked = Parked1(here, keys(2))
    parked.wait_for(Parked.STAGED if is_there else Parked.FAILED)

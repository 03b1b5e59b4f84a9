"""Parked requests as a worker sees them."""

from __future__ import annotations

import pytest

from tracekv_fsspec.arena import Arena
from tracekv_fsspec.arena_tables import TICKETS, Parked
from tracekv_fsspec.index import Shard
from tracekv_fsspec.parked import ParkedLoadFailed, ParkedRequests
from tracekv_fsspec.worker_arena import WorkerArena


@pytest.fixture
def table_and_parked(tmp_path):
    """The leader's table, and the worker's requests."""
    arena = Arena.alone({Shard(0, 0): 4096}, 1 << 16, tmp_path)
    yield arena.geometry.parked(arena.buffer), ParkedRequests(WorkerArena(arena.file, arena.geometry, 0))
    arena.close()


def test_a_request_goes_on_when_its_ticket_is_staged_and_is_named_once(table_and_parked):
    table, parked = table_and_parked
    ticket = table.open()
    parked.named([(7, ticket)])
    assert parked.finished([7]) == []
    assert parked.finished([]) == []
    table.set(ticket, Parked.STAGED)
    assert parked.finished([]) == [7]
    assert parked.finished([]) == []


def test_only_requests_that_the_runtime_holds_are_named(table_and_parked):
    table, parked = table_and_parked
    ticket = table.open()
    table.set(ticket, Parked.STAGED)
    parked.named([(7, ticket)])
    assert parked.finished([]) == []
    assert parked.finished([7]) == [7]


def test_a_forgotten_ticket_lets_its_request_go_on_to_be_loaded_or_refused_there(table_and_parked):
    table, parked = table_and_parked
    ticket = table.open()
    parked.named([(7, ticket)])
    table.set(ticket, Parked.FORGOTTEN)
    assert parked.finished([7, 8]) == [7, 8]


def test_a_request_that_is_parked_again_waits_for_its_new_ticket(table_and_parked):
    table, parked = table_and_parked
    first = table.open()
    parked.named([(7, first)])
    table.set(first, Parked.STAGED)
    second = table.open()
    parked.named([(7, second)])
    assert parked.finished([7]) == []
    table.set(second, Parked.STAGED)
    assert parked.finished([]) == [7]


def test_staging_that_failed_stops_the_engine_and_names_the_setting(table_and_parked):
    table, parked = table_and_parked
    ticket = table.open()
    parked.named([(7, ticket)])
    table.set(ticket, Parked.FAILED)
    with pytest.raises(ParkedLoadFailed, match=r"request 7 .*TRACEKV_FSSPEC__OFFER=staged"):
        parked.finished([7])


def test_requests_that_are_never_held_are_forgotten_in_time(table_and_parked):
    _, parked = table_and_parked
    for request in range(TICKETS + 100):
        parked.named([(request, 1)])
    assert len(parked._tickets) == TICKETS

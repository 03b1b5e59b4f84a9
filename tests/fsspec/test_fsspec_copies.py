"""What ranks say of their copies, and what the leader makes of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekv_fsspec import copies as copies_module
from tracekv_fsspec.arena import Arena, Slot, StaleSlot
from tracekv_fsspec.arena_tables import RING, TICKETS, Kind, Parked, Progress
from tracekv_fsspec.copies import Copies
from tracekv_fsspec.index import Shard
from tracekv_fsspec.worker_arena import WorkerArena

WORLD = 2
PAGES = {Shard(0, rank): 100 for rank in range(WORLD)}


class Leader:
    """The books of two ranks' copies, and both ranks' sides of the arena; the leader's own tells at once."""

    def __init__(self):
        self.arena = Arena.alone(PAGES, 64 * 4096)
        self.loaded, self.saved, self.lost = [], [], []
        self.gone = set()
        self.changed = threading.Condition()
        self.copies = Copies(
            self.arena.geometry.ranks(self.arena.buffer),
            own=0,
            is_gone=self.gone.__contains__,
            loaded=lambda slots: self.note(self.loaded, slots),
            saved=lambda blocks: self.note(self.saved, blocks),
            lost=lambda blocks: self.note(self.lost, blocks),
        )
        self.ranks = [WorkerArena(self.arena.file, self.arena.geometry, rank) for rank in range(WORLD)]
        self.ranks[0].ended = self.copies.own_ended

    def note(self, where, what):
        with self.changed:
            where.extend(what)
            self.changed.notify_all()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, 30)


@pytest.fixture
def leader():
    made = Leader()
    yield made
    made.copies.close(10)
    assert made.copies._thread is None or not made.copies._thread.is_alive()


def slot(rank, number=0):
    return Slot(Shard(0, rank), number, 1)


def block(rank, number=0):
    return SimpleNamespace(slot=slot(rank, number), shard=Shard(0, rank))


def test_each_rank_gives_back_its_own_slots(leader):
    leader.copies.plan(1, [slot(0), slot(1)], [block(0), block(1)])
    leader.ranks[0].loads_begun(1)
    leader.ranks[0].loads_done(1)
    assert leader.loaded == [slot(0)]
    leader.ranks[1].loads_begun(1)
    leader.ranks[1].loads_done(1)
    leader.wait_for(lambda: leader.loaded == [slot(0), slot(1)])  # found by the thread: this rank told nobody
    assert leader.saved == []


def test_saves_are_handed_over_when_their_event_is_over(leader):
    over = threading.Event()
    leader.copies.plan(1, [], [block(0)])
    leader.ranks[0].saves_begun(1)
    leader.ranks[0].saves_done(1, SimpleNamespace(synchronize=over.wait))
    leader.copies.expire()
    assert leader.saved == leader.lost == []
    assert not leader.copies.wait(0)
    over.set()
    leader.wait_for(lambda: len(leader.saved) == 1)
    assert leader.copies.wait(30)
    leader.ranks[0].close(10)


def test_a_pass_that_nobody_began_is_given_back_with_the_next_plan(leader):
    leader.copies.plan(1, [slot(0), slot(1)], [block(1)])
    leader.copies.expire()
    assert (leader.loaded, len(leader.lost), leader.saved) == ([slot(0), slot(1)], 1, [])


def test_a_rank_that_is_late_keeps_its_slots(leader):
    leader.copies.plan(1, [], [block(0), block(1)])
    leader.ranks[0].saves_begun(1)
    leader.ranks[0].saves_done(1)
    for _ in range(3):
        leader.copies.expire()
    assert (len(leader.saved), leader.lost) == (1, [])
    leader.ranks[1].saves_begun(1)
    leader.ranks[1].saves_done(1)
    leader.wait_for(lambda: len(leader.saved) == 2)


def test_a_rank_that_went_past_a_pass_gives_it_back(leader):
    """Its forward raised, and the other's did not."""
    leader.copies.plan(1, [], [block(0), block(1)])
    leader.ranks[0].saves_begun(1)
    leader.ranks[0].saves_done(1)
    leader.ranks[1].saves_begun(2)
    leader.copies.expire()
    assert [each.shard.rank for each in leader.lost] == [1]


def test_what_a_late_rank_never_began_is_lost_when_the_engine_ends(leader):
    leader.copies.plan(1, [], [block(0), block(1)])
    leader.ranks[0].saves_begun(1)
    leader.ranks[0].saves_done(1)
    leader.copies.close(10)
    assert [each.shard.rank for each in leader.saved] == [0]
    assert [each.shard.rank for each in leader.lost] == [1]


def test_an_event_that_fails_leaves_its_slots_unused(leader):
    def fail():
        raise RuntimeError("the device is gone")

    leader.copies.plan(1, [slot(0)], [])
    leader.ranks[0].loads_begun(1)
    leader.ranks[0].loads_done(1, SimpleNamespace(synchronize=fail))
    assert leader.copies.wait(30)
    leader.copies.expire()
    assert leader.loaded == []
    leader.ranks[0].close(10)


def test_what_a_dead_rank_had_begun_is_given_back(leader, monkeypatch):
    monkeypatch.setattr(copies_module, "_ALIVE_S", 0.0)
    leader.copies.plan(1, [slot(0), slot(1)], [block(1)])
    for rank in leader.ranks:
        rank.loads_begun(1)
        rank.saves_begun(1)
    leader.ranks[0].loads_done(1)
    leader.copies.expire()
    assert (leader.loaded, leader.lost) == ([slot(0)], [])
    leader.gone.add(1)
    leader.wait_for(lambda: leader.loaded == [slot(0), slot(1)] and len(leader.lost) == 1)


def test_a_wait_ends_when_another_rank_is_done(leader):
    leader.copies.plan(1, [slot(1)], [])
    leader.ranks[1].loads_begun(1)
    waiting = threading.Thread(target=lambda: leader.note(leader.saved, [leader.copies.wait(30)]))
    waiting.start()
    leader.ranks[1].loads_done(1)
    waiting.join()
    assert leader.saved == [True]
    assert leader.loaded == [slot(1)]


def test_nothing_outstanding_starts_no_thread(leader):
    leader.copies.plan(1, [], [])
    leader.copies.plan(2, [slot(0)], [])
    assert leader.copies._thread is None


@given(st.lists(st.tuples(st.sampled_from(["skip", "begin", "end", "fail"]), st.integers(1, 3)), max_size=60))
def test_a_ring_tells_a_step_from_its_neighbours_and_from_older_ones(steps):
    table = Arena.alone(PAGES, 64 * 4096)
    table = table.geometry.ranks(table.buffer)[1]
    at, expected = 0, {}
    for what, by in steps:
        at += by
        expected[at] = Progress.UNTOUCHED
        if what != "skip":
            table.begin(Kind.SAVES, at)
            expected[at] = Progress.BEGUN
            assert table.latest(Kind.SAVES) == at
        if what in ("end", "fail"):
            table.end(Kind.SAVES, at, failed=what == "fail")
            expected[at] = Progress.DONE if what == "end" else Progress.FAILED
    assert {step: table.progress(Kind.SAVES, step) for step in expected} == expected
    assert all(table.progress(Kind.LOADS, step) is Progress.UNTOUCHED for step in expected)
    assert all(table.progress(Kind.SAVES, step + RING) is Progress.UNTOUCHED for step in expected)


def test_a_worker_refuses_a_slot_that_was_given_away():
    arena = Arena.alone(PAGES, 64 * 4096)
    worker = WorkerArena(arena.file, arena.geometry, 1)
    old = arena.allocate(Shard(0, 1))
    assert worker.extent(*old) == arena.extent(old)
    arena.abandon(old)
    assert arena.allocate(Shard(0, 1)).number == old.number
    with pytest.raises(StaleSlot, match="generation 2, the pass names 1"):
        worker.extent(*old)
    new = arena.slot(old.shard, old.number)
    other = arena.allocate(old.shard)
    both = [new.number, other.number]
    assert worker.starts(old.shard, both, [2, 1]) == ([arena.extent(slot)[0] for slot in (new, other)], 4096)
    with pytest.raises(StaleSlot, match="generation 2, the pass names 1"):
        worker.starts(old.shard, both, [1, 1])


def test_a_tickets_state_is_seen_by_every_rank_until_it_is_forgotten():
    arena = Arena.alone(PAGES, 64 * 4096)
    table = arena.geometry.parked(arena.buffer)
    ranks = [WorkerArena(arena.file, arena.geometry, rank) for rank in range(WORLD)]
    first, second = table.open(), table.open()
    table.set(first, Parked.STAGED)
    assert [rank.parked(first) for rank in ranks] == [Parked.STAGED] * 2
    assert [rank.parked(second) for rank in ranks] == [Parked.PENDING] * 2
    numbers = [table.open() for _ in range(TICKETS - 1)]
    assert None not in numbers
    assert table.open() is None  # all but the staged one's place are pending, and that went to the last
    assert ranks[1].parked(first) is Parked.FORGOTTEN
    assert ranks[1].parked(second) is Parked.PENDING

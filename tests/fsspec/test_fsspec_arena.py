from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tracekv_fsspec.arena import Arena, ArenaTooSmall, StaleSlot
from tracekv_fsspec.index import Shard
from tracekv_fsspec.worker_arena import WorkerArena

ONE, TWO = Shard(0, 0), Shard(1, 0)
SLOTS = 4


def arena(slots=SLOTS):
    return Arena.alone({ONE: 100, TWO: 5000}, slots * (4096 + 8192))


def fill(memory, shard, key):
    slot = memory.allocate(shard)
    memory.view(slot)[:16] = key
    return memory.commit(slot, key)


def test_an_arena_without_room_for_a_block_is_refused_by_the_settings_name():
    with pytest.raises(ArenaTooSmall, match="TRACEKV_FSSPEC__ARENA_BYTES"):
        Arena.alone({ONE: 100, TWO: 5000}, 12287)


def test_slots_are_aligned_and_dont_overlap():
    memory = arena()
    extents = sorted(memory.extent(memory.allocate(shard)) for shard in (ONE, TWO) for _ in range(SLOTS))
    assert all(start % 4096 == 0 for start, _ in extents)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(extents))
    assert extents[-1][1] == len(memory.buffer)


def test_the_block_used_least_recently_goes_first():
    memory = arena(2)
    first, second = (fill(memory, ONE, bytes([n]) * 16) for n in range(2))
    memory.unpin_each([first, second])
    memory.unpin_each([memory.pin(ONE, bytes(16))])
    fill(memory, ONE, b"x" * 16)
    assert memory.holds(ONE, bytes(16))
    assert not memory.holds(ONE, b"\1" * 16)


def test_pinned_blocks_are_never_evicted():
    memory = arena(2)
    for n in range(2):
        fill(memory, ONE, bytes([n]) * 16)
    assert memory.allocate(ONE) is None
    assert memory.allocate(TWO) is not None


def test_a_slot_of_an_older_generation_is_refused():
    memory = arena(1)
    old = fill(memory, ONE, b"a" * 16)
    memory.unpin_each([old])
    fill(memory, ONE, b"b" * 16)
    for use in (memory.view, memory.extent, memory.abandon, lambda slot: memory.unpin_each([slot])):
        with pytest.raises(StaleSlot):
            use(old)


def test_a_key_that_was_staged_meanwhile_keeps_its_slot():
    memory = arena()
    late = memory.allocate(ONE)
    holder = fill(memory, ONE, b"a" * 16)
    assert memory.commit(late, b"a" * 16) == holder
    memory.unpin_each([holder, holder])
    with pytest.raises(StaleSlot):
        memory.unpin_each([holder])
    assert memory.free_slots(ONE) == SLOTS


def test_pin_each_tells_which_keys_are_missing():
    memory = arena()
    slot = fill(memory, ONE, b"a" * 16)
    assert memory.pin_each(ONE, [b"b" * 16, b"a" * 16]) == [None, slot]


def test_pin_whole_pins_all_keys_or_none():
    memory = arena()
    slots = [fill(memory, ONE, key) for key in (b"a" * 16, b"b" * 16)]
    memory.unpin_each(slots)
    assert memory.pin_whole(ONE, [b"a" * 16, b"c" * 16]) is None
    assert memory.free_slots(ONE) == SLOTS
    assert memory.pin_whole(ONE, [b"a" * 16, b"b" * 16]) == [slot.number for slot in slots]
    assert memory.free_slots(ONE) == SLOTS - 2


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a plain model: which key is in which slot with which bytes, and how often it is pinned."""

    filling = Bundle("filling")
    pins = Bundle("pins")

    def __init__(self):
        super().__init__()
        self.memory = arena()
        self.worker = WorkerArena(self.memory.file, self.memory.geometry, 0)
        self.seen = set()
        self.filling_count = 0
        self.pinned = {}

    @rule(target=filling)
    def allocate(self):
        slot = self.memory.allocate(ONE)
        held = len({slot for slot, count in self.pinned.items() if count})
        assert (slot is None) == (self.filling_count + held == SLOTS)
        self.filling_count += slot is not None
        self.seen |= {slot} - {None}
        return slot

    @rule(target=pins, slot=consumes(filling), name=st.integers(0, 5))
    def commit(self, slot, name):
        if slot is None:
            return None
        key = bytes([name]) * 16
        self.memory.view(slot)[:16] = key
        held = self.memory.commit(slot, key)
        self.filling_count -= 1
        self.pinned[held] = self.pinned.get(held, 0) + 1
        return held

    @rule(slot=consumes(filling))
    def abandon(self, slot):
        if slot is not None:
            self.memory.abandon(slot)
            self.filling_count -= 1

    @rule(target=pins, name=st.integers(0, 5))
    def pin(self, name):
        key = bytes([name]) * 16
        was_there = self.memory.holds(ONE, key)
        slot = self.memory.pin(ONE, key)
        assert (slot is not None) == was_there
        if slot is not None:
            assert bytes(self.memory.view(slot)[:16]) == key
            self.pinned[slot] = self.pinned.get(slot, 0) + 1
        return slot

    @rule(slot=consumes(pins))
    def unpin(self, slot):
        if slot is not None:
            self.memory.unpin_each([slot])
            self.pinned[slot] -= 1

    @invariant()
    def every_pinned_slot_is_still_its_own(self):
        for slot, count in self.pinned.items():
            if count:
                self.memory.view(slot)
        held = len({slot for slot, count in self.pinned.items() if count})
        assert self.memory.free_slots(ONE) == SLOTS - held - self.filling_count

    @invariant()
    def a_worker_sees_the_same_and_refuses_the_same(self):
        for slot in self.seen:
            answers = []
            for extent in (lambda slot: self.memory.extent(slot), lambda slot: self.worker.extent(*slot)):
                try:
                    answers.append(extent(slot))
                except StaleSlot:
                    answers.append(None)
            assert answers[0] == answers[1]


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40)

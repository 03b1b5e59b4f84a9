"""What is staged before it is asked for: in which order, how much of it, and what becomes of it."""

from __future__ import annotations

import threading
import time
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.store.node import FULL, NAMESPACE, keys
from tracekv.journal.records import Prefetch
from tracekv.journal.vocabulary import PrefetchFate
from tracekv_fsspec.index import Run, Segment, Stretch
from tracekv_fsspec.keys import KeyChain, partial_keys
from tracekv_fsspec.manifest import Manifest
from tracekv_fsspec.read_queue import Batch, Piece, Priority, ReadQueue
from tracekv_fsspec.reader import READERS

WAIT_S = 30
TOKENS = 32


class Held:
    """A node whose readers are all busy until they are let go, so that what is asked for stays queued."""

    def __init__(self, node, faulty):
        self.may_read = threading.Event()
        begun = threading.Semaphore(0)

        def before(operation, path):
            if operation == "read" and path.endswith(".seg"):
                begun.release()
                self.may_read.wait(WAIT_S)

        faulty.before = staticmethod(before)
        self.node = node
        self.reader = node.stager.reader
        self.busy = [self.reader.stage(keys(40)[number : number + 1], number) for number in range(READERS)]
        for _ in self.busy:
            assert begun.acquire(timeout=WAIT_S)

    def let_go(self):
        self.may_read.set()
        for ticket in self.busy:
            self.reader.wait(ticket, WAIT_S)
            assert self.reader.take(ticket) == (1, None)


@pytest.fixture
def held(node, faulty):
    node("faulty://kv").save(keys(40))
    made = Held(node("faulty://kv"), faulty)
    yield made
    made.may_read.set()


def fates(records):
    return {(record.fate, record.blocks, record.request_id) for record in records.of(Prefetch)}


def staged(node, wanted):
    return [node.stager.arena.holds(FULL, key) for key in wanted]


def hint(node, wanted):
    made = node.stager.prefetcher.hint(wanted)
    node.stager.prefetcher.wait(made, WAIT_S, made.begun + WAIT_S)
    return made


def test_a_hinted_prompt_is_staged_without_a_query(node):
    node().save(keys(6))
    reader = node()
    hint(reader, [*keys(6), *keys(3, seed=1)])
    assert staged(reader, keys(6)) == [True] * 6
    assert reader.stager.arena.free_slots(FULL) == reader.stager.arena.slots_per_shard


def test_a_hint_finds_what_another_engine_commits_before_the_next_refresh(node):
    reader = node(refresh_ms=3_600_000)
    made = reader.stager.prefetcher.hint(keys(4))
    assert made.looked.wait(WAIT_S)
    arrived = threading.Event()
    commit_run = reader.stager.arena.commit_run

    def watched(shard, numbers, committed):
        held = commit_run(shard, numbers, committed)
        arrived.set()
        return held

    reader.stager.arena.commit_run = watched
    node().save(keys(4))
    assert arrived.wait(WAIT_S)
    reader.stager.prefetcher.wait(made, WAIT_S, made.begun + WAIT_S)
    assert staged(reader, keys(4)) == [True] * 4


def test_a_hint_takes_no_more_than_half_of_the_arena(node):
    node().save(keys(12))
    reader = node(arena_bytes=8 * 4096)
    hint(reader, keys(12))
    assert staged(reader, keys(12)) == [True] * 4 + [False] * 8


def test_a_hashed_prompt_is_handed_to_its_query_once(node):
    here = node()
    tokens = array("I", range(5 * TOKENS))
    prompt = [*tokens, 7]
    here.stager.prefetcher.hint_prompt(9, array("I", tokens), len(prompt), NAMESPACE)
    assert here.stager.prefetcher._of_request[9].started.wait(WAIT_S)
    chain, queried = here.stager.prefetcher.take_chain(9, NAMESPACE, prompt, 5)
    expected = KeyChain(NAMESPACE, TOKENS)
    expected.extend(tokens)
    assert chain.keys == expected.keys
    assert queried == tokens
    assert here.stager.prefetcher.take_chain(9, NAMESPACE, prompt, 5) is None


@pytest.mark.parametrize(
    ("namespace", "change", "blocks"),
    [
        (b"x" * 32, lambda prompt: prompt, 5),
        (NAMESPACE, lambda prompt: prompt[:-1], 5),
        (NAMESPACE, lambda prompt: [prompt[0] + 1, *prompt[1:]], 5),
        (NAMESPACE, lambda prompt: [*prompt[:-2], prompt[-2] + 1, prompt[-1]], 5),
        (NAMESPACE, lambda prompt: prompt, 4),
    ],
    ids=["namespace", "length", "a sampled token", "the last block", "blocks"],
)
def test_the_chain_of_another_prompt_is_not_handed_over(node, namespace, change, blocks):
    here = node()
    prompt = list(range(5 * TOKENS + 1))
    here.stager.prefetcher.hint_prompt(9, array("I", prompt[:-1]), len(prompt), NAMESPACE)
    assert here.stager.prefetcher._of_request[9].started.wait(WAIT_S)
    assert here.stager.prefetcher.take_chain(9, namespace, change(prompt), blocks) is None


def test_what_only_an_ended_request_wanted_is_not_read(held):
    ticket = held.reader.stage(keys(40)[10:], 10, request_id=2)
    assert held.reader.take(ticket)[0] == 0
    held.node.stager.prefetcher.asked(ticket)
    held.node.stager.prefetcher.forget(2)
    assert ticket.outstanding == 0
    held.let_go()
    assert not any(staged(held.node, keys(40)[10:]))
    assert held.node.stager.arena.free_slots(FULL) == held.node.stager.arena.slots_per_shard - READERS


def test_what_another_request_wants_too_is_read(held):
    mine = held.reader.stage(keys(40)[10:20], 10, request_id=2)
    others = held.reader.stage(keys(40)[10:14], 10, request_id=3)
    assert held.reader.cancel(mine) == 0  # it is one piece
    held.let_go()
    held.reader.wait(others, WAIT_S)
    assert held.reader.take(others) == (4, None)


def test_a_block_that_was_there_before_it_was_asked_for_was_useful(node, records):
    node().save(keys(3))
    reader = node()
    hint(reader, keys(3))
    ticket = reader.stager.reader.stage(keys(3), 0, request_id=5)
    assert reader.stager.reader.take(ticket) == (3, None)
    reader.stager.close()
    assert fates(records) == {(PrefetchFate.USEFUL, 3, 5)}
    (told,) = records.of(Prefetch)
    assert told.lead_ns > 0
    assert told.nbytes == 3 * 4096


def test_a_block_that_came_after_the_answer_was_late(held, records):
    ticket = held.reader.stage(keys(40)[10:13], 10, request_id=5)
    assert held.reader.take(ticket)[0] == 0
    held.let_go()
    held.reader.wait_done(ticket, WAIT_S)
    held.node.stager.close()
    assert (PrefetchFate.LATE, 3, 5) in fates(records)


def test_a_block_that_nobody_asked_for_was_wasted_when_it_goes(node, records):
    node().save([*keys(4), *keys(4, seed=1)])
    reader = node(arena_bytes=8 * 4096)
    hint(reader, keys(4))
    hint(reader, keys(4, seed=1))
    for seed in (2, 3):
        reader.save(keys(3, seed=seed))
    reader.stager.close()
    assert {fate for fate, _, _ in fates(records)} == {PrefetchFate.WASTED}
    assert sum(record.blocks for record in records.of(Prefetch)) == 8


def test_an_ended_chain_is_completed_for_its_next_turn(node):
    node().save(keys(5))
    reader = node()
    done = threading.Event()
    leave = reader.stager.reader.leave

    def watched(ticket):
        reader.stager.reader.when_done(ticket, done.set)
        leave(ticket)

    reader.stager.reader.leave = watched
    reader.stager.prefetcher.ended(1, keys(5), read_ahead=True)
    assert done.wait(WAIT_S)
    assert staged(reader, keys(5)) == [True] * 5


class QueueMachine(RuleBasedStateMachine):
    """The queue against a plain list: what comes next, what has room, and what is taken back."""

    MOST = 10

    def __init__(self):
        super().__init__()
        self.queue = ReadQueue(self.MOST * 4096)
        self.model = []
        self.made = 0
        manifest = Manifest(bytes(32), bytes(16), 0, 1, [], [])
        self.run = Run(Segment("s", 0, 0, manifest), FULL, [])

    def batch(self, priority, pieces):
        batch = Batch(self.run.segment, None, priority)
        for _ in range(pieces):
            self.made += 1
            batch.add(Piece(FULL, [self.made], Stretch(0, self.run, self.made * 4096, 4096, [b""])))
        return batch

    @rule(priority=st.sampled_from(Priority), pieces=st.integers(1, 4))
    def put(self, priority, pieces):
        batch = self.batch(priority, pieces)
        dropped = self.queue.put(batch)
        if dropped is None:
            assert priority is not Priority.WAITED
            kept = sum(each.nbytes for each in self.model if each.priority <= priority)
            assert self.model
            assert kept + batch.nbytes > self.MOST * 4096
            return
        for each in dropped:
            assert each.priority > priority
            assert not each.is_queued
            # The newest of the least urgent went first.
            later = [other for other in self.model if other.priority > each.priority]
            assert not [other for other in later if other not in dropped]
            self.model.remove(each)
        self.model.append(batch)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 100), priority=st.sampled_from(Priority))
    def hurry(self, number, priority):
        batch = self.model[number % len(self.model)]
        before = batch.priority
        self.queue.hurry(batch, priority)
        assert batch.priority == min(before, priority)
        if priority < before:  # behind those that were as urgent already
            self.model.remove(batch)
            self.model.append(batch)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 100))
    def take_back_a_piece(self, number):
        batch = self.model[number % len(self.model)]
        self.queue.shrink(batch, batch.pieces[0])
        if not batch.pieces:
            self.model.remove(batch)

    @rule()
    def pop(self):
        batch = self.queue.pop()
        expected = min(self.model, key=lambda each: each.priority, default=None)
        assert batch is expected
        if batch is not None:
            self.model.remove(batch)

    @invariant()
    def bytes_are_counted_and_bounded(self):
        assert self.queue.nbytes == sum(each.nbytes for each in self.model)
        waited = sum(each.nbytes for each in self.model if each.priority is Priority.WAITED)
        largest = max((each.nbytes for each in self.model), default=0)
        assert self.queue.nbytes <= max(self.MOST * 4096, waited + self.MOST * 4096, largest)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_first_offer_of_another_engines_commit_tells_how_old_it_is(node):
    writer, reader = node(), node()
    writer.save(keys(3))
    reader.stager.catalog.refresh()
    committed = reader.stager.index.news_of(FULL, keys(3)[2])
    assert abs(time.time_ns() - committed) < 60 * 10**9
    assert reader.stager.index.news_of(FULL, keys(3)[2]) == 0
    assert writer.stager.index.news_of(FULL, keys(3)[2]) == 0  # its own
    assert node().stager.index.news_of(FULL, keys(3)[2]) == 0  # older than the engine


def test_the_longest_stored_tail_of_a_hinted_prompt_is_staged_with_it(node):
    prompt = array("I", range(2 * TOKENS + 7))
    chain = KeyChain(NAMESPACE, TOKENS)
    chain.extend(prompt)
    tails = partial_keys(chain.link_before(2), chain.tail)
    node().save([*chain.keys, tails[2], tails[4]])
    reader = node()
    prefetcher = reader.stager.prefetcher
    prefetcher.hint_prompt(9, prompt[: 2 * TOKENS], len(prompt), NAMESPACE, prompt[2 * TOKENS :])
    made = prefetcher._of_request[9]
    prefetcher.wait(made, WAIT_S, made.begun + WAIT_S)
    assert staged(reader, chain.keys) == [True, True]
    assert staged(reader, tails) == [False] * 4 + [True] + [False] * 2

"""What can be had of a prompt, and how far an offer of it reaches: against a plain search over every end."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, as_uint32, partial_keys
from tracekv_fsspec.lookup import Lookup, Prompt, blocks_passed

B = 4
FULL, SLIDING, NARROW = Shard(0, 0), Shard(1, 0), Shard(2, 0)
WINDOWS = {FULL: None, SLIDING: 2 * B + 1, NARROW: B - 1}


class Held:
    """Which blocks each shard has."""

    def __init__(self, windows=WINDOWS, partial=False):
        self.keys = {shard: set() for shard in windows}
        self.lookup = Lookup(windows, self.prefix, self.has, with_partial_blocks=partial)

    def add(self, keys, *shards):
        for shard in shards or self.keys:
            self.keys[shard].update(keys)

    def has(self, shard, key):
        return key in self.keys[shard]

    def prefix(self, shard, keys, start):
        while start < len(keys) and keys[start] in self.keys[shard]:
            start += 1
        return start


def prompt_of(tokens, computed=0, most=None):
    chain = KeyChain(bytes(32), B)
    known = as_uint32(tokens)
    most = len(tokens) - 1 if most is None else most
    chain.extend(known[: len(tokens) // B * B])
    return Prompt(chain, known, computed, most)


def strict(held, prompt):
    return held.lookup.strict(prompt, held.lookup.ends(prompt))


def window(held, prompt, chunk_end=10_000):
    return held.lookup.window(prompt, held.lookup.ends(prompt), chunk_end)


@pytest.mark.parametrize(
    ("history", "window_tokens", "passed"),
    [(0, 5, 0), (B + 3, 5, 0), (B + 4, 5, 1), (2 * B + 4, 5, 2), (100, 100, 0), (102, 100, 0), (103, 100, 1)],
)
def test_a_window_passes_a_block_when_no_later_token_can_see_it(history, window_tokens, passed):
    assert blocks_passed(history, window_tokens, B) == passed
    sees = range(max(0, history - window_tokens + 1), history + 1)  # what the next token looks at, itself included
    assert passed == sees[0] // B


def needs(windows, start, end_token):
    """Blocks that an offer up to ``end_token`` has to have, by the contract's words."""
    end = -(-end_token // B)
    return {
        shard: set(range(max(start, 0 if width is None else blocks_passed(end_token, width, B)), end))
        for shard, width in windows.items()
    }


@given(st.data(), st.integers(0, 6), st.integers(1, 60))
def test_the_longest_servable_run_is_found(data, computed_blocks, chunk_end):
    tokens = range(12 * B + 1)
    prompt = prompt_of(tokens, computed_blocks * B)
    held = Held()
    for shard in WINDOWS:
        held.add([key for key in prompt.chain.keys if data.draw(st.sampled_from([True, True, True, False]))], shard)
    ends = held.lookup.ends(prompt)
    shortest = min(ends.values())
    best = None
    for end in range(shortest + 1, len(prompt.chain.keys) + 1):
        wanted = needs(WINDOWS, computed_blocks, end * B)
        is_held = all(held.has(shard, prompt.chain.keys[n]) for shard, blocks in wanted.items() for n in blocks)
        if is_held and end * B < chunk_end:
            best = end
    run = held.lookup.window(prompt, ends, chunk_end)
    assert (run.end_token if run else None) == (best * B if best else None)
    if run:
        asked = {shard: {run.start + n for n in range(run.skipped.get(shard, 0), len(run.keys))} for shard in WINDOWS}
        assert asked == needs(WINDOWS, computed_blocks, run.end_token)
    found = held.lookup.strict(prompt, ends)
    assert (found.end_token if found else computed_blocks * B) == max(shortest, computed_blocks) * B


def test_an_offer_that_reaches_the_end_of_its_chunk_is_strict():
    """There the runtime may honour less (contract-v2.md 1.3, step 4)."""
    prompt, held = prompt_of(range(10 * B + 1)), Held()
    held.add(prompt.chain.keys, FULL)
    held.add(prompt.chain.keys[6:], SLIDING, NARROW)
    assert window(held, prompt).end_token == 10 * B
    assert window(held, prompt, 10 * B + 1).end_token == 10 * B
    assert window(held, prompt, 10 * B).end_token == 9 * B
    assert window(held, prompt, 6 * B) is None
    assert strict(held, prompt) is None


def test_groups_without_a_window_need_all_of_it():
    prompt, held = prompt_of(range(10 * B + 1)), Held()
    held.add([key for n, key in enumerate(prompt.chain.keys) if n != 2], FULL)
    held.add(prompt.chain.keys, SLIDING, NARROW)
    assert window(held, prompt) is None
    assert strict(held, prompt).end_token == 2 * B


def tail_of(tokens, count):
    chain = KeyChain(bytes(32), B)
    chain.extend(as_uint32(tokens)[:count])
    return partial_keys(chain.link_before(len(chain.keys)), chain.tail)[-1]


def test_the_longest_stored_tail_is_part_of_the_run():
    tokens = list(range(2 * B + 3))
    prompt, held = prompt_of(tokens), Held(partial=True)
    held.add(prompt.chain.keys)
    assert strict(held, prompt).end_token == 2 * B
    held.add([tail_of(tokens, 2 * B + 1)])
    run = strict(held, prompt)
    assert (run.end_token, run.last_tokens, len(run.keys)) == (2 * B + 1, 1, 3)
    held.add([tail_of(tokens, 2 * B + 3)])
    run = strict(held, prompt)
    assert (run.end_token, run.last_tokens) == (2 * B + 2, 3)  # one token is left to compute


def test_a_tail_that_one_group_lacks_is_none():
    tokens = list(range(B + 2))
    prompt, held = prompt_of(tokens), Held(partial=True)
    held.add([*prompt.chain.keys, tail_of(tokens, B + 1)])
    assert strict(held, prompt).end_token == B + 1
    held.keys[SLIDING].discard(tail_of(tokens, B + 1))
    assert strict(held, prompt).end_token == B


def test_tails_are_not_looked_for_where_they_are_off():
    tokens = list(range(B + 2))
    prompt, held = prompt_of(tokens), Held()
    held.add([*prompt.chain.keys, tail_of(tokens, B + 1)])
    assert strict(held, prompt).end_token == B


def test_a_device_hit_inside_a_block_is_continued_from_its_copy():
    tokens = list(range(3 * B))
    prompt, held = prompt_of(tokens, computed=B + 1), Held(partial=True)
    held.add(prompt.chain.keys[:2])
    run = strict(held, prompt)
    assert (run.start, run.keys, run.end_token) == (1, prompt.chain.keys[1:2], 2 * B)
    held = Held(partial=True)
    held.add([tail_of(tokens, B + 1)])
    assert strict(held, prompt) is None  # not more than the device has
    held.add([tail_of(tokens, B + 2)])
    assert strict(held, prompt).end_token == B + 2


def test_a_whole_prompt_of_full_blocks_is_offered_but_for_its_last_token():
    prompt, held = prompt_of(range(2 * B)), Held(partial=True)
    held.add(prompt.chain.keys)
    run = strict(held, prompt)
    assert (run.end_token, run.last_tokens) == (2 * B - 1, B)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3 * B), st.integers(1, 3 * B))
def test_no_incomplete_block_has_the_key_of_another_block(tokens, size):
    known = as_uint32(tokens)
    chain = KeyChain(bytes(32), size)
    chain.extend(known)
    keys = list(chain.keys)
    for ordinal in range(len(tokens) // size + 1):
        keys += partial_keys(chain.link_before(ordinal), known[ordinal * size : (ordinal + 1) * size])
    assert len(set(keys)) == len(keys)


def test_a_tails_key_is_that_of_its_tokens_and_count_alone():
    before = bytes(16)
    one, two, three = partial_keys(before, array("I", [1, 2, 3]))
    assert partial_keys(before, array("I", [1, 2, 9]))[:2] == [one, two]
    assert partial_keys(before, array("I", [1, 2, 9]))[2] != three
    assert partial_keys(bytes([1]) * 16, array("I", [1]))[0] != one

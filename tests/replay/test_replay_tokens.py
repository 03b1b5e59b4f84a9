"""Pseudo tokens keep the equalities of blocks that the digests tell, and each request's own consistency."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from tracekv.capture.replay import ReplayRecording
from tracekv.journal.records import ReplayEnd, ReplayPrompt
from tracekv.testing.replay_requests import make_request
from tracekv.testing.replay_tokens import PseudoTokens

BLOCK = 4


def recorded(*requests):
    """``(prompt record, end record)`` of requests given as ``(prompt tokens, generated tokens or None)``."""
    written = []
    recording = ReplayRecording(SimpleNamespace(journal=SimpleNamespace(write=written.append)))
    recording._block_tokens = BLOCK
    pairs = []
    for number, (prompt, generated) in enumerate(requests):
        tokens = list(prompt)
        request = SimpleNamespace(request_id=number, prompt_len=len(prompt), get_tokens=lambda beam, t=tokens: t)
        recording.queried(request)
        if generated is not None:
            tokens += generated
            recording.finished(request, [], False)
        prompts = [each for each in written if isinstance(each, ReplayPrompt) and each.request_id == number]
        ends = [each for each in written if isinstance(each, ReplayEnd) and each.request_id == number]
        pairs.append((prompts[0], ends[0] if ends else None))
    return pairs


def expanded(pairs, seed="seed"):
    source = PseudoTokens(seed)
    for pair in pairs:
        source.learn(*pair)
    return [source.sequence(*pair) for pair in pairs]


def blocks(tokens):
    return [tuple(tokens[at : at + BLOCK]) for at in range(0, len(tokens) - BLOCK + 1, BLOCK)]


few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(few_tokens, st.none() | st.lists(st.integers(0, 1), max_size=9)), min_size=1, max_size=5))
def test_blocks_are_equal_where_they_were_and_nowhere_else(requests):
    real = [[*prompt, *(generated or [])] for prompt, generated in requests]
    pseudo = expanded(recorded(*requests))
    assert [len(tokens) for tokens in pseudo] == [len(tokens) for tokens in real]
    pairs = [
        pair
        for theirs, ours in zip(real, pseudo, strict=True)
        for pair in zip(blocks(theirs), blocks(ours), strict=True)
    ]
    forth = dict(pairs)
    back = {ours: theirs for theirs, ours in pairs}
    assert all(forth[theirs] == ours and back[ours] == theirs for theirs, ours in pairs)


def test_a_prompt_is_the_beginning_of_what_finishes_and_of_the_next_turn():
    first = ([1, 2, 3, 4, 5, 6], [7, 8, 9])
    next_turn = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1], None)
    same_prompt = ([1, 2, 3, 4, 5, 6], None)
    mine, turn, same = expanded(recorded(first, next_turn, same_prompt))
    assert turn[:8] == mine[:8]
    assert same == mine[:6]


def test_another_seed_gives_other_tokens():
    pairs = recorded(([1, 2, 3, 4], None))
    assert expanded(pairs, "one") == expanded(pairs, "one") != expanded(pairs, "two")


def test_a_request_that_never_finished_goes_on_with_tokens_of_its_own():
    (pair,) = recorded(([1, 2, 3, 4, 5], None))
    source = PseudoTokens("seed")
    live = make_request(0, *pair, source)
    assert len(live.report_more(5, source)) == 5
    more = live.report_more(3, source)
    assert len(more) == 3
    assert live.request.get_tokens(0)[5:] == more
    assert all(0 <= token < 1 << 31 for token in live.request.get_tokens(0))

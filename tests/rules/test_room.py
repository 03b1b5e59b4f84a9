"""Requests that outgrow their pages are named in the pass in which they do, though a pass looks at few of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tracekv.rules import Checker
from tracekv.testing.corpus.tape import BLOCK, Tape

REQUESTS = (1, 2, 3)
#: What a pass does with a request: nothing, a token with the page it needs or (rarely) without, or a draft of three tokens.
MOVES = st.sampled_from(["out", "one", "one", "one", "one", "short", "draft"])


class Engine:
    """Requests that generate, and what each one's pages hold; ``first`` is the pass in which each first reached past that.

    Of one that does so in its first pass after others nothing is known: what it was given meanwhile may not have been told.
    """

    def __init__(self) -> None:
        self.tape = Tape(slots=1 << 16)
        self.next_page = 0
        self.held, self.at, self.first, self.unknown, self.ran = {}, {}, {}, set(), {REQUESTS[-1]}
        for request in REQUESTS:
            prompt = BLOCK * request + 20  # another room for each
            blocks = -(-prompt // BLOCK)
            self.tape.prefill(request, prompt, [self.pages(blocks)])
            self.held[request], self.at[request] = blocks * BLOCK, (prompt, prompt)

    def pages(self, count: int) -> list[int]:
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    def run(self, moves: tuple[str, ...], accepted: int) -> None:
        cached = []
        for request, move in zip(REQUESTS, moves, strict=True):
            if move == "out":
                continue
            low, high = self.at[request]
            position, tokens = min(low + accepted, high), 3 if move == "draft" else 1
            end = position + tokens
            more = [] if move == "short" or end <= self.held[request] else self.pages(1)
            self.held[request] += len(more) * BLOCK
            self.at[request] = (position + 1, end)
            cached.append((request, position, tokens, [more]))
            if end > self.held[request] and request not in self.first:
                if request not in self.ran:
                    self.unknown.add(request)
                elif request not in self.unknown:
                    self.first[request] = self.tape.step + 1
        self.ran = {each[0] for each in cached}
        self.tape.build(cached=cached)


def found(tape):
    checker = Checker()
    for source, record in tape.records:
        checker.feed(source, record)
    assert not checker.removed
    return {each.request: each.step for each in checker.findings if each.rule == "S11b"}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.tuples(MOVES, MOVES, MOVES), st.integers(0, 2), st.integers(1, 25)), max_size=12))
def test_every_request_is_named_in_the_pass_in_which_it_first_lacks_a_page(passes):
    engine = Engine()
    for moves, accepted, times in passes:
        for _ in range(times):
            engine.run(moves, accepted)
    assert found(engine.tape) == engine.first


def test_a_request_that_was_out_when_its_pages_were_full_is_named_when_it_is_back():
    engine = Engine()
    for _ in range(BLOCK):
        engine.run(("one", "one", "one"), 0)
    for _ in range(BLOCK):
        engine.run(("one", "out", "one"), 0)
    assert found(engine.tape) == {}
    for _ in range(BLOCK):
        engine.run(("one", "short", "one"), 0)
    assert found(engine.tape) == engine.first
    assert list(engine.first) == [2]


def test_a_request_without_its_page_is_named_after_passes_with_drafts():
    engine = Engine()
    for _ in range(5):
        engine.run(("draft", "one", "one"), 0)
    for _ in range(BLOCK):
        engine.run(("one", "one", "short"), 0)
    assert found(engine.tape) == engine.first
    assert list(engine.first) == [3]

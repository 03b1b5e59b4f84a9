"""What ``tracekv.rules.plain`` lets pass is told to no rule that it speaks for, and to every other one."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.faults import played
from tracekv.bench.traffic import busy
from tracekv.journal.records import Lookup
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.rules import RULES, Checker, Rule
from tracekv.rules.plain import SPEAKS_FOR
from tracekv.testing.corpus import CLEAN, FAULTS, LIMITS
from tracekv.testing.corpus.tape import BLOCK, PAGE_BYTES, Tape


class Hears(Rule):
    """Hears of everything that may be spared, so that nothing is."""

    id = "X1"

    def on_query(self, event):
        """Any."""
        return ()

    on_lookup = on_astray = on_loaded = on_left = on_query


def judged(records, rules=RULES, limits=None):
    checker = Checker(rules=rules, limits=limits)
    for source, record in records:
        checker.feed(source, record)
    checker.close()
    assert not checker.removed
    return checker


def told(checker):
    return [(each.id, each.request, each.step, each.rank, each.numbers, each.caused_by) for each in checker.findings]


def listeners(event):
    return {rule.id for rule in RULES if hasattr(rule, f"on_{event}")}


@pytest.mark.parametrize("event", SPEAKS_FOR)
def test_every_rule_that_listens_to_an_event_which_may_be_spared_is_spoken_for(event):
    """If this fails: have the event's predicate in plain.py answer False wherever the new rule finds something, then list its id."""
    assert SPEAKS_FOR[event] == listeners(event)


def calls(rules, event):
    """How often ``on_<event>`` of a rule is called over a busy engine without faults."""
    heard = []

    class Counting(Rule):
        """Counts."""

        id = "X2"

    setattr(Counting, f"on_{event}", lambda self, what: heard.append(what) or ())
    assert judged(busy(300, decoding=8).records, (*rules, Counting)).findings == []
    return len(heard)


@pytest.mark.parametrize("event", SPEAKS_FOR)
def test_a_rule_that_is_not_spoken_for_is_told_every_one(event):
    """Eight requests at a time of two hundred tokens each: a dozen come, and half of them load and leave."""
    assert calls(RULES, event) >= 3


@pytest.mark.parametrize("event", SPEAKS_FOR)
def test_what_is_plain_is_not_told_to_rules_that_are_spoken_for(event, monkeypatch):
    monkeypatch.setitem(SPEAKS_FOR, event, SPEAKS_FOR[event] | {"X2"})
    assert calls(RULES, event) == 0


@pytest.mark.parametrize("name", [*FAULTS, *CLEAN])
def test_in_the_corpus_nothing_is_found_in_what_is_spared(name):
    records = played.records(name)
    assert told(judged(records, limits=LIMITS)) == told(judged(records, (*RULES, Hears), LIMITS))


# -- and in what no corpus has -------------------------------------------------------------------------------------------


class Life(NamedTuple):
    """A request of four blocks and a part, in which all goes well: two blocks are loaded, two computed and saved."""

    prompt: int = 140
    computed: int = 0
    offered: int = 64
    honoured: int = 64
    is_async: bool = False
    parked_ms: float = 1
    lookup: tuple[int, int, bool, bool] | None = (64, 64, False, False)
    chunk: int = 1024
    pages: tuple[int, ...] = (0, 1, 2, 3, 4)
    told_first: int = 5
    loads: tuple[int, ...] = (0, 1)
    load_bytes: int = PAGE_BYTES
    loads_at: str = "start"
    group: int = 0
    saves: tuple[tuple[int, ...], ...] = ((2, 3),)
    save_bytes: int = PAGE_BYTES
    saving_ms: float = 0
    keeps: bool = False
    after_end: bool = False
    is_returned: bool = True


SLOTS, STRANGE = 12, 11
TOKENS = st.sampled_from([0, 32, 96, 128, 33, 40, -32])
BYTES = st.sampled_from([PAGE_BYTES // 2, PAGE_BYTES + 1, 0])
#: Block ordinals, and behind these a page that isn't the request's, one past the pool, and none.
MOVED = st.sampled_from([
    (), (0,), (0, 1), (0, 1, 2), (1, 2), (2, 3), (3, 2), (4,), (3, 4), (2, 3, 4), (0, 1, 2, 3), (1, 0), (2, 2), (0, 1, 1),
    (0, -1), (-1,), (STRANGE,), (2, STRANGE), (SLOTS, 1),
])  # fmt: skip
#: What may be otherwise.
ODD = {
    "prompt": st.sampled_from([128, 100, 64, 33]),
    "computed": st.sampled_from([32, 40]),
    "offered": TOKENS,
    "honoured": TOKENS,
    "is_async": st.just(True),
    "parked_ms": st.just(100),
    "lookup": st.none() | st.tuples(TOKENS, st.sampled_from([0, 32, 96]), st.booleans(), st.booleans()),
    "chunk": st.sampled_from([96, 64, 32]),
    "pages": st.sampled_from([(4, 3, 2, 1, 0), (5, 6, 7, 8, 9), (0, 1, 2, 3, 3), (0, -1, 2, 3, 4), (0, SLOTS, 2, 3, 4), (0, 1)]),
    "told_first": st.sampled_from([2, 3]),
    "loads": MOVED,
    "load_bytes": BYTES,
    "loads_at": st.sampled_from(["forward", "end"]),
    "group": st.just(1),
    "saves": st.lists(MOVED, max_size=2).map(tuple),
    "save_bytes": BYTES,
    "saving_ms": st.just(5),
    "keeps": st.just(True),
    "after_end": st.just(True),
    "is_returned": st.just(False),
}  # fmt: skip
NOTHING_LOADED = Life(offered=0, honoured=0, lookup=None, saves=((0, 1, 2, 3),))
LIVES = (
    st.lists(st.sampled_from(sorted(ODD)), unique=True, max_size=4)
    .flatmap(lambda names: st.fixed_dictionaries({name: ODD[name] for name in names}))
    .map(lambda odd: Life(**odd))
)


def live(tape, request, life, ranks):
    """Play it: asked about, loaded, computed in chunks, saved, and ended."""
    pages, more = [list(life.pages[: life.told_first])], [list(life.pages[life.told_first :])]
    if life.lookup is not None:
        offered, stored, has_parts, is_bounded = life.lookup
        bound = {"group_tokens": [stored], "bounding": 0} if is_bounded else {}
        tape.lookup(request, life.prompt, life.computed, offered, stored=stored, **bound)
        source, record = tape.records.pop()
        assert isinstance(record, Lookup)
        tape.records.append((source, msgspec.structs.replace(record, has_partial_blocks=has_parts)))
    tape.query(request, life.prompt, life.computed, life.offered, is_async=life.is_async)
    tape.alloc(request, life.honoured, pages)
    if life.is_async:
        tape.build()
        load(tape, request, life)
        tape.after(life.parked_ms)
        for rank in range(ranks):
            tape.polled(rank, loading=[request], loaded=[request])
    at, loading = (life.computed + life.honoured, 0) if life.is_async else (life.computed, life.honoured)
    is_first = True
    while is_first or at < life.prompt:
        chunk = max(min(life.chunk, life.prompt - at - loading), 1)
        if is_first:
            tape.build([(request, at, chunk, life.prompt, pages)])
        else:
            tape.build(cached=[(request, at, chunk, more)])
            more = [[]]
        for rank in range(ranks):
            loads_at = life.loads_at if loading and not rank else None  # the other one reports nothing
            tape.bind(rank)
            if loads_at == "start":
                load(tape, request, life)
            tape.worker(Callback.START_LOAD_KV, rank)
            tape.after(1)
            if loads_at == "forward":
                load(tape, request, life)
            tape.worker(Callback.WAIT_FOR_SAVE, rank)
            if loads_at == "end":
                load(tape, request, life)
        at, loading, is_first = at + loading + chunk, 0, False
    save(tape, request, life)
    tape.finish(request, keeps=life.keeps, pages=[list(life.pages)])
    if life.after_end:
        save(tape, request, life)
    if life.keeps:
        for rank in range(ranks):
            tape.polled(rank, saving=[request], saved=[request] if life.is_returned else [])


def load(tape, request, life):
    move(tape, Direction.LOAD, request, life, life.loads, life.load_bytes)


def save(tape, request, life):
    for pages in life.saves:
        move(tape, Direction.SAVE, request, life, pages, life.save_bytes, life.saving_ms)


def move(tape, direction, request, life, pages, page_bytes, ms=0):
    """Told at once, though it may end later than what comes next."""
    ends = tape.now + int(ms * 1e6)
    slots = [life.pages[page] if 0 <= page < len(life.pages) else page for page in pages]
    if slots:
        tape.transfer(direction, request, slots, group=life.group, ended=ends, nbytes=page_bytes * len(slots))


@settings(max_examples=300, deadline=None)
@example([Life(offered=0, lookup=None, is_async=True)], 1)
@example([Life(is_async=True, parked_ms=100)], 1)
@example([NOTHING_LOADED._replace(chunk=96, pages=(0, 1, 2, 3, -1), told_first=3, saves=((3, 4),))], 1)
@example([NOTHING_LOADED._replace(chunk=64, saves=((0, 1), (4,)))], 1)
@given(st.lists(LIVES, min_size=1, max_size=4), st.sampled_from([1, 1, 2]))
def test_nothing_is_found_in_what_is_spared(lives, ranks):
    tape = Tape(ranks=ranks, slots=SLOTS)
    tape.prefill(98, 256, [[10]])  # what computing costs: 4 us a token
    for request, life in enumerate(lives, 1):
        live(tape, request, life, ranks)
    for position in range(10):  # until all of it has settled
        tape.decode(99, BLOCK + position)
    assert told(judged(tape.records)) == told(judged(tape.records, (*RULES, Hears)))

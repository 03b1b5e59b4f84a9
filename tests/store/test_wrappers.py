"""Each wrapper by itself, around a store that does what the test says."""

from __future__ import annotations

import contextlib
import threading

import pytest

from tracekv.journal.vocabulary import Operation, Outcome, Tier
from tracekv_fsspec.store import Deadlines, SlowDown, StoreError
from tracekv_fsspec.tally import tally
from tracekv_fsspec.wrappers.base import Wrapper
from tracekv_fsspec.wrappers.breaker import FAILURES, FIRST_COOL_OFF_S, LONGEST_COOL_OFF_S, Breaker
from tracekv_fsspec.wrappers.pacing import MOST, Paced
from tracekv_fsspec.wrappers.retry import Retrying


class Scripted:
    """Each call takes the next of ``answers``: an exception is raised, anything else returned; then all is well."""

    engine, tier, bucket, url = "scripted", Tier.REMOTE, None, "scripted://"
    is_create_atomic = lists_after = True

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    def _next(self, name, *arguments):
        self.calls.append((name, *arguments))
        answer = self.answers.pop(0) if self.answers else None
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, path, *parts, create_only):
        return self._next("put", path, parts, create_only)

    def read(self, path, ranges, into):
        return self._next("read", path, ranges, into)

    def sizes(self, paths):
        return self._next("sizes", paths)

    def list(self, prefix, *, after=""):
        return self._next("list", prefix, after)

    def delete(self, path):
        return self._next("delete", path)

    def close(self):
        self._next("close")


DOWN = StoreError(Outcome.UNAVAILABLE, "down")
LATE = StoreError(Outcome.TIMEOUT, "late")
GONE = StoreError(Outcome.MISSING, "gone")
BUSY = SlowDown("busy")


def read(store):
    return store.read("a", [], [])


@pytest.mark.parametrize(
    "wrap",
    [Wrapper, Paced, Breaker, lambda store: Retrying(store, Deadlines(1, 1))],
    ids=["none", "paced", "breaker", "retry"],
)
def test_a_wrapper_hands_everything_on(wrap):
    inner = Scripted(None, None, [5], ["entry"], None, None)
    store = wrap(inner)
    store.put("a", b"1", b"2", create_only=True)
    store.read("a", [(0, 1)], ["buffer"])
    assert store.sizes(["a"]) == [5]
    assert store.list("m/", after="m/1") == ["entry"]
    store.delete("a")
    store.close()
    assert inner.calls == [
        ("put", "a", (b"1", b"2"), True),
        ("read", "a", [(0, 1)], ["buffer"]),
        ("sizes", ["a"]),
        ("list", "m/", "m/1"),
        ("delete", "a"),
        ("close",),
    ]
    assert (store.engine, store.tier, store.bucket, store.url) == ("scripted", Tier.REMOTE, None, "scripted://")
    assert store.is_create_atomic
    assert store.lists_after


def test_what_fails_for_now_is_tried_again_and_counted():
    tally.reset()
    inner = Scripted(DOWN, LATE, BUSY, None)
    read(Retrying(inner, Deadlines(60, 60)))
    assert (len(inner.calls), tally.attempts) == (4, 4)
    assert tally.paced_ns > 0


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.UNAVAILABLE, Outcome.TIMEOUT}))
def test_what_fails_for_good_is_not(outcome):
    inner = Scripted(StoreError(outcome, "no"))
    with pytest.raises(StoreError):
        read(Retrying(inner, Deadlines(60, 60)))
    assert len(inner.calls) == 1


@pytest.mark.parametrize(("call", "read_s", "write_s"), [("read", 0.2, 60), ("put", 60, 0.2)])
def test_trying_ends_with_the_deadline_of_its_kind(call, read_s, write_s):
    inner = Scripted(*[DOWN] * 1000)
    store = Retrying(inner, Deadlines(read_s, write_s))
    with pytest.raises(StoreError, match="down"):
        store.put("a", b"", create_only=True) if call == "put" else read(store)
    assert 1 <= len(inner.calls) < 100


def test_closing_ends_what_waits_for_its_next_try():
    inner = Scripted(*[DOWN] * 1000)
    store = Retrying(inner, Deadlines(3600, 3600))
    inner.answers[0] = lambda: (store._closed.set(), DOWN)[1]
    with pytest.raises(StoreError, match="down"):
        read(store)
    assert len(inner.calls) == 1


def test_slow_down_halves_what_is_in_flight_and_good_answers_raise_it_again():
    store = Paced(Scripted(BUSY, BUSY, DOWN))
    for expected in (MOST // 2, MOST // 4):
        with pytest.raises(SlowDown):
            read(store)
        assert store.limit == expected
    with pytest.raises(StoreError):
        read(store)  # another error says nothing about pace
    assert store.limit == MOST // 4
    for _ in range(MOST // 4 + 1):
        read(store)
    assert store.limit == MOST // 4 + 1
    for _ in range(MOST * MOST):
        read(store)
    assert store.limit == MOST


def test_calls_that_were_in_flight_together_halve_it_once():
    inside, go = threading.Barrier(5), threading.Event()

    def busy():
        inside.wait()
        go.wait()
        return BUSY

    store = Paced(Scripted(*[busy] * 4))

    def call():
        with contextlib.suppress(SlowDown):
            read(store)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    inside.wait()
    go.set()
    for thread in threads:
        thread.join()
    assert store.limit == MOST // 2


def test_no_more_than_the_limit_is_in_flight_and_who_waits_too_long_is_slowed_down():
    entered, go = threading.Event(), threading.Event()

    def hold():
        entered.set()
        go.wait()

    store = Paced(Scripted(hold), most=1, patience_s=0.01)
    thread = threading.Thread(target=read, args=(store,))
    thread.start()
    entered.wait()
    tally.reset()
    with pytest.raises(SlowDown, match="no turn"):
        read(store)
    assert tally.paced_ns > 0
    go.set()
    thread.join()
    read(store)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def opened(clock, *then):
    inner = Scripted(*[DOWN, LATE] * (FAILURES // 2), *then)
    store = Breaker(inner, clock=clock)
    for _ in range(FAILURES):
        with pytest.raises(StoreError):
            read(store)
    return store, inner


def test_some_failures_in_a_row_open_it_and_then_nothing_is_asked(clock):
    store, inner = opened(clock)
    assert store.state == "open"
    with pytest.raises(StoreError, match="taken as down") as caught:
        read(store)
    assert caught.value.outcome is Outcome.UNAVAILABLE
    assert len(inner.calls) == FAILURES
    assert tally.breaker == "open"


def test_a_good_answer_between_them_keeps_it_closed(clock):
    store = Breaker(Scripted(*[DOWN] * (FAILURES - 1), None, *[DOWN] * (FAILURES - 1)), clock=clock)
    for number in range(2 * FAILURES - 1):
        if number == FAILURES - 1:
            read(store)
        else:
            with pytest.raises(StoreError):
                read(store)
    assert store.state == "closed"


def test_a_miss_is_an_answer(clock):
    store = Breaker(Scripted(*[GONE] * 20), clock=clock)
    for _ in range(20):
        with pytest.raises(StoreError):
            read(store)
    assert store.state == "closed"


def test_after_the_cool_off_one_call_finds_out(clock):
    states = []
    store, inner = opened(clock)
    clock.now += FIRST_COOL_OFF_S
    inner.answers.append(lambda: states.append((store.state, tally.breaker, refused(store))))
    read(store)
    assert states == [("half_open", "half_open", True)]
    assert store.state == "closed"
    read(store)


def refused(store):
    """Whether another call is refused while one finds out."""
    try:
        store.around(Operation.READ, lambda: None)
    except StoreError:
        tally.breaker = "half_open"
        return True
    return False


def test_a_failed_try_doubles_the_cool_off_up_to_a_bound(clock):
    store, inner = opened(clock, *[DOWN] * 20)
    cool_off = FIRST_COOL_OFF_S
    for _ in range(10):
        clock.now += cool_off - 0.5
        calls = len(inner.calls)
        with pytest.raises(StoreError, match="taken as down"):
            read(store)
        assert len(inner.calls) == calls
        clock.now += 0.5
        with pytest.raises(StoreError):
            read(store)
        assert len(inner.calls) == calls + 1
        cool_off = min(LONGEST_COOL_OFF_S, cool_off * 2)
    assert cool_off == LONGEST_COOL_OFF_S


def test_an_unforeseen_error_while_finding_out_lets_the_next_find_out(clock):
    store, _ = opened(clock, ValueError("odd"))
    clock.now += FIRST_COOL_OFF_S
    with pytest.raises(ValueError, match="odd"):
        read(store)
    read(store)
    assert store.state == "closed"

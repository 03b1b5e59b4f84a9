"""Stories without spans: they tell what the root spans tell."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.views.sample_run import (
    REQUEST,
    allocated,
    built,
    dropped,
    finished,
    joined,
    looked_up,
    named,
    polled,
    queried,
    registered,
    spans_of,
    started,
    the_run,
    transferred,
    wrapped,
)
from tracekv.journal.records import Record, RequestResetCall
from tracekv.journal.vocabulary import Callback, Direction, Side, Tier
from tracekv.views import names
from tracekv.views.stories import KINDS, Stories
from tracekv.views.story import Story


def stories_of(records: list[Record], max_open: int = 4096) -> list[Story]:
    view = Stories(max_open)
    ended = [story for record in records if isinstance(record, KINDS) for story in view.feed(record)]
    return ended + view.close()


def told(story: Story) -> dict[str, object]:
    return {
        names.REQUEST_ID: str(story.request_id),
        names.OUTCOME: story.outcome,
        names.QUERIES: story.queries,
        names.QUERY_NS: story.query_ns,
        names.WAITED_NS: story.waited_ns,
        names.LOADED_TOKENS: story.tokens(Direction.LOAD),
        names.SAVED_TOKENS: story.tokens(Direction.SAVE),
        names.SCHEDULED_TOKENS: story.scheduled_tokens,
        names.PROMPT_TOKENS: story.prompt_tokens,
        names.HONOURED_TOKENS: story.honoured_tokens,
        names.MISS_REASON: story.miss_reason and story.miss_reason.value,
        names.HELD_NS: story.held_ns,
    }


def test_a_story_ends_at_request_finished() -> None:
    (story,) = stories_of(the_run())

    assert (story.request_id, story.outcome, story.started_ns, story.ended_ns) == (REQUEST, "finished", 1000, 2250)
    assert (story.prompt_tokens, story.offered_tokens, story.honoured_tokens) == (1024, 512, 480)
    assert story.nbytes(Direction.LOAD) == 240


def test_kept_pages_keep_the_story_open_until_they_are_given_back() -> None:
    view = Stories()
    for record in (queried(), finished(keeps_pages=True)):
        assert view.feed(record) == []
    (story,) = view.feed(polled(3000, 3250, saving_returned=[REQUEST]))

    assert (story.outcome, story.held_ns) == ("finished", 1000)


def test_a_finish_that_is_announced_twice_tells_no_second_story() -> None:
    assert len(stories_of([queried(), finished(), finished(2300, 2310)])) == 1
    assert len(stories_of([queried(), finished(), queried(2300, 2310)])) == 2


def test_too_many_open_requests_end_the_quietest_as_abandoned() -> None:
    records = [queried(request_id=1), queried(request_id=2), built(request_ids=[1]), queried(request_id=3)]

    assert [(s.request_id, s.outcome) for s in stories_of(records, max_open=2)] == [
        (2, "abandoned"),
        (1, "abandoned"),
        (3, "abandoned"),
    ]


def reset(request_id: int = REQUEST) -> RequestResetCall:
    return RequestResetCall(Callback.REQUEST_RESET, 2400, 2401, 1, None, request_id)


@given(
    st.lists(
        st.sampled_from(
            [
                queried(), queried(request_id=8), looked_up(), looked_up(1200, 1201), looked_up(request_id=8), allocated(), built(),
                transferred(Direction.LOAD, 0, [1], 10, 5, 9), transferred(Direction.SAVE, 1, [1], 10, 5, 9, tier=Tier.DISK),
                dropped(), finished(), finished(keeps_pages=True), finished(request_id=8), reset(),
                polled(3000, 3100, saving_returned=[REQUEST]),
            ]
        ),
        max_size=12,
    )
)  # fmt: skip
def test_any_records_make_the_stories_that_the_root_spans_tell(records: list[Record]) -> None:
    roots = named(
        spans_of([started(), wrapped(Side.SCHEDULER), registered(), joined(), *records]),
        names.REQUEST,
    )

    expected = [{name: root.attributes.get(name) for name in told(Story(0, 0, 0))} for root in roots]
    assert [told(story) for story in stories_of(records)] == expected


_EVENTS = st.one_of(
    st.tuples(st.just("built"), st.lists(st.integers(1, 3), max_size=3, unique=True), st.integers(0, 5)),
    st.tuples(st.sampled_from(["queried", "allocated", "finished", "transferred", "dropped"]), st.integers(1, 3)),
)


@given(st.lists(_EVENTS, max_size=60), st.sampled_from([1, 2, 4096]))
def test_records_taken_together_tell_what_they_tell_one_by_one(events: list[tuple[Any, ...]], max_open: int) -> None:
    """Passes of the same requests follow one another, with other tokens or requests, and with other records in between."""
    records: list[Record] = []
    for number, (what, *rest) in enumerate(events, 1):
        at = number * 100
        if what == "built":
            ids, tokens = rest
            each = msgspec.structs.replace(
                built(number, at, at + 9, ids, 0), scheduled_tokens=[tokens] * len(ids), pages=[]
            )
        elif what == "transferred":
            each = transferred(Direction.LOAD, 0, [3], 80, at, at + 9, request_id=rest[0])
        elif what == "dropped":
            each = dropped(at, rest[0])
        else:
            each = {"queried": queried, "allocated": allocated, "finished": finished}[what](at, at + 9, rest[0])
        records.append(each)
    together = Stories(max_open)
    ended = together.feed_all(records)

    assert ended + together.close() == stories_of(records, max_open)

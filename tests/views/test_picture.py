"""Bars that fit on a screen: none is dropped, none that can be seen is joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.views.sample_run import hooks, registered, transferred
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction
from tracekv.views.picture import Many, Picture
from tracekv.views.timeline import Bar, Lane, Row, Timeline

LANE = Lane(Row.LOADS, 0)


def bar(start: int, took: int, request: int = 1, name: str = "load", error: str | None = None) -> Bar:
    record: Transfer = transferred(Direction.LOAD, 0, [1], 10, start, start + took)
    return Bar(LANE, name, start, start + took, (request,), 0, -1, error, record)


def kept(picture: Picture) -> list[Bar | Many]:
    return [each for _, found in picture.kept() for each in found]


def test_few_bars_are_kept_as_they_are() -> None:
    picture, bars = Picture(10), [bar(100, 5), bar(0, 50), bar(60, 0)]
    for each in bars:
        picture.add(each)

    assert kept(picture) == [bars[1], bars[2], bars[0]]
    assert picture.width_ns == 0


def test_neighbours_are_joined_and_say_what_they_were() -> None:
    picture = Picture(4)
    for at in range(8):
        picture.add(bar(at * 100, 20, at, "load" if at else "other", "OSError" if at == 5 else None))
    (many,) = kept(picture)

    assert isinstance(many, Many)
    assert (many.first_ns, many.last_ns, many.count, many.busy_ns, many.longest_ns) == (0, 720, 8, 160, 20)
    assert (many.names, many.errors, list(many.requests)) == ({"other": 1, "load": 7}, 1, list(range(8)))


def test_a_bar_that_can_be_seen_stays_whole_among_joined_ones() -> None:
    picture, long = Picture(4), bar(300, 10**9, 99)
    for at in range(100):
        picture.add(bar(at * 100, 20))
    picture.add(long)

    assert long in kept(picture)
    assert picture.width_ns < 10**9


def test_many_requests_are_cut_and_said_to_be_more() -> None:
    picture = Picture(2)
    for at in range(40):
        picture.add(bar(at, 1, at))
    (many,) = kept(picture)

    assert isinstance(many, Many)
    assert (len(many.requests), many.has_more) == (12, True)


@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**5)), min_size=1, max_size=200),
    st.integers(1, 40),
)
def test_no_bar_and_no_nanosecond_is_lost_however_few_are_allowed(times: list[tuple[int, int]], most: int) -> None:
    picture = Picture(most)
    for start, took in times:
        picture.add(bar(start, took))
    found = kept(picture)

    assert len(found) <= most
    assert picture.bars == sum(each.count if isinstance(each, Many) else 1 for each in found) == len(times)
    busy = sum(each.busy_ns if isinstance(each, Many) else each.end_ns - each.start_ns for each in found)
    assert busy == sum(took for _, took in times)
    for each in found:
        if isinstance(each, Many):
            assert each.longest_ns < picture.width_ns
            assert each.last_ns - each.first_ns < 2 * picture.width_ns


def test_blocks_of_hooks_are_what_their_bars_add_up_to() -> None:
    timeline = Timeline()
    timeline.feed(registered())
    bars = timeline.hooks(hooks(waits=[(1600, 1610), (0, 0), (1800, 1805), (1900, 0)]))
    blocks = timeline.hook_blocks(hooks(waits=[(1600, 1610), (0, 0), (1800, 1805), (1900, 0)]))

    assert sum(block.bars for block in blocks) == len(bars) == 6
    for block in blocks:
        own = [each for each in bars if (each.lane, each.name) == (block.lane, block.name)]
        assert (block.first_ns, block.last_ns) == (own[0].start_ns, max(each.end_ns for each in own))
        assert block.busy_ns == sum(each.end_ns - each.start_ns for each in own)
        assert block.longest_ns == max(each.end_ns - each.start_ns for each in own)


def test_a_block_counts_like_its_bars() -> None:
    timeline, whole, by_block = Timeline(), Picture(1), Picture(1)
    timeline.feed(registered())
    for picture in (whole, by_block):
        for at in range(3):
            picture.add(bar(at * 100, 20))
    for each in timeline.hooks(hooks()):
        whole.add(each)
    for block in timeline.hook_blocks(hooks()):
        by_block.add_block(block)

    assert whole.bars == by_block.bars == 11

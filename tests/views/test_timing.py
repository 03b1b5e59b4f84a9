"""Where time went: the parts always add up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracekv.views.timing import length, merged, overlap, partition, without

intervals = st.lists(st.tuples(st.integers(-50, 150), st.integers(-50, 150)), max_size=12)


def moments(found):
    return {moment for begin, end in found for moment in range(begin, end)}


@given(st.integers(0, 100), st.integers(0, 100), st.dictionaries(st.sampled_from("abcd"), intervals))
def test_the_parts_add_up_to_the_whole_whatever_overlaps(begin, end, layers):
    parts = partition(begin, end, layers, "rest")
    assert sum(parts.values()) == max(0, end - begin)
    assert all(part >= 0 for part in parts.values())
    # Each moment is the first layer's that has it, counted one by one.
    expected = dict.fromkeys([*layers, "rest"], 0)
    for moment in range(begin, end):
        expected[next((name for name in layers if moment in moments(layers[name])), "rest")] += 1
    assert parts == expected


def test_a_layer_below_gets_what_the_one_above_leaves():
    parts = partition(0, 100, {"stall": [(10, 30)], "pass": [(20, 60), (50, 70)]}, "rest")
    assert parts == {"stall": 20, "pass": 40, "rest": 40}


@given(intervals, intervals)
def test_overlap_and_what_is_left_are_as_counted_moment_by_moment(first, second):
    assert moments(merged(first)) == moments(first)
    assert length(merged(first)) == len(moments(first))
    assert moments(overlap(first, second)) == moments(first) & moments(second)
    assert moments(without(first, second)) == moments(first) - moments(second)

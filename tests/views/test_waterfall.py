"""A trace as text."""

from __future__ import annotations

from tests.views.sample_run import only, spans_of, the_run
from tracekv.views.model import Span, Status
from tracekv.views.waterfall import waterfall


def test_children_are_indented_below_their_parents_in_order_of_time() -> None:
    spans = spans_of(the_run())
    trace = only(spans, "request").trace_id
    lines = waterfall(span for span in spans if span.trace_id == trace).splitlines()

    assert [line.split("|")[0].rstrip() for line in lines] == [
        "request",
        "  get_num_new_matched_tokens",
        "    lookup",
        "  update_state_after_alloc_by_layer_group",
        "  load",
        "  load",
        "  save",
        "  store.put",
        "  request_finished_by_layer_group",
    ]


def test_a_bar_shows_where_a_span_lies() -> None:
    root = Span("a", b"t" * 16, b"1" * 8, None, 0, 1000, {})
    child = Span("b", b"t" * 16, b"2" * 8, b"1" * 8, 500, 750, {"tracekv.bytes": 80}, status=Status.ERROR)

    assert waterfall([child, root], width=8).splitlines() == [
        "a   |████████|      0 ns   1.00 µs",
        "  b |    ██  |    500 ns    250 ns  bytes=80 ERROR",
    ]


def test_a_span_of_another_process_s_parent_stands_at_the_left() -> None:
    lone = Span("load", b"t" * 16, b"2" * 8, b"1" * 8, 5, 7, {})

    assert waterfall([lone]).startswith("load |")


def test_nothing_is_an_empty_text() -> None:
    assert waterfall([]) == ""

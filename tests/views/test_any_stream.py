"""Whatever order records come in, and whichever are lost: no crash, no doubled id, bounded state, each call in one span."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.views.sample_run import (
    bound,
    built,
    call,
    dropped,
    finished,
    idle,
    looked_up,
    polled,
    queried,
    spans_of,
    started,
    stored,
    the_run,
    transferred,
)
from tracekv.journal.records import Enqueued, Prefetch, Record, RequestResetCall, TracerFault
from tracekv.journal.vocabulary import Callback, Direction, PrefetchFate
from tracekv.views import names
from tracekv.views.model import Span
from tracekv.views.spans import SpanView
from tracekv.views.summary import SummaryView

EVERYTHING = [
    *the_run(),
    looked_up(3000, 3010),
    RequestResetCall(Callback.REQUEST_RESET, 3000, 3001, 1, None, 7),
    queried(3020, 3030),
    finished(4000, 4010, keeps_pages=True),
    polled(4100, 4110, saving_given=[7], saving_returned=[7], loading_given=[7], loading_returned=[7]),
    built(2, 3100, 3110, [7, 8]),
    bound(2, 3120, 3130),
    transferred(Direction.SAVE, 5, [1], 1, 3140, 3150, step=2, error="OSError"),
    built(3, 5100, 5110, []),
    call(Callback.BUILD_CONNECTOR_META, 6000, 6001, 4, "ValueError"),
    idle(3, 7, 5200, 5300),
    dropped(5400, None),
    stored(request_id=None),
    Prefetch(5500, 8, PrefetchFate.WASTED, 1, 1, 1),
    Enqueued(990, 8, None, 10, None),
    TracerFault(1, "x", "y", "z"),
]

_streams = st.one_of(st.permutations(EVERYTHING), st.lists(st.sampled_from(EVERYTHING), max_size=60))


def calls_in_summary(records: list[Record]) -> Counter[str]:
    view = SummaryView()
    for record in records:
        view.feed(record)
    return Counter({name: callback.durations.calls for name, callback in view.summary.callbacks.items()})


def calls_in_spans(spans: list[Span]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for span in spans:
        if names.CALLBACK in span.attributes:
            counts[str(span.attributes[names.CALLBACK])] += int(span.attributes.get(names.CALLS, 1))  # type: ignore[arg-type]
    return counts


@pytest.mark.parametrize("detail", ["full", "economy"])
@given(records=_streams)
def test_each_recorded_call_is_in_exactly_one_span(detail: str, records: list[Record]) -> None:
    assert calls_in_spans(spans_of(records, SpanView(detail=detail))) == calls_in_summary(records)


@given(records=_streams)
def test_no_root_is_told_twice(records: list[Record]) -> None:
    roots = Counter(
        span.span_id for span in spans_of(records) if span.name in (names.REQUEST, names.STEP, names.BRING_UP)
    )

    assert max(roots.values(), default=1) == 1


@given(records=_streams)
def test_no_span_ends_before_it_starts(records: list[Record]) -> None:
    assert all(span.end_ns >= span.start_ns for span in spans_of(records))


def test_spans_of_one_run_have_different_ids() -> None:
    spans = spans_of(the_run())

    assert len({span.span_id for span in spans}) == len(spans)


def test_the_same_records_give_the_same_spans() -> None:
    assert spans_of(the_run()) == spans_of(the_run())


def test_state_is_bounded_however_long_a_leader_runs_without_ends() -> None:
    view = SpanView(max_requests=16)
    spans_of(the_run(), view, is_closed=False)
    records = chain.from_iterable(
        (queried(n * 100, n * 100 + 1, n), built(n, n * 100 + 2, n * 100 + 3, [n])) for n in range(10, 2000)
    )
    spans = spans_of(records, view, is_closed=False)

    assert sum(span.name == names.REQUEST for span in spans) > 1900
    assert len(view._requests._open) <= 16
    assert len(view._requests._ended) <= 16
    assert len(view._steps._open) <= 2


def test_a_journal_whose_beginning_was_overwritten_still_gives_spans() -> None:
    view = SpanView()
    view.lost(9)

    assert {span.name for span in spans_of(the_run()[9:], view)} >= {"request", "load", "save"}
    assert view.facts.process_id == b""


def test_a_process_id_comes_with_the_first_record() -> None:
    view = SpanView()
    view.feed(started())

    assert view.facts.process_id == b"process-process-"

"""Prompt tokens: counted together when a prompt is settled; lookups and misses."""

from __future__ import annotations

import pytest

from tests.metrics.reading import SOURCE, histograms, of, view_of
from tests.views.sample_run import allocated, built, call, finished, looked_up, queried, transferred
from tracekv.journal.records import BuildCall, RequestResetCall
from tracekv.journal.vocabulary import Callback, Direction, MissReason
from tracekv.views.metrics import MetricsView
from tracekv.views.metrics_prompts import MAX_PROMPTS

KINDS = ("queried", "computed", "offered", "honoured", "loaded", "saved")


def tokens(view: MetricsView) -> tuple[int | float, ...]:
    """Queried, computed, offered, honoured, loaded, saved; empty before any prompt was settled."""
    return tuple(value for kind in KINDS for value in of(view, f"tracekv.prompt.tokens.{kind}").values())


def decoding(step: int = 2, request_id: int = 7, position: int = 1024) -> BuildCall:
    """A pass in which the request is no new one."""
    record = built(step, 3000, 3010, [request_id], new=0)
    record.computed_positions = [position]
    return record


PREFILL = [
    queried(),
    allocated(),
    built(),
    transferred(Direction.LOAD, 0, [3, 4], 200, 1500, 1540, tokens=480),
    transferred(Direction.LOAD, 1, [8], 40, 1540, 1560, tokens=64),
    transferred(Direction.SAVE, 0, [5], 100, 2010, 2020, tokens=32),
]


def test_nothing_is_counted_while_the_prompt_is_being_computed() -> None:
    assert tokens(view_of(*PREFILL)) == ()
    assert tokens(view_of(*PREFILL, decoding(position=900))) == ()


def test_all_six_are_counted_by_the_first_pass_beyond_the_prompt() -> None:
    view = view_of(*PREFILL, decoding())

    assert tokens(view) == (1024, 64, 512, 480, 480, 32)
    assert of(view, "tracekv.prompts") == {(): 1}


def test_the_end_of_a_request_settles_its_prompt_once() -> None:
    view = view_of(*PREFILL, finished(), decoding(), finished())

    assert tokens(view) == (1024, 64, 512, 480, 480, 32)
    assert of(view, "tracekv.prompts") == {(): 1}


def test_a_blocked_request_that_is_asked_about_again_counts_once_with_its_last_query() -> None:
    view = view_of(queried(offered_tokens=100), queried(offered_tokens=200), allocated(honoured=200), decoding())

    assert tokens(view) == (1024, 64, 200, 200, 0, 0)


def test_a_replay_counts_both_times() -> None:
    view = view_of(
        *PREFILL,
        RequestResetCall(Callback.REQUEST_RESET, 2500, 2501, 1, None, 7),
        queried(computed_tokens=0, offered_tokens=32),
        allocated(honoured=32),
        decoding(),
    )

    assert tokens(view) == (2048, 64, 544, 512, 480, 32)
    assert of(view, "tracekv.prompts") == {(): 2}


def test_where_the_runtime_does_not_tell_the_offer_counts_as_honoured() -> None:
    assert tokens(view_of(queried(), allocated(honoured=None), decoding()))[3] == 512


def test_an_offer_to_a_request_without_pages_is_not_honoured() -> None:
    assert tokens(view_of(queried(), finished())) == (1024, 64, 512, 0, 0, 0)


def test_a_save_reported_later_is_added_up_to_the_length_of_the_prompt() -> None:
    late = transferred(Direction.SAVE, 0, [5], 100, 3100, 3110, tokens=500)
    view = view_of(*PREFILL, decoding(), late)
    assert tokens(view)[5] == 532

    view.feed_all(SOURCE, [late, late])
    assert tokens(view)[5] == 1024


def test_a_failed_transfer_loads_no_tokens() -> None:
    view = view_of(queried(), allocated(), transferred(Direction.LOAD, 0, [3], 100, 1, 2, error="OSError"), decoding())

    assert tokens(view)[4] == 0


def test_the_oldest_of_too_many_prompts_is_settled_as_it_is() -> None:
    view = view_of(*[queried(request_id=number) for number in range(MAX_PROMPTS + 5)])

    assert of(view, "tracekv.prompts") == {(): 5}


def test_a_lookup_counts_its_miss_its_bounding_group_and_its_wait() -> None:
    view = view_of(
        looked_up(waited_ns=3_000_000),
        looked_up(reason=None, bounding_layer_group=None, waited_ns=0),
        looked_up(reason=MissReason.NOT_STORED, bounding_layer_group=1, waited_ns=0),
    )

    assert of(view, "tracekv.lookups") == {(): 3}
    assert of(view, "tracekv.lookup.misses") == {("not_staged",): 1, ("not_stored",): 1}
    assert of(view, "tracekv.lookup.bounded") == {(0,): 1, (1,): 1}
    assert of(view, "tracekv.lookup.wait") == {(): 0.003}


def test_only_an_offer_of_news_tells_how_old_it_is() -> None:
    view = view_of(looked_up(), looked_up(commit_to_offer_ns=40_000_000))

    assert histograms(view, "tracekv.lookup.commit_to_offer")[()].sum == 0.04
    assert histograms(view, "tracekv.lookup.commit_to_offer")[()].count == 1


@pytest.mark.parametrize("facts", [{"offered_tokens": -5}, {"prompt_tokens": -1}, {"computed_tokens": -9}])
def test_a_connectors_odd_answer_makes_no_counter_fall(facts: dict[str, int]) -> None:
    view = view_of(queried(**facts), allocated(honoured=None), finished(), call(Callback.WAIT_FOR_SAVE, 1, 2))

    assert min(tokens(view)) >= 0


def test_a_prompt_waits_from_its_first_query_until_it_has_pages() -> None:
    blocked = queried(1000, 1010), queried(5000, 5010)
    view = view_of(*blocked, allocated(2_001_000, 2_001_100))

    assert histograms(view, "tracekv.prompt.wait")[()].sum == 0.002


def test_a_prompts_duration_ends_with_the_first_pass_beyond_it_and_is_told_by_hit_and_miss() -> None:
    late = decoding(request_id=9)
    late.started_ns = 4_000_000
    view = view_of(*PREFILL, decoding(), queried(1000, 1010, 9), allocated(1020, 1030, 9, honoured=0), late)
    durations = histograms(view, "tracekv.prompt.duration")

    assert durations["hit",].sum == 2e-6
    assert durations["miss",].sum == 0.003999


def test_a_prompt_that_never_got_pages_has_no_duration() -> None:
    view = view_of(queried(), finished())

    assert of(view, "tracekv.prompts") == {(): 1}
    assert histograms(view, "tracekv.prompt.duration") == {}


def test_a_prompt_that_is_computed_anew_is_timed_from_the_new_query() -> None:
    view = view_of(*PREFILL, queried(2_000_000, 2_000_010), allocated(2_001_000, 2_001_010))

    assert histograms(view, "tracekv.prompt.duration") == {}
    assert histograms(view, "tracekv.prompt.wait")[()].count == 2

"""Deadlines of transfers, and what shortens them, with attention data parallelism (contract.md sections 1.5, 1.6 and 7).

Rank 0's request is parked; each poll of rank 0 is a second on the ranks' clock.
"""

from __future__ import annotations

import threading

import pytest

from tests.ranks.test_attention_dp import NO_PAGE_LEFT, PARKS_ON_RANK_0, on_both
from tests.ranks.test_tensor_parallel import tokens
from tracekv.harness.data_parallel import Deadlines
from tracekv.harness.versions import RuntimeVersion

FIRST = RuntimeVersion(deadlines_span_passes=False)
SAVES_ON_RANK_0 = ({"request_finished_by_layer_group": [True]}, {})


class Polled:
    """Returns all ids that it was given in the polls (from 1) for which ``returns`` answers True."""

    polls = 0
    clock = None

    @staticmethod
    def returns(poll):
        return False

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        super().get_finished(finished_gen_req_ids, started_loading_req_ids)
        self.saving = [*getattr(self, "saving", []), *finished_gen_req_ids]
        self.loading = [*getattr(self, "loading", []), *started_loading_req_ids]
        self.polls += 1
        if self.clock is not None:
            self.clock.seconds += 1
        if not self.returns(self.polls):
            return [], []
        done, self.saving, self.loading = (self.saving, self.loading), [], []
        return done


class Clock:
    seconds = 0

    def __call__(self):
        return self.seconds


def told(work, answers=PARKS_ON_RANK_0, *, transfer_s=60, grace_s=60, **options):
    """What ``work(executor, rank, request)`` answers on each rank, or what ended it, with where it was then.

    Rank 0 serves 100 tokens, rank 1 40 of them and twenty of its own.
    """
    clock = Clock()

    def on_rank(executor, rank):
        if rank == 0:
            executor.worker.clock = clock
        request = executor.submit([tokens(100), tokens(40, seed=6)][rank], [2, 20][rank])
        try:
            return work(executor, rank, request)
        except RuntimeError as error:
            held = executor.cache.num_blocks - len(executor.cache.unheld(0))
            return str(error), executor.passes, held, request.is_finished

    deadlines = Deadlines(transfer_s, grace_s, clock)
    return on_both(on_rank, answers, mixin=Polled, deadlines=deadlines, **options)[0]


def served(executor, rank, request):
    executor.run()
    return request.output_tokens and len(request.output_tokens), request.is_cancelled


def elsewhere(function, *arguments):
    """Call it on another thread."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


# -- from pass to pass --------------------------------------------------------------------------------------------------


def test_a_load_that_is_not_done_in_time_ends_every_rank_although_they_can_compute():
    first, second = told(served, transfer_s=5.5)
    assert first[0] == second[0]
    assert "KV connector failed: TimeoutError: Timed out: get_finished has not returned request 1 in 5.5 s" in first[0]
    # Each pass took a second: that the load was waited for in six of them did not give it more time.
    assert (first[1], second[1]) == (6, 6)


def test_pages_of_a_failed_transfer_are_not_given_back():
    (_, _, held, is_finished), _ = told(served, transfer_s=5.5)
    assert (held, is_finished) == (4, False)


def test_a_load_that_is_returned_by_the_poll_in_which_its_time_is_over_is_done():
    def work(executor, rank, request):
        executor.worker.returns = lambda poll: poll == 6
        return served(executor, rank, request)

    assert told(work, transfer_s=5.5) == [(2, False), (20, False)]


def test_a_save_that_is_not_done_in_time_ends_every_rank():
    first, second = told(served, SAVES_ON_RANK_0, transfer_s=5.5)
    assert first[0] == second[0]
    assert "Timed out: get_finished has not returned request 1" in first[0]
    # It was begun at the end of the second pass, and waited for in six more.
    assert first[1] == 2 + 6


def test_the_first_version_of_the_branch_waits_for_ever_between_passes():
    def work(executor, rank, request):
        executor.worker.returns = lambda poll: poll == 12
        return served(executor, rank, request)

    assert told(work, transfer_s=5.5, version=FIRST) == [(2, False), (20, False)]


@pytest.mark.parametrize("spans", [True, False])
def test_a_poll_that_raises_ends_the_others_where_deadlines_span_passes(spans):
    def work(executor, rank, request):
        if rank == 0:
            executor.worker.returns = lambda poll: (_ for _ in ()).throw(OSError("the store is gone"))
        executor.step()
        return "went on"

    def run():
        return told(work, version=RuntimeVersion(deadlines_span_passes=spans))

    if spans:
        first, second = run()
        assert first[0] == second[0] == "tracekv: KV connector failed: OSError: the store is gone"
    else:
        with pytest.raises(OSError, match="the store is gone"):
            run()


def cancelled_after(passes):
    def work(executor, rank, request):
        for _ in range(passes):
            executor.step()
        if rank == 0:
            executor.cancel(request)
        return served(executor, rank, request)

    return work


def test_a_cancelled_load_has_only_the_grace_left():
    first, second = told(cancelled_after(3), grace_s=2.5)
    assert first[0] == second[0]
    assert "Cancellation requested: get_finished has not returned request 1 in 2.5 s" in first[0]
    # Noted at the start of the pass behind it, in second 3; second 6 is the first past 5.5.
    assert first[1] == second[1] == 6
    assert first[2] == 4


def test_to_cancel_a_load_gives_it_no_time():
    first, _ = told(cancelled_after(3), transfer_s=5.5, grace_s=30)
    assert "Timed out" in first[0]
    assert first[1] == 6


def test_a_load_that_is_done_within_the_grace_ends_as_cancelled():
    def work(executor, rank, request):
        executor.worker.returns = lambda poll: poll == 5
        return cancelled_after(3)(executor, rank, request)

    (first, second) = told(work, grace_s=2.5)
    assert first[1] is True
    assert second == (20, False)


@pytest.mark.parametrize("asks", [0, 1])
def test_once_an_engine_is_to_shut_down_its_loads_have_only_the_grace_left(asks):
    def work(executor, rank, request):
        for _ in range(3):
            executor.step()
        if rank == asks:
            executor.request_shutdown()
        return served(executor, rank, request)

    first, second = told(work, grace_s=2.5)
    assert first[0] == second[0]
    assert "Shutdown requested: get_finished has not returned request 1 in 2.5 s" in first[0]
    assert first[1] == second[1] == 6


def test_an_engine_that_is_to_shut_down_serves_what_it_has_and_takes_nothing_more():
    def work(executor, rank, request):
        executor.step()
        executor.request_shutdown()
        with pytest.raises(RuntimeError, match="asked to shut down"):
            executor.submit(tokens(20), 1)
        executor.worker.returns = lambda poll: poll == 3
        return served(executor, rank, request)

    assert told(work, grace_s=2.5) == [(2, False), (20, False)]


# -- inside a pass, where a rank has neither a batch nor a page to pad one with -------------------------------------------


def in_second_poll(event, *, returns_in=None):
    """``event(executor, request)`` on another thread, during rank 0's second poll."""

    def work(executor, rank, request):
        def returns(poll):
            if poll == 2:
                elsewhere(event, executor, request)
            return poll == returns_in

        if rank == 0:
            executor.worker.returns = returns
        executor.step()
        inside = executor.passes, len(request.output_tokens), request.is_cancelled, executor.worker.polls
        executor.run()
        return inside

    return work


def cancel(executor, request):
    executor.cancel(request)


def shut_down(executor, request):
    executor.request_shutdown()


@pytest.mark.parametrize(
    ("event", "why"),
    [(cancel, "Cancellation requested"), (shut_down, "Shutdown requested")],
    ids=["cancel", "shutdown"],
)
def test_what_is_asked_of_a_rank_that_waits_inside_a_pass_shortens_the_wait(event, why):
    first, second = told(in_second_poll(event), grace_s=2.5, **NO_PAGE_LEFT)
    assert first[0] == second[0]
    assert f"KV connector failed: TimeoutError: {why}" in first[0]
    assert (first[1], second[1]) == (0, 0)  # nobody has computed
    assert first[2:] == (4, False)  # nothing was given back, and nothing ended


@pytest.mark.parametrize("event", [cancel, shut_down])
def test_a_wait_that_is_over_within_the_grace_goes_on_with_its_pass(event):
    first, second = told(in_second_poll(event, returns_in=4), grace_s=2.5, **NO_PAGE_LEFT)
    # The poll at the pass's end is the fifth. Who was cancelled is computed in this pass, and ends with it.
    tokens_of_pass, is_cancelled = (1, True) if event is cancel else (1, False)
    assert first == (1, tokens_of_pass, is_cancelled, 5)
    assert second[:3] == (1, 1, False)


def test_to_cancel_another_request_changes_nothing_for_the_one_that_is_waited_for():
    """More than the grace goes by, and the load is done."""

    def work(executor, rank, request):
        others = [executor.submit(tokens(30, seed=9), 1)]
        if rank == 0:
            executor.worker.returns = lambda poll: (poll == 1 and elsewhere(executor.cancel, others[0])) or poll == 8
        executor.step()
        return executor.passes, len(request.output_tokens)

    assert told(work, grace_s=2.5, **NO_PAGE_LEFT) == [(1, 1), (1, 1)]

from __future__ import annotations

import logging

import msgspec
import pytest

from tracekv.bench.traffic import busy
from tracekv.journal.records import IdlePolls, ProcessStarted, TracingReduced, Transfer, WatchGapSeen, WatchReport
from tracekv.journal.vocabulary import Callback, Direction, Source, Tier, WatchGap
from tracekv.rules import RULES, Checker, Limits, Rule, RuleView, Severity
from tracekv.testing.corpus.tape import PAGE_BYTES, Tape


def check(tape, **options):
    checker = Checker(**options)
    for source, record in tape.records:
        checker.feed(source, record)
    checker.close()
    assert not checker.removed
    return checker.findings


def names(findings):
    return [found.rule for found in findings]


def test_a_finding_says_which_rule_who_where_and_what_proves_it():
    tape = Tape()
    tape.query(7, 96, 0, 96)
    (found,) = check(tape)
    assert (found.rule, found.severity, found.by) == ("S2", Severity.VIOLATION, "connector")
    assert (found.request, found.rank, found.callback) == (7, 0, "get_num_new_matched_tokens")
    assert found.numbers == {"offered": 96, "most": 95}
    assert [each.record for each in found.evidence] == [tape.records[-1][1]]
    assert found.title == "An offer leaves at least one prompt token to compute."
    assert "tokens_per_block" in found.fix


def test_a_busy_engine_without_faults_raises_nothing():
    assert check(busy(400, decoding=16)) == []


def test_a_request_is_named_once_by_a_rule():
    tape = Tape()
    tape.prefill(1, 64, [[1, 2]])
    for position in range(64, 90):
        tape.decode(1, position)
    assert names(check(tape)) == ["S11b"]


def test_findings_of_one_rule_are_counted_on_when_there_are_many():
    tape = Tape()
    for request in range(1, 251):
        tape.query(request, 96, 0, 96)
    checker = Checker()
    for source, record in tape.records:
        checker.feed(source, record)
    assert (len(checker.findings), checker.counts["S2"]) == (100, 250)


def test_a_rule_that_fails_is_removed_and_the_others_go_on(caplog):
    class Broken(Rule):
        """Fails."""

        id = "X1"

        def on_query(self, event):
            raise ValueError("a bug of ours")

    tape = Tape()
    tape.query(1, 96, 0, 96)
    tape.query(2, 96, 0, 96)
    checker = Checker(rules=(Broken, *RULES))
    with caplog.at_level(logging.WARNING, "tracekv"):
        for source, record in tape.records:
            checker.feed(source, record)
    assert names(checker.findings) == ["S2", "S2"]
    assert list(checker.removed) == ["X1"]
    assert len(caplog.records) == 1


def test_a_listener_that_fails_does_not_end_the_judging():
    def listen(found):
        raise RuntimeError("full")

    tape = Tape()
    tape.query(1, 96, 0, 96)
    tape.query(2, 96, 0, 96)
    checker = Checker(on_finding=listen)
    for source, record in tape.records:
        checker.feed(source, record)
    assert names(checker.findings) == ["S2", "S2"]


def test_a_view_tells_findings_as_they_are_made():
    told = []
    view = RuleView(on_finding=told.append)
    tape = Tape()
    tape.query(1, 96, 0, 96)
    for source, record in tape.records:
        view.feed(source, record)
    assert told == view.findings


def test_time_without_records_is_told_by_a_tick():
    tape = Tape()
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    tape.forward()
    tape.polled(loading=[1])
    view = RuleView(limits=Limits(parked_ns=60_000_000_000))
    for source, record in tape.records:
        view.feed(source, record)
    view.tick(tape.now + 59_000_000_000)
    assert view.findings == []
    view.tick(tape.now + 61_000_000_000)
    assert names(view.findings) == ["W6b"]


@pytest.mark.parametrize("is_told", [True, False])
def test_after_a_gap_an_unknown_id_proves_nothing(is_told):
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.polled(saving=[1])
    given = len(tape.records) - 1
    tape.polled(saved=[1])
    view = RuleView()
    for number, (source, record) in enumerate(tape.records):
        if number == given:
            if is_told:
                view.lost(source, 1)
            continue
        view.feed(source, record)
    assert names(view.findings) == ([] if is_told else ["W3"])


def test_while_calls_are_only_counted_nothing_is_concluded():
    tape = Tape()
    tape.prefill(1, 64, [[1, 2]])
    tape.add(TracingReduced(tape.now, True, 3000, 1000))
    tape.add(TracingReduced(tape.now, False, 500, 1000))
    tape.step += 50
    tape.decode(1, 120)
    tape.decode(1, 121)
    assert check(tape) == []


@pytest.mark.parametrize("is_told", [True, False])
def test_after_the_detail_was_off_nothing_is_concluded_from_what_came_before(is_told):
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    if is_told:
        tape.add(TracingReduced(tape.now, True, 0, 0, True))
    # The engine runs on unseen: request 1 is given and returned, request 2 comes and decodes past a block, request 3 is kept.
    tape.after(10)
    if is_told:
        tape.add(TracingReduced(tape.now, False, 0, 0))
    tape.decode(2, 200)
    tape.polled(saved=[3])
    tape.decode(2, 201)
    assert names(check(tape)) == ([] if is_told else ["W3"])


@pytest.mark.parametrize("is_told", [True, False])
def test_a_rank_whose_detail_was_off_is_not_taken_for_one_that_lags(is_told):
    tape = Tape(ranks=2)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    for rank in range(2):
        tape.transfer(Direction.SAVE, 1, [1, 2, 3], rank=rank)
    if is_told:
        tape.add(TracingReduced(tape.now, True, 0, 0, True), rank=1)
    tape.polled(0, saving=[1], saved=[1])  # rank 1 does the same, unseen
    tape.after(20)
    if is_told:
        tape.add(TracingReduced(tape.now, False, 0, 0), rank=1)
    for _ in range(30):
        tape.after(1000)
        tape.decode(2, 200)
    assert [name for name in names(check(tape)) if name == "W4"] == ([] if is_told else ["W4"])


def test_a_replay_is_asked_about_again_and_is_no_fault():
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.prefill(2, 100, [[5, 6, 7, 8]])
    tape.prefill(1, 100, [[9, 10, 11, 12]])
    assert check(tape) == []


def test_a_replay_after_an_async_load_comes_without_a_query_and_is_no_fault():
    tape = Tape()
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    tape.bind()
    tape.transfer(Direction.LOAD, 1, [1, 2, 3])
    tape.worker(Callback.START_LOAD_KV)
    tape.polled(loading=[1], loaded=[1])
    tape.build([(1, 96, 4, 100, [[1, 2, 3, 4]])])
    tape.forward()
    tape.build([(1, 0, 100, 100, [[5, 6, 7, 8]])])
    tape.forward()
    assert check(tape) == []


def test_a_second_announcement_is_a_habit_of_the_runtime_and_no_fault():
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, pages=[[1, 2, 3, 4]])
    tape.decode(2, 7)
    tape.finish(1)
    assert check(tape) == []


def test_a_cancelled_requests_pages_may_go_to_another_one():
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.prefill(2, 100, [[1, 2, 3, 4]])
    tape.decode(2, 100)
    assert check(tape) == []


def test_a_page_that_a_window_has_passed_may_go_to_another_request():
    def play(window):
        tape = Tape()
        tape.records[-1][1].groups[0].window_size = window
        tape.prefill(1, 100, [[1, 2, 3, 4]])
        tape.query(2, 100)
        tape.alloc(2, 0, [[1, 6, 7, 8]])
        tape.build([(2, 0, 100, 100, [[1, 6, 7, 8]])], [(1, 100, 1, [[]])])
        tape.forward()
        return names(check(tape))

    assert play(64) == []
    assert play(None) == ["S10"]


def test_what_the_device_shares_at_the_front_has_several_owners():
    def play(computed):
        tape = Tape()
        tape.prefill(1, 100, [[1, 2, 3, 4]])
        tape.query(2, 100, computed)
        tape.alloc(2, 0, [[1, 2, 7, 8]])
        tape.build([(2, computed, 100 - computed, 100, [[1, 2, 7, 8]])], [(1, 100, 1, [[]])])
        tape.forward()
        return names(check(tape))

    assert play(64) == []
    assert play(32) == ["S10"]


def parked_on_two_ranks(*, second_ends_at_the_poll):
    """A load of 3 seconds on the second rank; or one that was done at once, and is named 3 seconds later."""
    tape = Tape(ranks=2)
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    for rank in range(2):
        tape.bind(rank)
        if rank == 0 or not second_ends_at_the_poll:
            tape.transfer(Direction.LOAD, 1, [1, 2, 3], rank=rank)
        tape.worker(Callback.START_LOAD_KV, rank)
        tape.worker(Callback.WAIT_FOR_SAVE, rank)
    tape.polled(0, loading=[1], loaded=[1])
    tape.polled(1, loading=[1])
    began = tape.now
    tape.idle(0, ms=3000)
    if second_ends_at_the_poll:
        tape.transfer(Direction.LOAD, 1, [1, 2, 3], rank=1, started=began, ended=tape.now)
    tape.polled(1, loaded=[1])
    tape.build([(1, 96, 4, 100, [[1, 2, 3, 4]])])
    tape.forward(0)
    tape.forward(1)
    return check(tape)


def test_ranks_may_lag_each_other_without_being_named():
    assert parked_on_two_ranks(second_ends_at_the_poll=True) == []


def test_the_rank_that_notices_its_load_late_is_named():
    (found,) = parked_on_two_ranks(second_ends_at_the_poll=False)
    assert (found.rule, found.rank, found.request) == ("P3", 1, 1)


TIMES = ("started_ns", "ended_ns", "at_ns", "monotonic_ns", "first_started_ns", "last_ended_ns")


def on_another_boot(tape, days):
    """Rank 1's records, as a machine writes them whose clock is so far ahead; the clocks on the wall agree."""
    found = []
    for source, record in tape.records:
        if source == "rank1":
            ahead = {name: getattr(record, name) + days * 86_400 * 10**9 for name in TIMES if hasattr(record, name)}
            boot = {"boot_id": "another"} if isinstance(record, ProcessStarted) else {}
            record = msgspec.structs.replace(record, **ahead, **boot)
        found.append((source, record))
    tape.records = found
    return tape


def kept_on_two_ranks(*, seconds, first_rank=0):
    """A request's pages are kept so long, and given back by both ranks; the journal of ``first_rank`` is read first."""
    tape = Tape(ranks=2)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.query(2, 100, 0, 96, is_async=True)
    tape.alloc(2, 96, [[5, 6, 7, 8]])
    tape.build()
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3], rank=1)
    for rank in range(2):
        tape.polled(rank, saving=[1], loading=[2])
    for _ in range(seconds):
        for rank in range(2):
            tape.idle(rank, ms=500)
    tape.transfer(Direction.LOAD, 2, [5, 6, 7])
    for rank in range(2):
        tape.polled(rank, saved=[1], loaded=[2])
    joining = [each for each in tape.records[:10] if each[0] == f"rank{first_rank}"]
    tape.records = joining + [each for each in tape.records if each not in joining]
    return tape


@pytest.mark.parametrize("first_rank", [0, 1])
@pytest.mark.parametrize("days", [-10, 10])
def test_times_of_a_rank_on_another_machine_are_not_taken_for_the_leaders(days, first_rank):
    assert names(check(on_another_boot(kept_on_two_ranks(seconds=5, first_rank=first_rank), days))) == []


@pytest.mark.parametrize("first_rank", [0, 1])
@pytest.mark.parametrize("days", [-10, 10])
def test_what_is_too_long_is_named_whichever_clock_tells_it(days, first_rank):
    found = check(on_another_boot(kept_on_two_ranks(seconds=70, first_rank=first_rank), days))
    here = check(kept_on_two_ranks(seconds=70, first_rank=first_rank))
    assert names(found) == names(here)
    assert {"S13e", "W6", "W6b"} <= set(names(here))


def loaded_on_two_ranks(second_loads_after_ms):
    """Rank 0 loads before its forward of a millisecond; rank 1 so much later than that forward's begin, its own comes later."""
    tape = Tape(ranks=2)
    pages = [[1, 2, 3, 4]]
    tape.query(1, 100, 0, 96)
    tape.alloc(1, 96, pages)
    tape.build([(1, 0, 4, 100, pages)])
    tape.bind(0)
    tape.transfer(Direction.LOAD, 1, [1, 2, 3])
    tape.worker(Callback.START_LOAD_KV, 0)
    tape.after(1)
    tape.worker(Callback.WAIT_FOR_SAVE, 0)
    tape.bind(1)
    tape.worker(Callback.START_LOAD_KV, 1)
    begun = tape.now
    tape.after(10)
    tape.worker(Callback.WAIT_FOR_SAVE, 1)
    late = begun + int(second_loads_after_ms * 1e6)
    tape.transfer(Direction.LOAD, 1, [1, 2, 3], rank=1, started=late, ended=late)
    return check(tape)


def test_a_rank_that_loads_after_its_forward_is_named_and_no_other():
    (found,) = loaded_on_two_ranks(11)
    assert (found.rule, found.request) == ("W2b", 1)
    assert found.numbers["rank"] == 1


def second_group_loaded(ms):
    """The first layer group is loaded before the forward, the second so long after it began: its layer is waited for at 2 to 3 ms."""
    tape = Tape(groups=2)
    pages = [[1, 2, 3, 4], [5, 6, 7, 8]]
    tape.query(1, 100, 0, 96)
    tape.alloc(1, 96, pages)
    tape.build([(1, 0, 4, 100, pages)])
    tape.bind()
    tape.transfer(Direction.LOAD, 1, [1, 2, 3])
    tape.worker(Callback.START_LOAD_KV)
    begun = tape.now
    at = [(begun + int(start * 1e6), begun + int(end * 1e6)) for start, end in ((0.1, 0.2), (2, 3))]
    tape.hooks(at, [(end + 1000, end + 2000) for _, end in at])
    tape.after(4)
    when = begun + int(ms * 1e6)
    tape.transfer(Direction.LOAD, 1, [5, 6, 7], group=1, started=when, ended=when)
    tape.worker(Callback.WAIT_FOR_SAVE)
    return [found.rule for found in check(tape)]


def test_a_layer_group_may_be_loaded_in_the_hook_of_its_own_first_layer():
    assert second_group_loaded(2.5) == []
    assert second_group_loaded(3.5) == ["W2b"]


def test_a_rank_whose_passes_run_later_than_anothers_is_not_named_for_it():
    assert loaded_on_two_ranks(5) == []


def saved_on_two_ranks(*, second_returns=True):
    """Twenty requests, a second apart, whose pages are kept until both ranks have returned them."""
    tape = Tape(ranks=2)
    for number in range(1, 21):
        tape.prefill(number, 100, [[1, 2, 3, 4]])
        tape.finish(number, keeps=True, pages=[[1, 2, 3, 4]])
        for rank in range(2):
            tape.transfer(Direction.SAVE, number, [1, 2, 3], rank=rank)
            returned = [number] if second_returns or not rank else []
            tape.polled(rank, saving=[number], saved=returned)
        tape.idle(0, ms=500)
        tape.idle(1, ms=500)
    return tape


def test_a_rank_whose_journal_is_read_late_is_not_taken_for_a_late_rank():
    tape, joined = saved_on_two_ranks(), len(Tape(ranks=2).records)
    # Both are known; then all else of the leader's journal comes first.
    tape.records[joined:] = sorted(tape.records[joined:], key=lambda each: each[0])
    assert names(check(tape)) == []


def test_a_rank_that_returns_nothing_is_named():
    found = check(saved_on_two_ranks(second_returns=False))
    assert {each.rule for each in found} == {"W4"}
    assert {tuple(each.numbers["missing"]) for each in found} == {(1,)}


def watched(tape, direction, request, pages):
    now = tape.now
    tape.add(
        Transfer(
            direction, Source.OBSERVED, Tier.HOST, request, tape.step, 0, pages, PAGE_BYTES * len(pages), 0, now, now,
            0, 0, 0, 0, 0, None,
        )
    )  # fmt: skip


def test_a_watched_connector_that_loads_nothing_is_named_unless_copies_may_go_unseen():
    def play(*reports):
        tape = Tape()
        for report in reports:
            tape.add(report)
        tape.query(1, 100, 0, 96)
        tape.alloc(1, 96, [[1, 2, 3, 4]])
        tape.build([(1, 0, 4, 100, [[1, 2, 3, 4]])])
        tape.forward()
        return names(check(tape))

    gap = WatchGapSeen(next(iter(WatchGap)), 1, "connector.py:12")
    assert play() == []
    assert play(WatchReport(1, 0, True, [], [])) == ["N1"]
    assert play(WatchReport(1, 0, False, [gap], [])) == []


def test_a_negative_subscript_that_the_watch_saw_is_named():
    tape = Tape()
    tape.add(WatchReport(tape.now, 1, True, [], [(0, 63, 2)]))
    (found,) = check(tape)
    assert (found.rule, found.numbers["read_instead"]) == ("L1", 63)
    assert found.at_ns == tape.now


@pytest.mark.parametrize("longest_ms", [40, 60])
def test_a_poll_that_is_long_is_named_though_nothing_goes_in_or_out(longest_ms):
    tape = Tape()
    began = tape.now
    tape.after(900)
    tape.add(IdlePolls(tape.step, 12, longest_ms * 2_000_000, longest_ms * 1_000_000, began, tape.now))
    found = check(tape)
    if longest_ms < 50:
        assert found == []
        return
    (slow,) = found
    assert (slow.rule, slow.callback, slow.at_ns) == ("W5", "get_finished", began)
    assert (slow.numbers["took_ns"], slow.numbers["polls"]) == (60_000_000, 12)


def test_a_load_into_a_page_of_nobody_that_the_watch_saw_is_named():
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    watched(tape, Direction.LOAD, -1, [9])
    assert names(check(tape)) == ["S8"]


def test_what_is_kept_stays_within_bounds():
    checker = Checker()
    tape = Tape(slots=1 << 20)
    for request in range(1, 20_000):
        tape.query(request, 100, 0, 96)
        tape.alloc(request, 96, [[request * 4 + i for i in range(4)]])
    for source, record in tape.records:
        checker.feed(source, record)
    (run,) = checker._tracker._runs.values()
    assert len(run.requests) == 8192


def parked_and_returned(*, is_run):
    """A parked request whose id is returned: it is run then, or was cancelled; nothing was loaded for it."""
    tape = Tape()
    tape.prefill(1, 64, [[1, 2, 3]], offered=32)
    tape.query(2, 100, 0, 96, is_async=True)
    tape.alloc(2, 96, [[4, 5, 6, 7]])
    tape.decode(1, 64)
    tape.polled(loading=[2])
    tape.decode(1, 65)
    tape.polled(loaded=[2])
    if is_run:
        tape.build([(2, 96, 4, 100, [[4, 5, 6, 7]])])
        tape.forward()
    for position in range(66, 90):
        tape.decode(1, position)
    return names(check(tape))


def test_a_parked_request_that_is_cancelled_before_it_is_run_needs_no_load():
    assert "N1" not in parked_and_returned(is_run=False)
    assert "N1" in parked_and_returned(is_run=True)


@pytest.mark.parametrize("has_partial_blocks", [True, False])
def test_a_prompt_of_whole_blocks_shares_its_last_key_where_parts_of_blocks_are_offered(has_partial_blocks):
    tape = Tape()
    for request, prompt in ((1, 64), (2, 70)):
        tape.lookup(request, prompt, key=b"two blocks")
        told = tape.records[-1][1]
        tape.records[-1] = (tape.records[-1][0], msgspec.structs.replace(told, has_partial_blocks=has_partial_blocks))
        tape.query(request, prompt)
    assert ("S12d" in names(check(tape))) is not has_partial_blocks

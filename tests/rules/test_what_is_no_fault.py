"""What looks like a fault and is none, each beside the fault that it looks like."""

from __future__ import annotations

import msgspec
import pytest

from tests.rules.test_checker import check, names, on_another_boot
from tracekv.journal.records import Drop
from tracekv.journal.vocabulary import Callback, Direction, DropReason, Operation, Outcome, Source
from tracekv.rules import Checker
from tracekv.testing.corpus.tape import PAGE_BYTES, Tape

PAGES = [1, 2, 3, 4]
LATE_MS = 2000


def last(tape, **changes):
    """Change the record that was made last."""
    source, record = tape.records[-1]
    tape.records[-1] = (source, msgspec.structs.replace(record, **changes))


def served(*, saves=(1, 2, 3)):
    """A request that was computed and saved, and runs."""
    tape = Tape()
    tape.prefill(1, 100, [PAGES])
    if saves:
        tape.transfer(Direction.SAVE, 1, list(saves))
    return tape


# -- transfers --------------------------------------------------------------------------------------------------------------


def moved(pages, **changes):
    tape = served()
    tape.transfer(Direction.SAVE, 1, pages)
    last(tape, **changes)
    return names(check(tape))


def test_a_list_may_name_blocks_without_a_page_for_which_nothing_is_moved():
    assert moved([1, 2, -1], nbytes=2 * PAGE_BYTES) == []
    assert moved([1, 2, -1]) == ["L1", "L1c"]


def test_a_transfer_that_failed_has_moved_nothing_to_an_address_that_is_none():
    assert moved([1, 2, -1], error="OSError") == []
    assert moved([1, 2, -1], error=None) == ["L1", "L1c"]


@pytest.mark.parametrize("nbytes", [PAGE_BYTES, PAGE_BYTES // 2, 0])
def test_bytes_may_be_a_layers_part_of_the_pages(nbytes):
    assert moved([1, 2], nbytes=nbytes) == []
    assert moved([1, 2], nbytes=nbytes + 3 * PAGE_BYTES) == ["L1c"]


def test_bytes_that_only_the_watch_saw_may_be_any_part_of_the_pages():
    assert moved([1, 2], nbytes=100, source=Source.OBSERVED) == []
    assert moved([1, 2], nbytes=100) == ["L1c"]


def test_a_page_of_nobody_is_none_of_a_transfers_without_a_request():
    """What a connector reports without a request may be anything of its own; the watch sees where a load goes."""
    assert moved([9], request_id=-1) == []
    assert moved([9], request_id=-1, source=Source.OBSERVED) == []  # saved: read from a page that nobody has
    assert moved([9], request_id=-1, source=Source.OBSERVED, direction=Direction.LOAD) == ["S8"]


def test_what_is_loaded_past_an_asynchronous_offer_is_the_connectors_own_business():
    """Its pages were given with the offer, and what is honoured less is computed over (contract.md section 1.6)."""

    def play(is_async):
        tape = Tape()
        tape.query(1, 100, 0, 96, is_async=is_async)
        tape.alloc(1, 32, [PAGES])
        if is_async:
            tape.build()
            tape.transfer(Direction.LOAD, 1, [1, 2, 3])
            tape.polled(loading=[1], loaded=[1])
            tape.build([(1, 32, 68, 100, [PAGES])])
        else:
            tape.build([(1, 0, 68, 100, [PAGES])])
            tape.transfer(Direction.LOAD, 1, [1, 2, 3])
        tape.forward()
        return names(check(tape))

    assert play(is_async=True) == []
    assert play(is_async=False) == ["N5"]


# -- loads in time ------------------------------------------------------------------------------------------------------------


def loaded(late=None):
    """96 of 100 tokens are loaded before the forward; ``late(tape)`` comes behind it, in the same pass."""
    tape = Tape()
    tape.query(1, 100, 0, 96)
    tape.alloc(1, 96, [PAGES])
    tape.build([(1, 0, 4, 100, [PAGES])])
    tape.bind()
    tape.transfer(Direction.LOAD, 1, [1, 2, 3])
    tape.worker(Callback.START_LOAD_KV)
    tape.after(1)
    tape.worker(Callback.WAIT_FOR_SAVE)
    if late is not None:
        late(tape)
    return names(check(tape))


def test_a_save_behind_the_forward_is_no_late_load():
    assert loaded(lambda tape: tape.transfer(Direction.SAVE, 1, [1, 2, 3])) == []
    assert loaded(lambda tape: tape.transfer(Direction.LOAD, 1, [1, 2, 3])) == ["W2b"]


def test_a_load_of_a_later_pass_is_no_late_one_of_the_first():
    def play(is_later):
        def late(tape):
            if is_later:
                tape.build(cached=[(1, 100, 1, [[]])])
                tape.bind()
            tape.transfer(Direction.LOAD, 1, [1, 2, 3])

        return loaded(late)

    assert play(is_later=True) == []
    assert play(is_later=False) == ["W2b"]


def layer_by_layer(share):
    """Two layers; each one's ``share`` of the bytes is loaded in its own hook, the second's after the first was waited for."""
    tape = Tape(layers=2)
    tape.query(1, 100, 0, 96)
    tape.alloc(1, 96, [PAGES])
    tape.build([(1, 0, 4, 100, [PAGES])])
    tape.bind()
    tape.worker(Callback.START_LOAD_KV)
    waits = []
    for _ in range(2):
        began = tape.now
        tape.transfer(Direction.LOAD, 1, [1, 2, 3], nbytes=int(3 * PAGE_BYTES * share))
        tape.after(1)
        waits.append((began, tape.now))
        tape.after(0.1)
    tape.hooks(waits, [(end + 1000, end + 2000) for _, end in waits])
    tape.after(1)
    tape.worker(Callback.WAIT_FOR_SAVE)
    return names(check(tape))


def test_a_layers_part_of_the_pages_may_be_loaded_in_its_own_hook():
    assert layer_by_layer(1 / 2) == []
    assert layer_by_layer(1) == ["W2b"]


def test_a_hit_whose_blocks_have_all_left_the_window_needs_no_bytes():
    def play(first):
        tape = served()
        tape.query(2, 140, 0, 64)
        tape.alloc(2, 64, [[*first, 7, 8, 9]])
        tape.build([(2, 0, 76, 140, [[*first, 7, 8, 9]])])
        tape.forward()
        return names(check(tape))

    assert play([-1, -1]) == []
    assert play([5, 6]) == ["N1"]


# -- the end ------------------------------------------------------------------------------------------------------------------


def kept(*, before=False, after=None, dropped=False, reports=True):
    """Pages are kept at the end; whether something was saved before it, or what is moved behind it."""
    tape = Tape()
    if reports:
        tape.prefill(9, 64, [[8, 9]])
        tape.transfer(Direction.SAVE, 9, [8, 9])
    tape.prefill(1, 100, [PAGES])
    if before:
        tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.after(1)
    tape.finish(1, keeps=True, pages=[PAGES])
    tape.after(1)
    if after is not None:
        tape.transfer(after, 1, [1, 2, 3])
    if dropped:
        tape.add(Drop(tape.now, Direction.SAVE, DropReason.STORE_DOWN, 1, 0, 3, 3 * PAGE_BYTES))
    tape.polled(saving=[1], saved=[1])
    return names(check(tape))


def test_pages_are_kept_for_a_save_that_comes_behind_the_end():
    assert kept(after=Direction.SAVE) == []
    assert "S13b" in kept(after=Direction.LOAD)
    assert kept(before=True) == ["S13b"]


def test_pages_that_were_kept_for_a_save_that_was_dropped_are_no_fault():
    assert kept(dropped=True) == []
    assert kept() == ["S13b"]


def test_who_reports_nothing_may_keep_pages_for_what_nobody_sees():
    assert kept(reports=False) == []
    assert kept(reports=True) == ["S13b"]


@pytest.mark.parametrize("pages", [PAGES, []])
def test_a_request_that_is_being_saved_may_be_kept_once_more(pages):
    """The overlap loop announces it again, with its pages (contract-v2.md section 4)."""
    tape = served()
    tape.finish(1, keeps=True, pages=[PAGES])
    tape.decode(2, 7)
    tape.finish(1, keeps=True, pages=[pages])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.polled(saving=[1], saved=[1])
    assert names(check(tape)) == ([] if pages else ["S13c"])


def test_a_first_end_without_pages_may_be_kept():
    tape = served()
    tape.finish(1, keeps=True)
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.polled(saving=[1], saved=[1])
    assert names(check(tape)) == []


def test_a_transfer_that_failed_after_the_end_touched_nothing():
    def play(error):
        tape = served()
        tape.finish(1, pages=[PAGES])
        tape.after(1)
        tape.transfer(Direction.SAVE, 1, [1, 2, 3])
        last(tape, error=error)
        return names(check(tape))

    assert play("OSError") == []
    assert play(None) == ["W9"]


@pytest.mark.parametrize("ending", ["is finished", "is parked", "runs", "is forgotten"])
def test_a_request_is_missed_only_if_it_neither_ended_nor_waits_nor_runs(ending):
    tape = Tape()
    if ending == "is parked":
        tape.query(1, 100, 0, 96, is_async=True)
        tape.alloc(1, 96, [PAGES])
        tape.build()
        tape.polled(loading=[1])
    else:
        tape.prefill(1, 100, [PAGES])
    if ending == "is finished":
        tape.finish(1, pages=[PAGES])
    for number in range(20):
        tape.after(20_000)
        if ending == "runs":
            tape.decode(1, 100 + number)
        else:
            tape.decode(2, 7)
    assert ("S14" in names(check(tape))) is (ending == "is forgotten")


def test_a_load_that_nobody_gave_is_unasked_even_if_the_requests_end_was_refused():
    def play(**returned):
        tape = served()
        tape.finish(1, pages=[PAGES])
        tape.polled(**returned)
        return names(check(tape))

    assert play(saved=[1]) == ["S13"]
    assert play(loaded=[1]) == ["W3"]


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_clocks_of_two_machines_tell_nothing_of_a_transfer_behind_the_end(is_elsewhere):
    tape = Tape(ranks=2)
    tape.prefill(1, 100, [PAGES])
    tape.finish(1, pages=[PAGES])
    tape.after(1)
    tape.transfer(Direction.SAVE, 1, [1, 2, 3], rank=1)
    if is_elsewhere:
        on_another_boot(tape, days=0)
    assert names(check(tape)) == ([] if is_elsewhere else ["W9"])


@pytest.mark.parametrize("is_dropped", [True, False])
def test_later_chunks_that_were_dropped_were_not_forgotten(is_dropped):
    tape = Tape()
    tape.query(1, 128)
    tape.alloc(1, 0, [PAGES])
    tape.build([(1, 0, 64, 128, [PAGES])])
    tape.forward()
    tape.transfer(Direction.SAVE, 1, [1, 2])
    tape.build(cached=[(1, 64, 64, [[]])])
    tape.forward()
    if is_dropped:
        tape.add(Drop(tape.now, Direction.SAVE, DropReason.STORE_DOWN, 1, 0, 2, 2 * PAGE_BYTES))
    tape.finish(1, pages=[PAGES])
    assert names(check(tape)) == ([] if is_dropped else ["S9"])


def test_a_save_that_is_returned_late_is_no_load_that_is_noticed_late():
    tape = Tape()
    tape.query(1, 100, 0, 96)
    tape.alloc(1, 96, [PAGES])
    tape.build([(1, 0, 4, 100, [PAGES])])
    tape.bind()
    tape.transfer(Direction.LOAD, 1, [1, 2, 3])
    tape.worker(Callback.START_LOAD_KV)
    tape.after(1)
    tape.worker(Callback.WAIT_FOR_SAVE)
    tape.finish(1, keeps=True, pages=[PAGES])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.polled(saving=[1])
    tape.after(LATE_MS)
    tape.polled(saved=[1])
    assert names(check(tape)) == []


# -- metadata, pages and passes -----------------------------------------------------------------------------------------------


def bound(*, has_metadata=True, ranks=2, **second):
    tape = Tape(ranks=ranks)
    tape.query(1, 100)
    tape.alloc(1, 0, [PAGES])
    tape.build([(1, 0, 100, 100, [PAGES])], has_metadata=has_metadata)
    for rank in range(ranks):
        tape.bind(rank, **(second if rank == ranks - 1 else {}))
        tape.worker(Callback.START_LOAD_KV, rank)
    return names(check(tape))


def test_metadata_may_be_empty_everywhere():
    assert bound(ranks=1, has_metadata=False, nbytes=4) == []
    assert bound(ranks=1, has_metadata=True, nbytes=4) == ["S7d"]


def test_metadata_without_a_digest_is_not_compared():
    assert bound(digest=None) == []
    assert bound(digest=b"another") == ["S7c"]


@pytest.mark.parametrize("is_behind_a_gap", [True, False])
def test_pages_may_be_told_without_a_query_where_that_may_lie_in_a_gap(is_behind_a_gap):
    tape = served()
    tape.alloc(7, 0, [[9]])
    checker = Checker()
    for source, record in tape.records[:-1]:
        checker.feed(source, record)
    if is_behind_a_gap:
        checker.lost("rank0", 5)
    checker.feed(*tape.records[-1])
    assert names(checker.findings) == ([] if is_behind_a_gap else ["S6"])


def test_a_flat_list_of_several_groups_may_be_empty():
    def play(flat):
        tape = Tape(groups=2)
        tape.query(1, 100)
        tape.alloc(1, 0, [flat], flat=True)
        return names(check(tape))

    assert play([]) == []
    assert play([1]) == ["S6b"]


def test_a_pass_that_only_generates_may_replay_a_graph():
    def play(*, prefills):
        tape = Tape()
        tape.query(1, 100)
        tape.alloc(1, 0, [PAGES])
        tape.build([(1, 0, 100, 100, [PAGES])])
        tape.bind()
        tape.worker(Callback.START_LOAD_KV)
        tape.hooks([(tape.now + 1, tape.now + 2)], [(tape.now + 3, tape.now + 4)])
        tape.after(1)
        tape.worker(Callback.WAIT_FOR_SAVE)
        if prefills:
            tape.prefill(2, 50, [[7, 8]])
        else:
            tape.decode(1, 100)
        return names(check(tape))

    assert play(prefills=False) == []
    assert play(prefills=True) == ["W7"]


@pytest.mark.parametrize("is_registered", [True, False])
def test_before_the_layout_is_known_no_layer_and_no_group_is_unknown(is_registered):
    tape = Tape(ranks=1)
    if not is_registered:  # what came first lies in a gap
        tape.records = tape.records[:0]
    tape.query(1, 100)
    tape.alloc(1, 0, [PAGES])
    tape.build([(1, 0, 100, 100, [PAGES])])
    tape.bind()
    tape.worker(Callback.START_LOAD_KV)
    hooks = [(tape.now + n, tape.now + n + 1) for n in (1, 3)]  # of two layers; the layout has one
    tape.hooks(hooks, [(end, end + 1) for _, end in hooks])
    tape.after(1)
    tape.transfer(Direction.SAVE, 1, [1], group=3)
    tape.worker(Callback.WAIT_FOR_SAVE)
    assert names(check(tape)) == (["L1b", "W7b"] if is_registered else [])


# -- keys and objects ---------------------------------------------------------------------------------------------------------


def stored_twice(**second):
    tape = Tape(ranks=2)
    tape.stored(b"object", rank=0)
    tape.stored(b"object", rank=1)
    last(tape, **second)
    return names(check(tape))


@pytest.mark.parametrize(
    "second",
    [
        {"operation": Operation.READ},
        {"outcome": Outcome.TIMEOUT},
        {"key": None},
        {"rank": 0},
        {"rank": 0, "layer_group": None},
    ],
)
def test_an_object_may_be_read_or_tried_for_by_anyone_and_written_again_by_its_writer(second):
    assert stored_twice(**second) == []
    assert stored_twice() == ["S12b"]


@pytest.mark.parametrize("is_one_engine", [True, False])
def test_an_adapters_id_counts_within_its_engine(is_one_engine):
    tapes = [Tape(), Tape()]
    for adapter, tape in enumerate(tapes, 1):
        tape.lookup(1, 100, key=b"three blocks")
        tape.query(1, 100, lora=adapter)
    first, second = (tape.records for tape in tapes)
    if is_one_engine:
        tapes[0].records = first + second[-2:]
    else:
        # Another process, with a run of its own.
        other = [("other", each) for _, each in second]
        at = next(i for i, (_, each) in enumerate(other) if type(each).__name__ == "RunJoined")
        other[at] = ("other", msgspec.structs.replace(other[at][1], run_id=bytes(16)))
        tapes[0].records = first + other
    assert names(check(tapes[0])) == (["S12"] if is_one_engine else [])


# -- time ---------------------------------------------------------------------------------------------------------------------


def asked_for(ms, *, io_ms, request_id=None, outside_ms=0):
    """A query that takes so long, and a store operation of so long within it or (in part) before it."""
    tape = Tape()
    began = tape.now - int(outside_ms * 1e6)
    tape.stored(b"object", operation=Operation.READ)
    last(tape, request_id=request_id, started_ns=began, ended_ns=began + int(io_ms * 1e6))
    tape.query(1, 100, took_us=int(ms * 1000))
    return names(check(tape))


def test_a_store_operation_is_the_querys_own_if_it_lies_in_it_fills_it_and_is_nobody_elses():
    assert asked_for(10, io_ms=9) == asked_for(10, io_ms=9, request_id=1) == ["P1"]
    assert asked_for(10, io_ms=9, request_id=2) == []
    assert asked_for(10, io_ms=9, outside_ms=5) == []
    assert asked_for(10, io_ms=5) == []
    assert asked_for(4, io_ms=3.9) == []


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.SAVE])
def test_a_load_that_is_noticed_late_holds_its_request_up(direction):
    """The negative control of the save above: the same with the id of a load, and what is moved for it."""
    tape = served(saves=())
    tape.query(2, 100, 0, 96, is_async=True)
    tape.alloc(2, 96, [[5, 6, 7, 8]])
    tape.build()
    tape.bind()
    tape.transfer(direction, 2, [5, 6, 7])
    tape.worker(Callback.START_LOAD_KV)
    tape.worker(Callback.WAIT_FOR_SAVE)
    tape.polled(loading=[2])
    tape.after(LATE_MS)
    tape.polled(loaded=[2])
    assert ("P3" in names(check(tape))) is (direction is Direction.LOAD)

"""Columns hold what the records hold, of any size and shape, and name those that are to be decoded one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekv.journal.columns import NIL, Columns, alike
from tracekv.journal.records import (
    Call,
    Drop,
    Finding,
    FinishedCall,
    LayerHooks,
    RequestResetCall,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Direction, DropReason, Operation, Outcome, Source, Tier

encode = msgspec.msgpack.encode
numbers = st.one_of(st.integers(0, 300), st.integers(-(1 << 62), 1 << 62))
maybe = st.none() | numbers
texts = st.none() | st.text(max_size=300)
pages = st.lists(st.integers(-1, 300) | st.integers(-1, 1 << 40), max_size=40)

transfers = st.builds(
    Transfer, st.sampled_from(Direction), st.sampled_from(Source), st.sampled_from(Tier), numbers, numbers, numbers, pages,
    *[numbers] * 9, st.none() | st.just("OSError"),
)  # fmt: skip
operations = st.builds(
    StoreOperation, st.sampled_from(Operation), st.sampled_from(Outcome), st.text(max_size=20), texts,
    st.none() | st.binary(max_size=300), maybe, maybe, *[numbers] * 8, numbers, st.text(max_size=40), st.none(), numbers,
)  # fmt: skip


def nil(value: int | None) -> int:
    return NIL if value is None else value


@settings(max_examples=40)
@given(st.lists(transfers, max_size=12))
def test_numbers_words_and_lists_are_those_of_the_records(records: list[Transfer]) -> None:
    columns = Columns(Transfer, list(map(encode, records)))
    words = [columns.words(kind) for kind in (Direction, Source, Tier)]
    heads = [columns.ints() for _ in range(3)]
    slots, absent = columns.counts()
    rest = [columns.ints() for _ in range(9)]
    columns.nil()
    assert columns.odd.tolist() == [record.error is not None for record in records]
    for at, record in enumerate(records):
        if record.error is None:
            told = msgspec.structs.astuple(record)
            assert tuple(found[which[at]] for which, found in words) == told[:3]
            assert [column[at] for column in heads] == list(told[3:6])
            assert (slots[at], absent[at]) == (len(record.pages), sum(page < 0 for page in record.pages))
            assert [column[at] for column in rest] == list(told[7:16])


@settings(max_examples=40)
@given(st.lists(operations, max_size=12))
def test_what_is_skipped_may_be_anything(records: list[StoreOperation]) -> None:
    columns = Columns(StoreOperation, list(map(encode, records)))
    columns.skip(5)
    requests, groups = columns.optional_ints(), columns.optional_ints()
    columns.skip(9)
    columns.skip()
    columns.nil()
    asked = columns.ints()
    assert not columns.odd.any()
    assert requests.tolist() == [nil(record.request_id) for record in records]
    assert groups.tolist() == [nil(record.layer_group) for record in records]
    assert asked.tolist() == [record.requests for record in records]


@settings(max_examples=40)
@given(st.lists(st.builds(FinishedCall, *[numbers] * 4, st.none(), *[pages] * 4, texts), max_size=20))
def test_lists_are_skipped_with_all_that_is_in_them(records: list[FinishedCall]) -> None:
    columns = Columns(FinishedCall, list(map(encode, records)))
    columns.skip(8)
    last, _ = columns.counts()
    assert not columns.odd.any()
    assert last.tolist() == [len(record.loading_returned) for record in records]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70), st.booleans()), max_size=20))
def test_bytes_are_read_where_they_lie(shapes: list[tuple[int, int, bool]]) -> None:
    records = [LayerHooks(at, bytes([at]) * a * 16, bytes([at + 1]) * b * 16, s) for at, (a, b, s) in enumerate(shapes)]
    columns = Columns(LayerHooks, list(map(encode, records)))
    columns.skip()
    waits, saves, in_seconds = columns.blobs(), columns.blobs(), columns.truths()
    assert not columns.odd.any()
    assert in_seconds.tolist() == [record.in_seconds for record in records]
    for at, record in enumerate(records):
        for (begins, lengths), told in ((waits, record.waits), (saves, record.saves)):
            assert columns.read(begins[[at]], lengths[at]).tobytes() == told


@settings(max_examples=40)
@given(st.lists(transfers, min_size=1, max_size=8), st.data())
def test_what_is_damaged_harms_no_other_and_reads_nothing_outside(records: list[Transfer], data: Any) -> None:
    payloads = [encode(msgspec.structs.replace(record, error=None)) for record in records]
    which = data.draw(st.integers(0, len(payloads) - 1))
    damaged = bytearray(payloads[which][: data.draw(st.integers(0, len(payloads[which])))])
    for _ in range(data.draw(st.integers(0, 5)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    payloads[which] = bytes(damaged)
    columns = Columns(Transfer, payloads)
    columns.skip(3)
    requests = columns.ints()
    columns.skip(2)
    columns.counts()
    columns.skip(2)
    started = columns.ints()
    columns.skip(6)
    columns.nil()
    for at, record in enumerate(records):
        if at != which:
            assert not columns.odd[at]
            assert (requests[at], started[at]) == (record.request_id, record.started_ns)


def test_a_word_that_this_version_does_not_know_is_odd() -> None:
    known = msgspec.msgpack.decode(encode(Drop(1, Direction.SAVE, DropReason.NO_SPACE, None, None, 1, 1)))
    others = [[*known[:2], word, *known[3:]] for word in ("sideways", "", None, 7, "save")]
    columns = Columns(Drop, list(map(encode, [known, *others])))
    assert columns.ints().tolist() == [1] * 6
    which, words = columns.words(Direction)
    assert columns.odd.tolist() == [False, True, True, True, True, False]
    assert words[which[0]] is words[which[5]] is Direction.SAVE


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_a_number_that_a_column_cannot_hold_is_odd(number: int) -> None:
    columns = Columns(RequestResetCall, [encode(RequestResetCall(10, 1, 2, 3, None, each)) for each in (number, 5)])
    columns.skip(5)
    requests = columns.ints()
    assert columns.odd.tolist() == [True, False]
    assert requests[1] == 5


@pytest.mark.parametrize("value", [None, True, False, 1.5, "5", [5]])
def test_what_is_no_number_where_one_has_to_be_is_odd(value: object) -> None:
    columns = Columns(Call, [encode([10, 38, value, 2, 3, None]), encode([10, 38, 7, 2, 3, None])])
    columns.ints()
    started = columns.ints()
    assert columns.odd.tolist() == [True, False]
    assert started[1] == 7


@pytest.mark.parametrize("length", [0, 1, 31, 32, 253, 254, 255, 256, 65_535, 65_536])
def test_texts_and_bytes_of_any_length_are_skipped(length: int) -> None:
    columns = Columns(Drop, [encode([43, "x" * length, b"x" * length, 7])])
    columns.skip(2)
    assert columns.ints().tolist() == [7]
    assert not columns.odd.any()


@pytest.mark.parametrize(("length", "is_odd"), [(64, False), (65, True), (70_000, True)])
def test_a_long_list_is_left_to_who_decodes(length: int, is_odd: bool) -> None:  # a column of the table
    payload = encode([43, [1] * length, 7])
    counting, skipping = Columns(Drop, [payload]), Columns(Drop, [payload])
    counts, _ = counting.counts()
    skipping.skip()
    assert (counting.odd[0], skipping.odd[0]) == (is_odd, is_odd)
    assert is_odd or (counts[0] == length and skipping.ints()[0] == 7)


def test_a_record_of_another_kind_or_with_fewer_fields_is_odd() -> None:
    whole = Call(38, 1, 2, 3, None)
    shorter = msgspec.msgpack.encode([10, 38, 1])
    columns = Columns(Call, [encode(whole), encode(Finding(1, "X", "note", "", "")), shorter, b"", b"\xc0"])
    callbacks = columns.ints()
    columns.skip(4)
    assert columns.odd.tolist() == [False, True, True, True, True]
    assert callbacks[0] == 38


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2), st.booleans()), max_size=40))
def test_rows_that_are_alike_stand_together(rows: list[tuple[int, int, bool]]) -> None:
    first, second, chosen = (np.array([row[at] for row in rows], kind) for at, kind in ((0, int), (1, int), (2, bool)))
    found = {tuple(values): places.tolist() for values, places in alike(chosen, first, second)}
    told: dict[tuple[int, int], list[int]] = {}
    for at, (one, other, is_chosen) in enumerate(rows):
        if is_chosen:
            told.setdefault((one, other), []).append(at)
    assert found == told

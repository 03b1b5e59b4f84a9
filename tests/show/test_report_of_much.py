"""A large run is taken in bulk: the report counts the same, and says the same of every lane."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.show.conftest import Write
from tests.views.sample_run import bound, bring_up, call, finished, idle, looked_up, queried, stored, transferred
from tracekv.bench.journals import write_journals
from tracekv.journal.records import LayerHooks
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Callback, Direction, Outcome, Source, Tier
from tracekv.views import runs
from tracekv.views.report_data import ReportData

_US = 1_000
_PASS_NS = 100 * _US


@pytest.fixture(scope="module")
def much(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("much")
    write_journals(folder, 6_000, runs=1)
    return folder


def built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, large: int, request: int | None = None, most_bars: int = 4000
) -> dict[str, Any]:
    monkeypatch.setattr(runs, "LARGE", large)
    with scan([folder]) as found:
        chosen = [] if request is None else [(run, request) for run in runs.runs_of(found.processes)]
        return ReportData(found, most_bars=most_bars, chosen=chosen).build(None)


def lanes(told: dict[str, Any]) -> Counter[tuple[str, str, str]]:
    """Bars and the time that they were busy, by process and lane."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for at, process in enumerate(told["timeline"]["processes"]):
        for lane in process["lanes"]:
            for _, _, length, _, count, _, facts in lane["bars"]:
                sums[f"{at} {process['name']}", lane["label"], "bars"] += count
                sums[f"{at} {process['name']}", lane["label"], "busy"] += facts["busy_ns"] if count > 1 else length
    return sums


def test_a_run_taken_in_bulk_has_the_numbers_and_the_lanes_of_one_taken_record_by_record(
    much: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one, in_bulk = built(much, monkeypatch, large=1 << 40), built(much, monkeypatch, large=1)

    assert in_bulk["summary"] == one_by_one["summary"]
    assert in_bulk["requests"] == one_by_one["requests"]
    assert lanes(in_bulk) == lanes(one_by_one)
    assert in_bulk["timeline"]["width_ns"] > 0
    assert in_bulk["timeline"]["drawn"] <= 4000 < in_bulk["timeline"]["bars"] == one_by_one["timeline"]["bars"]


def test_a_large_run_that_is_narrowed_to_a_request_is_drawn_as_finely_as_a_small_one(
    much: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one, in_bulk = (
        built(much, monkeypatch, large=large, request=2060, most_bars=40_000) for large in (1 << 40, 1)
    )

    assert in_bulk["summary"] == one_by_one["summary"]
    assert in_bulk["requests"] == one_by_one["requests"]
    assert lanes(in_bulk) == lanes(one_by_one)
    assert 0 < in_bulk["timeline"]["drawn"] == in_bulk["timeline"]["bars"]
    every = built(much, monkeypatch, large=1, most_bars=40_000)["timeline"]
    assert in_bulk["timeline"]["bars"] < every["drawn"] < every["bars"]


def passes(*, in_seconds: bool) -> list[Any]:
    """Three hundred passes of two layers; in some a layer isn't called or raises, a call raises, or polls come in numbers."""
    records: list[Any] = bring_up()
    for step in range(1, 301):
        at = step * _PASS_NS
        waits = [(at + 20 * _US, at + 22 * _US), (at + 30 * _US, at + 33 * _US)]
        saves = [(at + 25 * _US, at + 27 * _US), (at + 35 * _US, at + 36 * _US)]
        if step % 100 == 0:
            waits[1] = (0, 0)
        if step % 130 == 0:
            saves[1] = (at + 35 * _US, 0)
        one, other = (struct.pack("4q", *(t for pair in pairs for t in pair)) for pairs in (waits, saves))
        if in_seconds:
            one, other = (struct.pack("4d", *(t / 1e9 for t in struct.unpack("4q", each))) for each in (one, other))
        raised = "ValueError" if step % 50 == 0 else None
        records += [
            bound(step, at, at + 5 * _US),
            call(Callback.START_LOAD_KV, at + 6 * _US, at + 10 * _US, step, raised),
            LayerHooks(step, one, other, in_seconds),
            call(Callback.WAIT_FOR_SAVE, at + 40 * _US, at + (90 if step == 7 else 44) * _US, step),
            idle(step, 3 if step % 70 == 0 else 1, at + 50 * _US, at + 52 * _US, 2 * _US),
        ]
    return records


@pytest.mark.parametrize("in_seconds", [False, True])
def test_what_raised_and_what_was_not_called_is_told_in_bulk_as_one_by_one(
    write: Write, monkeypatch: pytest.MonkeyPatch, *, in_seconds: bool
) -> None:
    folder = write(passes(in_seconds=in_seconds))
    one_by_one, in_bulk = built(folder, monkeypatch, large=1 << 40), built(folder, monkeypatch, large=1)

    assert in_bulk["summary"] == one_by_one["summary"]
    assert {each["errors"] for each in in_bulk["summary"]["callbacks"] if each["name"] == "worker.start_load_kv"} == {6}
    assert lanes(in_bulk) == lanes(one_by_one)


def newer(record: Any, **changes: object) -> Any:
    """A record as another version might write it, with values that this one's has no type for."""
    kind = type(record)
    loose = msgspec.defstruct("Newer", kind.__struct_fields__, array_like=True, tag=kind.__struct_config__.tag)
    return loose(**(msgspec.structs.asdict(record) | changes))


def moves() -> list[Any]:
    """Requests with transfers and store operations: some failed, some only planned, of huge ids, for none, or of a newer version."""
    records: list[Any] = bring_up()
    for number in range(200):
        at = number * _PASS_NS
        request_id = (1 << 63) + number if number % 20 == 0 else number
        shift = {"request_id": request_id, "error": "OSError" if number % 9 == 0 else None}
        source = Source.PLANNED if number % 7 == 0 else Source.REPORTED
        outcome = Outcome.TIMEOUT if number % 11 == 0 else Outcome.OK
        records += [
            queried(at + 1 * _US, at + 2 * _US, request_id),
            transferred(Direction.LOAD, 0, [4, -1, 6], 80, at + 3 * _US, at + 5 * _US, source=source, **shift),
            transferred(Direction.SAVE, 1, [7], 90, at + 3 * _US, at + 900 * _US, tier=Tier.DISK, **shift),
            stored(at + 4 * _US, at + 5 * _US, request_id=None if number % 5 == 0 else request_id, outcome=outcome),
            finished(at + 7 * _US, at + 8 * _US, request_id),
        ]
    load = transferred(Direction.LOAD, 0, [4], 80, 1, 2)
    strange = [{"direction": "sideways"}, {"tier": "tape"}, {"nbytes": None}, {"ended_ns": None}, {"started_ns": True}]
    many = transferred(Direction.LOAD, 0, list(range(100)), 8000, 5 * _US, 6 * _US)
    return [*records, *(newer(load, **changes) for changes in strange), many]


def test_moves_of_every_kind_are_told_in_bulk_as_one_by_one(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(moves())
    one_by_one, in_bulk = built(folder, monkeypatch, large=1 << 40), built(folder, monkeypatch, large=1)

    assert in_bulk["summary"] == one_by_one["summary"]
    assert in_bulk["requests"] == one_by_one["requests"]
    assert lanes(in_bulk) == lanes(one_by_one)
    moved = [each for group in in_bulk["summary"]["groups"] for each in group["moved"]]
    assert {(each["direction"], each["failures"]) for each in moved if each["failures"]} == {
        ("load", 4),
        ("load", 19),
        ("save", 23),
    }


def odd_times() -> list[Any]:
    """Calls, queries, lookups and moves with times that are none: an end before the start, more than 63 bits, or no number."""
    huge = 1 << 63
    records = passes(in_seconds=False)
    for number, (start, end) in enumerate(
        ((10 * _US, 3 * _US), (huge, huge + 5), (9 * _US, huge), (12 * _US, 14 * _US))
    ):
        records += [
            call(Callback.WAIT_FOR_SAVE, start, end, step=huge if number == 3 else 1),
            bound(2, start, end),
            queried(start, end, 900 + number),
            looked_up(start, end, 900 + number),
            transferred(Direction.LOAD, 0, [4], 80, start, end),
            stored(start, end),
            newer(call(Callback.START_LOAD_KV, 1, 2, 1), started_ns=None),
        ]
    return records


@pytest.mark.parametrize("request_id", [None, 900, 903])
def test_times_that_are_none_are_told_in_bulk_as_one_by_one(
    write: Write, monkeypatch: pytest.MonkeyPatch, request_id: int | None
) -> None:
    folder = write(odd_times())
    one_by_one, in_bulk = (built(folder, monkeypatch, large=large, request=request_id) for large in (1 << 40, 1))

    assert in_bulk["summary"] == one_by_one["summary"]
    assert in_bulk["requests"] == one_by_one["requests"]
    assert lanes(in_bulk) == lanes(one_by_one)


def test_the_sums_tell_one_call_more(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    # The negative control of the tests above.
    records = passes(in_seconds=False)
    more = [*records, msgspec.structs.replace(records[-2], started_ns=records[-2].ended_ns)]
    fewer, told = (built(write(each, name), monkeypatch, large=1) for each, name in ((records, "a"), (more, "b")))

    assert told["summary"] != fewer["summary"]
    assert lanes(told) != lanes(fewer)

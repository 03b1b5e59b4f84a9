"""Chrome trace events: the format's rules, lanes, counters, arrows, nanoseconds."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.show.conftest import Write
from tests.show.trace_events import problems_of, times_in
from tests.views.sample_run import (
    bound,
    bring_up,
    call,
    joined,
    started,
    the_run,
    transferred,
    wrapped,
)
from tracekv.cli.app import app
from tracekv.journal.vocabulary import Callback, Direction, Side


def exported(folder: Path, **environ: str) -> str:
    done = CliRunner().invoke(app, ["export", "perfetto", str(folder), "-o", str(folder / "out.json")], env=environ)
    assert done.exit_code == 0, done.output
    return (folder / "out.json").read_text()


def events_of(text: str, phase: str) -> list[dict]:
    return [event for event in json.loads(text, parse_float=Decimal)["traceEvents"] if event["ph"] == phase]


def test_a_run_keeps_the_rules_of_the_format(journals: Path) -> None:
    assert problems_of(exported(journals)) == []


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ('{"traceEvents":[]}', "displayTimeUnit"),
        ("[]", "traceEvents"),
        ('{"ph":"X","pid":1,"tid":1,"ts":1,"name":"a"}', "without a duration"),
        ('{"ph":"Q","pid":1,"tid":1,"ts":1,"name":"a"}', "unknown phase"),
        ('{"ph":"X","pid":1,"tid":1,"ts":-1,"dur":1,"name":"a"}', "no time"),
        ('{"ph":"C","pid":1,"ts":1,"name":"a","args":{"a":"b"}}', "without numbers"),
        ('{"ph":"M","pid":1,"tid":1,"ts":0,"name":"thread_name","args":{}}', "unknown metadata"),
        (
            '{"ph":"X","pid":1,"tid":1,"ts":1,"dur":5,"name":"a"},{"ph":"X","pid":1,"tid":1,"ts":3,"dur":5,"name":"b"}',
            "overlap",
        ),
        ('{"ph":"f","pid":1,"tid":1,"ts":1,"name":"a","cat":"c","id":1}', "from nowhere"),
        ('{"ph":"s","pid":1,"tid":1,"ts":1,"name":"a","cat":"c","id":1}', "goes nowhere"),
        (
            '{"ph":"s","pid":1,"tid":1,"ts":9,"name":"a","cat":"c","id":1},{"ph":"f","pid":1,"tid":1,"ts":1,"name":"a","cat":"c","id":1}',
            "back in time",
        ),
    ],
)
def test_the_rules_find_what_breaks_them(broken: str, problem: str) -> None:
    text = broken if broken[:2] != '{"' or "traceEvents" in broken else ""
    text = text or f'{{"displayTimeUnit":"ns","traceEvents":[{broken}]}}'

    assert problem in " ".join(problems_of(text))


def test_each_process_has_its_lanes_in_the_order_in_which_they_stand(journals: Path) -> None:
    named = {e["tid"]: e["args"]["name"] for e in events_of(exported(journals), "M") if e["name"] == "thread_name"}

    assert [named[track] for track in sorted(named)] == [
        "requests",
        "events",
        "lookups",
        "scheduler callbacks",
        "worker callbacks",
        "forward passes",
        "layer hooks, group 0",
        "layer hooks, group 1",
        "load, group 0",
        "load, group 1",
        "save, group 0",
        "store put",
    ]


def test_processes_are_named_and_ordered_by_rank(write: Write) -> None:
    write([*bring_up()[:-1], joined(rank=0, world=2)], process="a")
    folder = write([started(), wrapped(Side.WORKER), joined(rank=1, world=2)], process="b")
    told = events_of(exported(folder), "M")

    assert sorted(e["args"]["name"] for e in told if e["name"] == "process_name") == [
        "rank 0, node-1 pid 4711",
        "rank 1, node-1 pid 4711",
    ]
    assert sorted(e["args"]["sort_index"] for e in told if e["name"] == "process_sort_index") == [0, 1]
    assert len({e["pid"] for e in told}) == 2


def test_times_have_every_nanosecond(journals: Path) -> None:
    text = exported(journals)
    (lookup,) = [event for event in events_of(text, "X") if event["name"].startswith("lookup")]

    assert (lookup["ts"], lookup["dur"]) == (Decimal("1.010"), Decimal("0.080"))
    assert all(len(time.partition(".")[2]) == 3 for time in times_in(text) if time != "0")
    assert json.loads(text)["displayTimeUnit"] == "ns"


def test_arrows_lead_from_a_load_to_the_hook_that_waited_for_it(journals: Path) -> None:
    text = exported(journals)
    bars = {(e["tid"], e["name"]): e for e in events_of(text, "X")}
    names = {e["tid"]: e["args"]["name"] for e in events_of(text, "M") if e["name"] == "thread_name"}
    ends = {e["id"]: e for e in events_of(text, "f")}

    assert [(names[s["tid"]], names[ends[s["id"]]["tid"]], ends[s["id"]]["ts"]) for s in events_of(text, "s")] == [
        ("load, group 0", "layer hooks, group 0", Decimal("1.600")),
        ("load, group 1", "layer hooks, group 1", Decimal("1.800")),
    ]
    assert all(end["bp"] == "e" for end in ends.values())
    assert ("wait_for_layer_load 2" in {name for _, name in bars}) is True


def test_counters_tell_bytes_in_flight_and_bandwidth_each_way(write: Write) -> None:
    load = transferred(Direction.LOAD, 0, [1], 1000, 10_000, 20_000)
    text = exported(write([load, transferred(Direction.SAVE, 0, [1], 500, 15_000, 25_000)]))
    told = [(e["name"], e["ts"], *e["args"].values()) for e in events_of(text, "C")]

    assert told == [
        ("load: bytes in flight", Decimal(10), 1000),
        ("load: bandwidth", Decimal(10), 100_000_000),
        ("save: bytes in flight", Decimal(15), 500),
        ("save: bandwidth", Decimal(15), 50_000_000),
        ("load: bytes in flight", Decimal(20), 0),
        ("load: bandwidth", Decimal(20), 0),
        ("save: bytes in flight", Decimal(25), 0),
        ("save: bandwidth", Decimal(25), 0),
    ]


def test_loads_at_the_same_time_get_tracks_of_their_own(write: Write) -> None:
    loads = [transferred(Direction.LOAD, 0, [page], 10, 1500, 1600 + page) for page in range(3)]
    text = exported(write([bound(), *loads, call(Callback.WAIT_FOR_SAVE, 1700, 1800)]))

    assert problems_of(text) == []
    assert len({e["tid"] for e in events_of(text, "X") if e["name"] == "load host"}) == 3


def test_request_ids_are_hashed_where_the_setting_says_so(journals: Path) -> None:
    assert '"request":"7"' in exported(journals)
    assert '"request":"7"' not in exported(journals, TRACEKV_HASH_REQUEST_IDS="1")


def test_lost_records_are_told(write: Write) -> None:
    many = [transferred(Direction.LOAD, 0, [1] * 500, 10, at, at + 1) for at in range(6000)]
    data = json.loads(exported(write([*the_run(), *many])))

    assert data["otherData"]["records_lost"] > 0

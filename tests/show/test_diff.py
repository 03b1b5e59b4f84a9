"""Two runs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.show.conftest import Write
from tests.views.sample_run import allocated, call, looked_up, queried, the_run, transferred
from tracekv.cli.app import app
from tracekv.journal.records import Call, Record, Transfer
from tracekv.journal.vocabulary import Callback, Direction, MissReason
from tracekv.views.diff import changes
from tracekv.views.summary import Summary
from tracekv.views.summary_data import summary_of


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def slower(records: list[Record]) -> list[Record]:
    """The same run, but that it waited ten times as long for its saves."""
    return [
        call(Callback.WAIT_FOR_SAVE, 2000, 2400)
        if type(each) is Call and each.callback == Callback.WAIT_FOR_SAVE
        else each
        for each in records
    ]


def test_a_run_beside_itself_has_no_change(journals: Path) -> None:
    assert "Nothing changed." in run(journals, journals)
    assert {each.score for each in changes(summary_of(the_run()), summary_of(the_run()))} == {0}


def test_what_changed_most_comes_first() -> None:
    first = changes(summary_of(the_run()), summary_of(slower(the_run())))[0]

    assert (first.kind, first.name, first.a, first.b, first.factor) == (
        "callbacks",
        "worker.wait_for_save",
        40,
        400,
        10,
    )


def test_twice_as_long_a_run_is_no_change() -> None:
    twice = changes(summary_of(the_run()), summary_of([*the_run(), *the_run()]))

    assert [each.name for each in twice if each.score] == []


def test_bytes_are_told_by_layer_group_and_request() -> None:
    more = [*the_run(), transferred(Direction.LOAD, 1, [4], 360, 1540, 1560)]
    (change,) = [c for c in changes(summary_of(the_run()), summary_of(more)) if c.name == "load, layer group 1"]

    assert (change.kind, change.per, change.a, change.b) == ("bytes", "request", 40, 400)


def test_misses_are_shares_of_the_lookups() -> None:
    lookups = [queried(), looked_up(reason=MissReason.NOT_STORED), looked_up(reason=None)]
    (change,) = [
        c for c in changes(summary_of(lookups), summary_of([queried(), looked_up(reason=None)])) if c.kind == "misses"
    ]

    assert (change.name, change.a, change.b) == ("not_stored", 0.5, 0)


def test_what_one_run_does_not_tell_is_no_change() -> None:
    without = [record for record in the_run() if not isinstance(record, type(looked_up()))]
    (change,) = [c for c in changes(summary_of(the_run()), summary_of(without)) if c.kind == "misses"]

    assert (change.a, change.b, change.score) == (1, None, 0)


def test_what_the_runtime_did_not_tell_is_no_change_of_what_it_took() -> None:
    untold = summary_of([queried(), allocated(honoured=None)])
    found = {c.name: c for c in changes(untold, summary_of([queried(), allocated()])) if c.kind == "tokens"}

    assert (found["honoured"].a, found["honoured"].b, found["honoured"].score) == (None, 480 / 1024, 0)
    assert (found["computed"].a, found["computed"].score) == (None, 0)


def test_offers_below_nothing_are_compared_too() -> None:
    below = summary_of([queried(offered_tokens=-512)])
    offered = {c.name: c for c in changes(below, below)}["offered"]

    assert (offered.a, offered.b, offered.score) == (-0.5, -0.5, 0)
    assert {c.name: c for c in changes(below, summary_of([queried()]))}["offered"].score > 0


def test_an_engine_s_start_does_not_come_before_what_requests_felt() -> None:
    other = [
        call(Callback.SCHEDULER_INIT, 0, 90_000, 0) if getattr(r, "callback", 0) == Callback.SCHEDULER_INIT else r
        for r in the_run()
    ]
    names = [each.name for each in changes(summary_of(the_run()), summary_of(slower(other)))]

    assert names.index("worker.wait_for_save") < names.index("scheduler.__init__")


def test_two_empty_runs_compare() -> None:
    assert all(change.score == 0 for change in changes(Summary(), Summary()))


def test_the_terminal_shows_both_runs_in_80_columns(write: Write) -> None:
    text = run(write(the_run(), "a"), write(slower(the_run()), "b"))

    assert "What changed most" in text
    assert re.search(r"time of worker.wait_for_save +40 ns +400 ns +x10 call", text)
    assert max(len(line) for line in text.splitlines()[6:]) <= 80


def test_json_holds_every_change_in_its_order(write: Write) -> None:
    data = json.loads(run(write(the_run(), "a"), write(slower(the_run()), "b"), "--json"))

    assert data["changes"][0]["name"] == "worker.wait_for_save"
    scores = [change["score"] for change in data["changes"]]
    assert scores == sorted(scores, reverse=True)
    assert [side["summary"]["queries"] for side in data["sides"]] == [1, 1]


def test_the_page_is_written_whole(write: Write, tmp_path: Path) -> None:
    run(write(the_run(), "a"), write(slower(the_run()), "b"), "-o", tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text()

    assert text.startswith("<!doctype html>")
    assert text.endswith("</html>\n")
    assert '"name":"worker.wait_for_save"' in text


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_run_is_named(which: int, journals: Path, tmp_path: Path) -> None:
    paths = [journals, journals]
    paths[which] = tmp_path / "gone"
    done = CliRunner().invoke(app, ["diff", *map(str, paths)])

    assert done.exit_code == 1
    assert f"there is no {tmp_path / 'gone'}" in done.stderr


def test_transfers_of_the_sample_are_what_the_tests_say() -> None:
    assert [(r.layer_group, r.nbytes) for r in the_run() if isinstance(r, Transfer)] == [(0, 200), (1, 40), (0, 100)]

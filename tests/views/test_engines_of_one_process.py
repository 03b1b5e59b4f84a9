"""A process may have several engines, one after another, each with requests and passes that are numbered from the beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.metrics.reading import of, view_of
from tests.support.journaled import write_journals
from tests.views.sample_run import (
    RUN,
    bound,
    bring_up,
    built,
    joined,
    named,
    polled,
    queried,
    spans_of,
    the_run,
    wrapped,
)
from tracekv.cli.app import app
from tracekv.journal.records import Record
from tracekv.journal.ring import RingJournal
from tracekv.journal.vocabulary import Side
from tracekv.testing.corpus.tape import Tape
from tracekv.views import ids

NEXT_RUN = b"next-run-next-ru"
#: What the second engine's bring-up records in a process that is known.
AGAIN: list[Record] = [wrapped(Side.SCHEDULER), wrapped(Side.WORKER), joined(run_id=NEXT_RUN)]


def told(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The first engine leaves request 1 parked for its load and keeps pages of request 2; the second has its own request 1."""
    tape = Tape()
    tape.query(1, 100, 0, 64, is_async=True)
    tape.alloc(1, 64, [[1, 2, 3, 4]])
    tape.prefill(2, 100, [[5, 6, 7, 8]])
    tape.finish(2, keeps=True, pages=[[5, 6, 7, 8]])
    for position in range(100, 140):
        tape.decode(3, position)
    first = len(tape.records)
    for record in AGAIN:
        tape.add(record)
    tape.step = 0
    tape.query(1, 200, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3, 4, 5, 6, 7]])
    tape.build([(1, 64, 136, 200, [[1, 2, 3, 4, 5, 6, 7]])])
    assert len(tape.records) > first
    return write_journals(tmp_path, tape.records)


def test_passes_of_the_second_engine_have_their_roots() -> None:
    steps = named(spans_of([*the_run(), *AGAIN, built(), bound()]), "step")

    assert [span.trace_id for span in steps] == [ids.trace_id(run, "step", 1) for run in (RUN, NEXT_RUN)]


def test_a_request_that_the_first_engine_left_open_is_not_the_second_one_s() -> None:
    spans = spans_of([*bring_up(), queried(), *AGAIN, queried(9000, 9100, offered_tokens=7)])
    first, second = named(spans, "request")

    assert (first.attributes["tracekv.offered_tokens"], second.attributes["tracekv.offered_tokens"]) == (512, 7)
    assert (first.attributes["tracekv.request.outcome"], first.trace_id) == (
        "abandoned",
        ids.trace_id(RUN, "request", 7),
    )
    assert second.trace_id == ids.trace_id(NEXT_RUN, "request", 7)


def test_a_request_that_ended_in_the_first_engine_is_a_first_part_in_the_second() -> None:
    spans = spans_of([*the_run(), *AGAIN, queried(9000, 9100)])

    assert [span.parent_span_id for span in named(spans, "request")] == [None, None]


def test_what_the_first_engine_had_in_flight_is_gone_with_it(folder: Path) -> None:
    (process,) = json.loads(told("dump", "--json", folder))["processes"]

    assert [(each["request"], each["prompt_tokens"]) for each in process["requests"]] == [("1", 200)]
    assert [(each["request"], each["direction"], each["pages"]) for each in process["moves"]] == [
        ("1", "load", 2),
        ("1", "save", 4),
    ]


@pytest.mark.parametrize("latest", [4096, 8])
def test_top_shows_what_the_second_engine_is_doing(folder: Path, monkeypatch: pytest.MonkeyPatch, latest: int) -> None:
    monkeypatch.setattr("tracekv.cli._following.LATEST", latest)
    screen = told("top", folder)

    assert "requests  1 open" in screen
    assert "held      none" in screen
    assert screen.splitlines()[3].split()[5] == "1"  # its pass


def test_requests_that_the_first_worker_never_gave_back_are_not_in_flight() -> None:
    given = polled(10, 20, loading_given=[1], saving_given=[2])

    assert of(view_of(wrapped(Side.WORKER), given), "tracekv.request.in_flight") == {("load",): 1, ("save",): 1}
    assert of(view_of(wrapped(Side.WORKER), given, wrapped(Side.WORKER)), "tracekv.request.in_flight") == {
        ("load",): 0,
        ("save",): 0,
    }


def test_a_picture_tells_their_requests_apart(folder: Path) -> None:
    told("export", "perfetto", folder, "-o", folder / "trace.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    prompts = [event["args"]["prompt_tokens"] for event in events if event["name"] == "request 1"]

    assert prompts == [100, 200]


def test_a_request_of_an_engine_that_ended_is_not_in_flight_because_its_process_lives(tmp_path: Path) -> None:
    ring = RingJournal.create(tmp_path / "live.tkvring", 1 << 20)
    for record in [*bring_up()[1:], queried(), *AGAIN]:
        ring.write(record)
    verdict = json.loads(told("explain", 7, tmp_path, "--json"))
    ring.close()

    assert (verdict["is_running"], verdict["kind"]) == (False, "miss")

"""Log lines: one per failure and drop, bounded by kind, none for what went well, and structlog's own settings untouched."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.views.sample_run import RUN, call, dropped, joined, queried, stored, the_run, transferred
from tracekv.agent.logs import LINES, LogListener, agent_logger, host_logger
from tracekv.agent.spawn import keep_small
from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import QueryCall, Record, TracerFault, TracingReduced
from tracekv.journal.vocabulary import Callback, Direction, Outcome
from tracekv.views import ids

SOURCE = JournalFacts(4711, 1, 1, b"process-process-", "", 0, 0, "0", "node-1")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger("tracekv")
    before = (logger.handlers, logger.propagate, logger.level)
    yield io.StringIO()
    logger.handlers, logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def told(stream: io.StringIO, *records: Record, **options: Any) -> list[dict[str, Any]]:
    listener = LogListener(agent_logger({}, stream), **options)
    listener.feed_all(SOURCE, [joined(1, 2), *records])
    return lines_of(stream)


FAILURES: list[tuple[Record, dict[str, Any]]] = [
    (dropped(), {"event": "blocks dropped", "reason": "queue_full", "blocks": 3, "bytes": 300, "request": "7"}),
    (
        transferred(Direction.LOAD, 0, [3], 100, 1, 2, error="OSError"),
        {"event": "transfer failed", "direction": "load", "tier": "host", "error": "OSError", "request": "7"},
    ),
    (stored(outcome=Outcome.TIMEOUT), {"event": "store operation failed", "operation": "put", "outcome": "timeout"}),
    (
        call(Callback.START_LOAD_KV, 1, 2, 3, "ValueError"),
        {"event": "callback raised", "callback": "worker.start_load_kv"},
    ),
    (TracerFault(1, "query", "KeyError", "x.py:1"), {"event": "instrument removed", "instrument": "query"}),
    (TracingReduced(1, True, 50_000, 30_000), {"cost_ppm": 50_000, "limit_ppm": 30_000}),
    (TracingReduced(1, True, 0, 0, True), {"event": "calls are not recorded: the detail was switched off"}),
]


@pytest.mark.parametrize(("record", "expected"), FAILURES)
def test_a_failure_is_one_line_with_rank_and_process(
    record: Record, expected: dict[str, Any], stream: io.StringIO
) -> None:
    (line,) = told(stream, record)

    assert {name: line[name] for name in expected} == expected
    assert (line["rank"], line["pid"], line["level"]) == (1, 4711, "warning")


def test_lines_about_a_request_and_a_step_name_their_traces(stream: io.StringIO) -> None:
    first, second = told(stream, dropped(), call(Callback.START_LOAD_KV, 1, 2, 3, "ValueError"))
    request, step = ids.trace_id(RUN, "request", 7), ids.trace_id(RUN, "step", 3)

    assert (first["trace_id"], first["span_id"]) == (request.hex(), ids.root_id(request).hex())
    assert (second["trace_id"], second["span_id"]) == (step.hex(), ids.root_id(step).hex())


def test_what_went_well_makes_no_line(stream: io.StringIO) -> None:
    well = [record for record in the_run() if type(record).__name__ != "Drop"]

    assert told(stream, *well, stored(outcome=Outcome.MISSING)) == []


def test_lines_of_one_kind_are_bounded_and_the_rest_is_counted_in_the_summary(stream: io.StringIO) -> None:
    listener = LogListener(agent_logger({}, stream))
    listener.feed_all(SOURCE, [dropped() for _ in range(LINES + 90)])
    listener.feed_all(SOURCE, [TracerFault(1, "query", "KeyError", "x.py:1")])
    listener.close()
    *lines, summary = lines_of(stream)

    assert [line["event"] for line in lines] == ["blocks dropped"] * LINES + ["instrument removed"]
    assert summary["event"] == "summary"
    assert summary["suppressed"] == {"blocks dropped": 90}
    assert summary["dropped_blocks"] == 3 * (LINES + 90)


def test_a_summary_comes_after_its_interval_and_begins_anew(stream: io.StringIO) -> None:
    listener = LogListener(agent_logger({}, stream), interval_s=0.0)
    listener.feed_all(SOURCE, the_run())
    for _ in range(3):
        listener.tick()
    (summary,) = [line for line in lines_of(stream) if line["event"] == "summary"]

    expected = {"load_bytes": 240, "save_bytes": 100, "steps": 1, "requests_finished": 1, "offered_tokens": 512}
    assert {name: summary[name] for name in expected} == expected


def test_lost_records_are_said(stream: io.StringIO) -> None:
    LogListener(agent_logger({}, stream)).lost(SOURCE, 12)

    assert lines_of(stream)[0]["records"] == 12


def test_request_ids_are_hashed_where_the_settings_say_so(stream: io.StringIO) -> None:
    (line,) = told(stream, dropped(), hash_request_ids=True)

    assert line["request"] == ids.request_label(RUN, 7, hashed=True) != "7"


def test_the_level_is_the_environment_s(stream: io.StringIO) -> None:
    listener = LogListener(agent_logger({"OTEL_LOG_LEVEL": "error"}, stream))
    listener.feed_all(SOURCE, [dropped()])
    listener.close()

    assert stream.getvalue() == ""


def test_on_a_terminal_lines_are_for_people(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    LogListener(agent_logger({}, stream)).feed_all(SOURCE, [dropped()])

    assert "blocks dropped" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_warnings_of_other_modules_come_the_same_way(stream: io.StringIO) -> None:
    agent_logger({}, stream)
    logging.getLogger("tracekv").warning("tracekv: %s can't be sent", "x")
    (line,) = lines_of(stream)

    assert (line["event"], line["level"]) == ("x can't be sent", "warning")


def test_in_the_host_lines_go_to_its_logging_and_structlog_stays_unconfigured(caplog: pytest.LogCaptureFixture) -> None:
    is_configured = structlog.is_configured()
    LogListener(host_logger({})).feed_all(SOURCE, [dropped()])

    assert structlog.is_configured() is is_configured is False
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tracekv.records", "WARNING")
    assert "event='blocks dropped'" in record.getMessage()


def test_no_line_holds_a_salt_or_an_image_s_digest(stream: io.StringIO) -> None:
    query = queried(salt_digest=b"s" * 8, multimodal_digest=b"m" * 8)
    assert isinstance(query, QueryCall)
    query.error = "ValueError"
    (line,) = told(stream, query)

    assert (b"s" * 8).hex() not in json.dumps(line)
    assert (b"m" * 8).hex() not in json.dumps(line)


def test_a_log_that_is_the_agent_s_own_is_emptied_when_it_is_large(stream: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for nbytes, left in ((1 << 19, 1 << 19), (1 << 20, 0)):
            os.write(descriptor, b"x" * nbytes)
            listener = LogListener(
                agent_logger({}, stream), before_summary=lambda: keep_small(descriptor), interval_s=0.0
            )
            listener.tick()
            assert path.stat().st_size == left
    finally:
        os.close(descriptor)

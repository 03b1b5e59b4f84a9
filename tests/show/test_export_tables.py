"""Flat tables and OTLP lines of a run, and what is said where nothing can be read or written."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.show.conftest import Write, write_journal
from tests.views.sample_run import EPOCH, bring_up, queried, spans_of, the_run
from tracekv.cli.app import app
from tracekv.journal.records import CallCounts, QueryCall
from tracekv.journal.vocabulary import Callback
from tracekv.views import names
from tracekv.views.otlp import read_trace_file
from tracekv.views.tables import TABLES


def export(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def table(journals: Path, name: str) -> list[dict[str, str]]:
    return rows(export("csv", journals, "--table", name, "-o", "-"))


def test_each_table_is_a_file_with_a_header(journals: Path, tmp_path: Path) -> None:
    export("csv", journals, "-o", tmp_path / "tables")

    files = {path.stem: path.read_text().splitlines()[0] for path in (tmp_path / "tables").iterdir()}
    assert sorted(files) == sorted([*TABLES, "findings"])
    assert all(files[name] == ",".join(("host", "pid", "rank", "run", *TABLES[name].columns)) for name in TABLES)


def test_a_request_is_a_row_with_what_its_story_tells(journals: Path) -> None:
    (row,) = table(journals, "requests")

    assert (row["request_id"], row["client_id"], row["outcome"], row["host"], row["rank"]) == (
        "7", "70", "finished", "node-1", "0",
    )  # fmt: skip
    assert (row["started_unix_ns"], row["duration_ns"]) == (str(EPOCH + 1000), "1250")
    assert (row["prompt_tokens"], row["offered_tokens"], row["honoured_tokens"]) == ("1024", "512", "480")
    assert (row["miss_reason"], row["bounding_layer_group"]) == ("not_staged", "0")
    assert (row["load_bytes"], row["load_stall_ns"], row["save_bytes"]) == ("240", "10", "100")
    assert row["held_ns"] == ""


def test_transfers_misses_and_store_operations_are_rows(journals: Path) -> None:
    assert [(r["direction"], r["layer_group"], r["pages"], r["nbytes"]) for r in table(journals, "transfers")] == [
        ("load", "0", "2", "200"),
        ("load", "1", "1", "40"),
        ("save", "0", "1", "100"),
    ]
    (miss,) = table(journals, "misses")
    assert (miss["reason"], miss["stored_tokens"], miss["group_tokens"]) == ("not_staged", "960", "960 1024")
    (put,) = table(journals, "store_operations")
    assert (put["operation"], put["outcome"], put["engine"], put["request_id"]) == ("put", "ok", "s3", "7")


def test_callbacks_are_rows_and_hooks_one_per_layer_group(journals: Path) -> None:
    calls = table(journals, "callbacks")
    waits = [row for row in calls if row["callback"] == "wait_for_layer_load"]

    assert [(r["layer_group"], r["calls"], r["sum_ns"], r["max_ns"]) for r in waits] == [
        ("0", "2", "40", "30"),
        ("1", "2", "25", "20"),
    ]
    (query,) = [row for row in calls if row["callback"] == "get_num_new_matched_tokens"]
    assert (query["side"], query["duration_ns"], query["request_ids"]) == ("scheduler", "100", "7")


def test_calls_that_were_only_counted_are_rows_too(write: Write) -> None:
    counted = CallCounts(
        9, 3000, 9000, [(int(Callback.WAIT_FOR_SAVE), 3, 600, 300), (int(Callback.GET_FINISHED), 4, 8, 2)]
    )
    rows = table(write([*the_run(), counted]), "callbacks")[-2:]

    assert [(r["callback"], r["calls"], r["sum_ns"], r["max_ns"], r["duration_ns"], r["step"]) for r in rows] == [
        ("wait_for_save", "3", "600", "300", "6000", "9"),
        ("get_finished", "4", "8", "2", "6000", "9"),
    ]


def test_where_nothing_can_be_read_no_folder_is_left_behind(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "csv", str(tmp_path / "gone"), "-o", str(tmp_path / "tables")])
    assert done.exit_code == 1
    assert not (tmp_path / "tables").exists()


def test_what_was_overwritten_is_said_once_for_all_tables(tmp_path: Path) -> None:
    many = [queried(1000 + at, 1001 + at, at) for at in range(20_000)]
    folder = write_journal(tmp_path / "journals", [*bring_up(), *many])
    done = CliRunner().invoke(app, ["export", "csv", str(folder), "--no-rules", "-o", str(tmp_path / "tables")])
    assert done.stderr.count("records were overwritten") == 1


def test_findings_are_what_the_rules_find(write: Write) -> None:
    sound = write(the_run())
    past = write(
        [queried(offered_tokens=1024) if isinstance(record, QueryCall) else record for record in the_run()], "past"
    )

    assert "S2" not in {row["rule"] for row in table(sound, "findings")}
    (row,) = [row for row in table(past, "findings") if row["rule"] == "S2"]
    assert (row["request"], row["severity"], row["callback"]) == ("7", "violation", "get_num_new_matched_tokens")
    export("csv", past, "--no-rules", "-o", past / "tables")
    assert not (past / "tables" / "findings.csv").exists()


def test_hashed_ids_are_hashed_in_every_table(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    past = write(
        [queried(offered_tokens=1024) if isinstance(record, QueryCall) else record for record in the_run()], "past"
    )
    monkeypatch.setenv("TRACEKV_HASH_REQUEST_IDS", "1")
    (request,) = table(past, "requests")
    label = request["request_id"]

    assert len(label) == 16
    named = {
        row[column]
        for name in (*TABLES, "findings")
        for row in table(past, name)
        for column in ("request", "request_id", "request_ids")
        if row.get(column)
    }
    assert named == {label}


def test_otlp_lines_hold_the_spans_that_the_agent_would_have_exported(journals: Path, tmp_path: Path) -> None:
    export("otlp", journals, "-o", tmp_path / "spans.jsonl", "--detail", "full")
    spans = list(read_trace_file(tmp_path / "spans.jsonl"))

    expected = spans_of(the_run()[1:])
    assert sorted(span.name for span in spans) == sorted(span.name for span in expected)
    (root,) = [span for span in spans if span.name == names.REQUEST]
    assert (root.start_ns, root.attributes[names.HONOURED_TOKENS]) == (EPOCH + 1000, 480)


def test_economy_is_fewer_spans_than_full(journals: Path, tmp_path: Path) -> None:
    export("otlp", journals, "-o", tmp_path / "few")
    export("otlp", journals, "-o", tmp_path / "many", "--detail", "full")

    assert len(list(read_trace_file(tmp_path / "few"))) < len(list(read_trace_file(tmp_path / "many")))


# -- what can't be done ----------------------------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    return done.stderr


def test_an_empty_directory_is_said_to_hold_no_journal(tmp_path: Path) -> None:
    assert f"no journal in {tmp_path}" in refused("perfetto", tmp_path, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_text("no journal at all")
    assert f"{tmp_path / 'foreign'} is no journal" in refused("otlp", tmp_path / "foreign", "-o", tmp_path / "out")


@pytest.mark.parametrize("kind", ["perfetto", "otlp", "csv"])
def test_an_output_that_cannot_be_made_is_named_with_the_reason(kind: str, journals: Path) -> None:
    where = journals / "missing" / "file" if kind != "csv" else Path("/proc/tables")

    assert f"{where} can't be written" in refused(kind, journals, "-o", where)


def test_a_directory_without_write_permission_is_named(journals: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):  # root may write anywhere: then the kernel's own files stand in
        closed = Path("/proc/self")

    assert f"{closed / 'out'} can't be written" in refused("perfetto", journals, "-o", closed / "out")


def test_an_error_leaves_the_earlier_file_as_it_was(journals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = journals / "out.json"
    out.write_text("earlier")

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tracekv.cli.export.write_perfetto", full)
    assert "No space left on device" in refused("perfetto", journals, "-o", out)
    assert out.read_text() == "earlier"
    assert [path.name for path in journals.iterdir() if path.name.startswith(".")] == []


def test_a_cut_ring_is_left_out_and_said(write: Write) -> None:
    folder = write(bring_up(), process="whole")
    (folder / "cut.tkvring").write_bytes((folder / "whole.tkvring").read_bytes()[:5000])
    done = CliRunner().invoke(app, ["export", "perfetto", str(folder), "-o", str(folder / "out.json")])

    assert done.exit_code == 0
    assert "cut.tkvring" in done.stderr

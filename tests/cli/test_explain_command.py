"""``tracekv explain`` as a person meets it: choosing requests, JSON, digests, and what it says of bad input."""

from __future__ import annotations

import json
import os
from zlib import crc32

import pytest
from typer.testing import CliRunner

from tests.support.journaled import write_journals
from tracekv.bench.journals import write_journals as write_many
from tracekv.cli.app import app
from tracekv.journal.archive import copy_records
from tracekv.journal.parallel import in_processes
from tracekv.journal.reader import RingReader
from tracekv.journal.records import FinishedCall
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Direction, MissReason
from tracekv.testing.corpus.tape import Tape
from tracekv.views.runs import runs_of


def run(*arguments, code=0, **environ):
    result = CliRunner().invoke(app, list(map(str, arguments)), env=environ)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def journals(tmp_path):
    """Requests 100 to 109, of which each third misses; 104 is slow, 107 offers past its prompt."""
    tape = Tape()
    for number in range(100, 110):
        prompt = 200 + number
        if number % 3 == 0:
            tape.lookup(number, prompt, reason=MissReason.NOT_STORED)
            tape.query(number, prompt)
            tape.alloc(number, 0, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
        else:
            offered = prompt if number == 107 else 192
            tape.query(number, prompt, 0, offered, took_us=30_000 if number == 104 else 10)
            tape.alloc(number, 192, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
        tape.build([(number, 0, prompt, prompt, [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])])
        tape.forward()
        tape.finish(number)
    return write_journals(tmp_path, tape.records)


def test_one_request_is_a_screen_of_80_columns_whose_first_line_is_the_verdict(journals):
    lines = run("explain", 103, journals).stdout.splitlines()
    assert lines[0].startswith("hit: 192 of 303 prompt tokens came from the store in ")
    assert any(line.startswith("request   103 of run ") for line in lines)
    told = [line for line in lines[1:] if not line.startswith("trace")]
    assert max(map(len, told)) <= 80
    assert "\x1b" not in "".join(lines)
    assert any("http://localhost:16686/trace/" in line for line in lines)


def test_the_place_of_traces_is_an_option_and_a_setting(journals):
    assert "https://tempo/x/" in run("explain", 103, journals, TRACEKV_TRACE_URL="https://tempo/x/{trace_id}").stdout
    assert "https://other/" in run("explain", 103, journals, "--trace-url", "https://other/{trace_id}").stdout


def test_json_says_the_same_in_one_object(journals):
    told = json.loads(run("explain", 102, journals, "--json").stdout)
    assert told["kind"] == "miss"
    assert told["miss"]["reason"] == "not_stored"
    assert told["tokens"]["prompt"] == 302
    assert sum(told["parts_ns"].values()) == told["whole_ns"]
    assert told["trace_url"].endswith(told["trace_id"])


def test_the_slowest_the_missed_and_the_breaking_ones_are_chosen(journals):
    slow = json.loads(run("explain", "--slowest", 1, journals, "--json").stdout)["requests"]
    assert [each["request"] for each in slow] == ["104"]
    missed = run("explain", "--missed", 2, journals).stdout.splitlines()
    assert [line.split()[0] for line in missed[1:]] == ["108", "105"]
    broke = run("explain", "--violations", journals).stdout.splitlines()
    assert broke[0].startswith("broke S2: ")
    screens = run("explain", "--missed", 2, "--all", journals).stdout
    assert screens.count("miss: not_stored") == 2


def test_a_rule_that_many_broke_before_is_told_of_the_last_one_too(tmp_path):
    tape = Tape()
    for number in range(1, 151):
        tape.query(number, 100, 0, 100)
    write_journals(tmp_path, tape.records)
    assert run("explain", 150, tmp_path).stdout.startswith("broke S2: ")
    chosen = run("explain", "--violations", tmp_path)
    assert "150 violations and 150 suspects; 100 requests listed" in chosen.stdout
    assert "counted and not listed: 50 of S2, 50 of S3" in chosen.stderr


def test_an_unknown_request_is_told_its_nearest(journals):
    error = run("explain", 150, journals, code=1).stderr
    assert "there is no request 150 among the 10 here" in error
    assert "109, 108" in error
    assert "there is no request abc" in run("explain", "abc", journals, code=1).stderr
    assert "there is no run zzz" in run("explain", 103, journals, "--run", "zzz", code=1).stderr


def test_a_request_that_only_get_finished_names_is_known(tmp_path):
    tape = Tape()
    tape.polled(saved=[4711])
    assert any(isinstance(record, FinishedCall) for _, record in tape.records)
    write_journals(tmp_path, tape.records)
    assert run("explain", 4711, tmp_path).stdout.startswith("broke W3: ")


def test_digests_name_requests_where_ids_are_hashed(journals):
    with scan([journals]) as found:
        (only,) = runs_of(found.processes)
        label = only.request_label(102, hashed=True)
    hashed = {"TRACEKV_HASH_REQUEST_IDS": "1"}
    told = json.loads(run("explain", label, journals, "--json", **hashed).stdout)
    assert told["request"] == label
    assert told["miss"]["reason"] == "not_stored"
    assert '"102"' not in json.dumps(told)
    table = run("explain", "--missed", 1, journals, **hashed).stdout
    assert only.request_label(108, hashed=True) in table
    # An operator who has the digest only needs no setting.
    assert label in run("explain", label, journals).stdout
    unknown = run("explain", label[:-1] + ("0" if label[-1] != "0" else "1"), journals, code=1, **hashed).stderr
    assert label in unknown


def test_findings_name_other_requests_by_their_digests_too(tmp_path):
    tape = Tape()
    for number in (7001, 7002):
        tape.query(number, 100)
        tape.alloc(number, 0, [[1, 2, 3, 4]])
    tape.build([(7001, 0, 100, 100, [[1, 2, 3, 4]]), (7002, 0, 100, 100, [[1, 2, 3, 4]])])
    write_journals(tmp_path, tape.records)
    plain = run("explain", "--violations", "--json", tmp_path).stdout
    assert "other_request 7001" in plain
    assert "700" not in run("explain", "--violations", "--all", tmp_path, TRACEKV_HASH_REQUEST_IDS="1").stdout.replace(
        "\n", ""
    )


def test_a_request_that_is_not_over_is_not_told_to_its_end(tmp_path):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.query(1, 100, 0, 64)
    write_journals(tmp_path, tape.records)
    shown = run("explain", 1, tmp_path).stdout
    assert "from its first query to its last record, of which" in shown
    assert "asked     2 times (numbers are the last time's)\n" in "\n".join(map(str.rstrip, shown.splitlines())) + "\n"


def test_a_worker_alone_knows_of_no_query(tmp_path):
    tape = Tape(ranks=2)
    tape.step = 1
    tape.transfer(Direction.LOAD, 1, [1, 2], rank=1, started=tape.now, ended=tape.now + 1000)
    write_journals(tmp_path, [each for each in tape.records if each[0] == "rank1"])
    shown = run("explain", 1, tmp_path).stdout
    assert "1 µs from its first record to its last record, of which" in shown


def test_requests_are_chosen_in_one_way(journals):
    error = run("explain", "--slowest", 1, "--missed", 1, journals, code=1).stderr
    assert "choose by one of --slowest, --missed and --violations" in error


def test_a_folder_in_the_place_of_a_request_is_said_so(journals, monkeypatch):
    monkeypatch.chdir(journals.parent)
    (journals.parent / "run1").symlink_to(journals)
    assert "run1 is a path: the request comes first" in run("explain", "run1", code=1).stderr


def test_a_request_in_the_place_of_a_folder_is_said_so(journals):
    error = run("explain", 103, journals, "--slowest", 1, code=1).stderr
    assert "every argument is a path: there is no 103" in error


def test_nothing_named_is_an_error_that_says_what_to_name(journals):
    assert "name a request" in run("explain", code=1, TRACEKV_JOURNAL_DIR=str(journals)).stderr
    assert "the request comes first" in run("explain", journals, code=1).stderr


COMMANDS = [("explain", "7"), ("explain", "--slowest", "3"), ("top",)]


@pytest.fixture(params=COMMANDS, ids=" ".join)
def command(request):
    return request.param


def test_an_empty_directory_is_said_so(command, tmp_path):
    error = run(*command, tmp_path, code=1).stderr
    assert f"no journal in {tmp_path}" in error
    assert "TRACEKV_JOURNAL_DIR" in error


def test_what_is_not_there_is_said_so(command, tmp_path):
    assert f"there is no {tmp_path / 'gone'}" in run(*command, tmp_path / "gone", code=1).stderr


def test_a_foreign_file_is_said_so(command, tmp_path):
    (tmp_path / "notes").write_bytes(b"x" * (1 << 17))
    assert "notes is no journal" in run(*command, tmp_path / "notes", code=1).stderr
    (tmp_path / "short").write_bytes(b"")
    assert "short is no journal" in run(*command, tmp_path / "short", code=1).stderr


@pytest.mark.parametrize("kind", ["ring", "archive"])
def test_a_newer_file_is_said_so(command, kind, journals, tmp_path):
    ring = next(journals.glob("*.tkvring"))
    path = tmp_path / "newer"
    copy_records([RingReader(ring)], path)
    if kind == "ring":
        path.write_bytes(ring.read_bytes())
    data = bytearray(path.read_bytes())
    data[8] = 99
    if kind == "archive":
        data[12:16] = crc32(bytes(data[:12])).to_bytes(4, "little")
    path.write_bytes(data)
    error = run(*command, path, code=1).stderr
    assert "format 99" in error
    assert "read it with the tracekv that wrote it" in error


def test_a_truncated_archive_is_read_as_far_as_it_goes_and_said_so(journals, tmp_path):
    path = tmp_path / "cut"
    copy_records([RingReader(next(journals.glob("*.tkvring")))], path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    result = run("explain", 100, path)
    assert result.stdout.startswith(("hit: ", "broke"))
    assert "is cut short" in result.stderr
    assert "is cut short" in " ".join(run("top", path).stdout.split())


def test_a_truncated_ring_is_said_so(command, journals, tmp_path):
    ring = next(journals.glob("*.tkvring"))
    (tmp_path / "cut").write_bytes(ring.read_bytes()[: 1 << 17])
    assert "its header says" in run(*command, tmp_path / "cut", code=1).stderr


def test_without_permission_it_says_whose_journals_are_read(command, journals):
    run(*command[:1], "--help")

    def as_somebody_else():
        os.setuid(65534) if os.getuid() == 0 else journals.chmod(0)
        result = CliRunner().invoke(app, [*command, str(journals)])
        return result.exit_code, result.stderr

    try:
        _, (code, error) = in_processes([lambda: None, as_somebody_else], [1, 0], workers=2)
    finally:
        journals.chmod(0o700)
    assert code == 1, error
    assert "can't be read: Permission denied" in error
    assert "read them as the engine's user" in error


def test_many_records_open_by_the_window_around_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr("tracekv.cli._judging.WHOLE", 1000)
    monkeypatch.setattr("tracekv.cli._judging.BEFORE", 500)
    monkeypatch.setattr("tracekv.cli._judging.AFTER", 500)
    write_many(tmp_path, 12_000, runs=2)
    result = run("explain", 2150, tmp_path)
    assert "rules     none broken" in result.stdout
    assert "2 runs have a request 2150" in result.stderr
    told = json.loads(run("explain", 2150, tmp_path, "--json").stdout)
    assert sum(told["parts_ns"].values()) == told["whole_ns"]

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tracekv.cli.app import app
from tracekv.journal.archive import copy_records
from tracekv.journal.directory import SUFFIX
from tracekv.journal.opening import open_journals
from tracekv.journal.records import ProcessStarted
from tracekv.journal.ring import RingJournal
from tracekv.testing.corpus.tape import Tape


@pytest.fixture
def journals(tmp_path):
    """Writes each source of a tape into a ring file of its own; answers the folder."""

    def write(tape, name="journals", *, file_bytes=1 << 20):
        folder = tmp_path / name
        folder.mkdir()
        rings = {}
        for source, record in tape.records:
            if source not in rings:
                rings[source] = RingJournal.create(folder / f"{source}{SUFFIX}", file_bytes)
            if not isinstance(record, ProcessStarted):
                rings[source].write(record)
        for ring in rings.values():
            ring.close()
        return folder

    return write


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments)])


def sound(ranks=1):
    tape = Tape(ranks=ranks)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.decode(1, 100)
    tape.finish(1, pages=[[1, 2, 3, 4]])
    return tape


def past_the_prompt():
    tape = sound()
    tape.query(2, 96, 0, 96)
    return tape


def test_a_sound_journal_ends_with_0(journals):
    done = run(journals(sound()))
    assert done.exit_code == 0
    assert "0 violations, 0 suspects" in done.stdout


def test_a_violation_ends_with_1_and_is_printed_with_its_proof(journals):
    done = run(journals(past_the_prompt()))
    assert done.exit_code == 1
    for part in ("VIOLATION", "S2#1", "request 2", "offered 96, most 95", "-> stop the lookup", "proof: QueryCall"):
        assert part in done.stdout


def test_what_is_found_too_often_to_be_told_each_time_is_counted_all_the_same(journals):
    tape = sound()
    for number in range(2, 152):
        tape.query(number, 96, 0, 96)
    folder = journals(tape)
    shown = run(folder).stdout
    assert "S2: 50 more of these" in shown
    assert "150 violations, 0 suspects" in shown
    report = json.loads(run(folder, "--json").stdout)
    assert (report["violations"], len(report["findings"])) == (150, 100)


def test_suspects_alone_end_with_0(journals):
    tape = sound()
    tape.query(2, 100, 0, 40)
    done = run(journals(tape))
    assert done.exit_code == 0
    assert "SUSPECT" in done.stdout
    assert "0 violations, 1 suspect" in done.stdout


def test_json_is_one_object_with_the_evidence(journals):
    done = run(journals(past_the_prompt()), "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (report["violations"], report["suspects"], report["processes"], report["lost"]) == (1, 0, 1, 0)
    (found,) = report["findings"]
    assert (found["rule"], found["request"], found["rank"], found["by"]) == ("S2", 2, 0, "connector")
    (evidence,) = found["evidence"]
    assert (evidence["record"], evidence["offered_tokens"]) == ("QueryCall", 96)
    assert evidence["callback"] == "get_num_new_matched_tokens"


def test_a_file_an_archive_and_a_folder_are_judged_alike(journals, tmp_path):
    folder = journals(past_the_prompt())
    readers = open_journals(folder, patience_ns=0)
    copy_records(readers, tmp_path / "run.tkv")
    for reader in readers:
        reader.close()
    found = []
    for path in (folder, next(folder.iterdir()), tmp_path / "run.tkv"):
        report = json.loads(run(path, "--json").stdout)
        found.append([(each["id"], each["numbers"]) for each in report["findings"]])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1


def test_ranks_are_judged_together_in_the_order_of_their_times(journals):
    tape = Tape(ranks=2)
    for request in range(1, 20):
        tape.prefill(request, 100, [[1, 2, 3, 4]])
        tape.finish(request, pages=[[1, 2, 3, 4]])
    tape.build(has_metadata=True)
    tape.bind(0, digest=b"one")
    tape.bind(1, digest=b"two")
    report = json.loads(run(journals(tape), "--json").stdout)
    assert report["processes"] == 2
    assert [(each["rule"], each["rank"]) for each in report["findings"]] == [("S7c", 1)]


def test_a_ring_that_overwrote_its_beginning_is_judged_by_what_is_left(journals):
    tape = sound()
    for position in range(20_000):
        tape.decode(2, 5000 + position)
    tape.query(3, 96, 0, 96)
    report = json.loads(run(journals(tape), "--json").stdout)
    assert report["lost"] > 0
    assert [each["rule"] for each in report["findings"]] == ["S2"]


def test_journals_lie_where_the_setting_says(journals, monkeypatch):
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(journals(past_the_prompt())))
    assert run().exit_code == 1


@pytest.mark.parametrize("kind", ["absent", "empty", "foreign"])
def test_what_cannot_be_judged_ends_with_2_and_the_reason(tmp_path, kind):
    path = tmp_path / "there"
    if kind == "empty":
        path.mkdir()
    elif kind == "foreign":
        path.write_text("no journal " * 1000)
    done = run(path)
    assert done.exit_code == 2
    assert str(path) in done.stderr
    assert not done.stdout


def test_an_archive_in_a_folder_is_judged_and_what_is_in_a_ring_too_is_one_process(journals):
    folder = journals(past_the_prompt())
    readers = open_journals(folder, patience_ns=0)
    copy_records(readers, folder / "run.tkvarchive")
    for reader in readers:
        reader.close()
    both = json.loads(run(folder, "--json").stdout)
    for path in folder.glob(f"*{SUFFIX}"):
        path.unlink()
    archived = json.loads(run(folder, "--json").stdout)

    assert (both["processes"], both["violations"]) == (1, 1)
    assert archived == both


def test_where_ids_are_hashed_no_request_is_named(journals, monkeypatch):
    folder = journals(past_the_prompt())
    (plain,) = json.loads(run(folder, "--json").stdout)["findings"]
    monkeypatch.setenv("TRACEKV_HASH_REQUEST_IDS", "1")
    (hashed,) = json.loads(run(folder, "--json").stdout)["findings"]
    printed = run(folder).stdout

    assert (plain["request"], len(hashed["request"])) == (2, 16)
    assert hashed["evidence"] == []
    assert {name: hashed[name] for name in ("id", "numbers", "rank")} == {
        name: plain[name] for name in ("id", "numbers", "rank")
    }
    assert f"request {hashed['request']}" in printed
    assert "request 2" not in printed
    assert "request_id" not in printed

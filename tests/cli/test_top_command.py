"""``tracekv top``: what it shows of live, dead and new processes, and that one screen fits."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import msgspec
from typer.testing import CliRunner

from tests.support.journaled import write_journals
from tracekv.cli._following import LATEST, Following
from tracekv.cli.app import app
from tracekv.cli.top import parse_age
from tracekv.journal.records import Finding, Lookup, StoreCeiling
from tracekv.journal.ring import RingJournal
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome
from tracekv.testing.corpus.tape import Tape

LARGE = 1 << 22


def follow(path, **options):
    return Following([path], scan([path]), window_s=10, hashed=False, **options)


def live(path, records):
    journal = RingJournal.create(path, LARGE)
    for _, record in records:
        journal.write(record)
    return journal


def loading(ranks=1):
    """A tape whose request 7 is parked for its load, on every rank."""
    tape = Tape(ranks=ranks)
    tape.now = time.perf_counter_ns()
    tape.lookup(7, 100, 0, 64, reason=MissReason.NOT_STORED)
    tape.query(7, 100, 0, 64, is_async=True)
    tape.alloc(7, 64, [[1, 2, 3, 4]])
    tape.build()
    return tape


def test_loads_in_flight_are_shown_with_age_and_rank(tmp_path):
    write_journals(tmp_path, loading(ranks=2).records)
    following = follow(tmp_path)
    top = following.top()
    assert [(move.request, move.direction, move.rank, move.pages) for move in top.moves] == [
        ("7", "load", 0, 2),
        ("7", "load", 1, 2),
    ]
    assert all(move.age_s > 0 for move in top.moves[:1])
    assert all(not move.is_alive for move in top.moves)
    following.close()


def test_tokens_are_counted_by_where_they_came_from(tmp_path):
    tape = loading()
    tape.query(8, 200)
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    top = following.top()
    following.close()
    assert top.tokens == {"queried": 300, "computed": 0, "offered": 64, "requests": 2, "honoured": 64}
    assert top.missed == {"not_stored": 36, "not told": 200}


MINUTE = 60_000_000_000


def two_queries_ten_minutes_apart():
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.query(2, 100, 0, 100)
    tape.now += 10 * MINUTE
    tape.query(3, 300)
    return tape


def test_counts_can_begin_some_time_before_the_last_record(tmp_path):
    write_journals(tmp_path, two_queries_ten_minutes_apart().records)
    tops = {}
    for since_s in (None, 300, 1200):
        following = follow(tmp_path, since_s=since_s)
        tops[since_s] = following.top()
        following.close()
    assert {since_s: top.tokens["queried"] for since_s, top in tops.items()} == {None: 500, 300: 300, 1200: 500}
    assert [tops[since_s].rules.get("violation S2", 0) for since_s in (None, 300)] == [1, 0]
    assert tops[300].missed == {"not told": 300}


def test_while_an_engine_runs_counts_begin_some_time_before_now(tmp_path):
    write_journals(tmp_path, two_queries_ten_minutes_apart().records)  # gone since long ago
    tape = Tape()
    tape.now = time.perf_counter_ns()
    tape.query(9, 50)
    journal = live(tmp_path / "a.tkvring", tape.records)
    following = follow(tmp_path, since_s=60)
    top = following.top()
    following.close()
    journal.close()
    assert top.tokens["queried"] == 50


def test_what_is_held_since_before_the_counts_began_is_shown(tmp_path):
    tape = Tape()
    tape.prefill(1, 100, [[5, 6, 7, 8]])
    tape.finish(1, keeps=True, pages=[[5, 6, 7, 8]])
    tape.now += 10 * MINUTE
    tape.query(3, 300)
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path, since_s=60)
    top = following.top()
    following.close()
    assert (top.tokens["queried"], top.held_pages) == (300, 4)


def test_what_was_asked_of_late_is_told_by_the_second(tmp_path):
    tape = two_queries_ten_minutes_apart()
    tape.alloc(3, 30, [[1, 2, 3, 4]])
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    top = following.top()
    following.close()
    assert top.late_tokens == {"requests": 1, "queried": 300, "computed": 0, "honoured": 30}
    shown = CliRunner().invoke(app, ["top", str(tmp_path)]).stdout
    assert "now       0.1 queries/s, 30 tokens/s, 0% on the device, 10% from the store" in shown


def test_of_late_is_one_time_for_all_and_now_while_an_engine_runs(tmp_path):
    """What engines did at their ends isn't what is done now, nor what the last of them did."""
    write_journals(tmp_path, two_queries_ten_minutes_apart().records)
    late = []
    for prompt, records_of in ((40, write_later), (50, write_live)):
        journal = records_of(tmp_path, prompt)
        following = follow(tmp_path)
        late.append(following.top().late_tokens["queried"])
        following.close()
        if journal:
            journal.close()
    assert late == [40, 50]


def write_later(path, prompt):
    tape = Tape()
    tape.now += 30 * MINUTE
    tape.query(8, prompt)
    (path / "later").mkdir()
    (file,) = write_journals(path / "later", [("later", record) for _, record in tape.records]).iterdir()
    file.rename(path / "later.tkvring")
    (path / "later").rmdir()


def write_live(path, prompt):
    tape = Tape()
    tape.now = time.perf_counter_ns()
    tape.query(9, prompt)
    return live(path / "live.tkvring", tape.records)


def test_queries_that_do_not_tell_their_prompts_are_queries_too(tmp_path):
    tape = Tape()
    tape.query(1, None, 0, 64)
    write_journals(tmp_path, tape.records)
    shown = " ".join(CliRunner().invoke(app, ["top", str(tmp_path)]).stdout.split())
    assert "1 query, 0 prompt tokens: " in shown


def test_where_the_runtime_does_not_tell_what_it_took_the_offer_counts(tmp_path):
    tape = Tape()
    tape.query(1, 100, 0, 64)
    tape.alloc(1, None, [[1, 2, 3, 4]])
    tape.query(2, 100, 0, 64)
    tape.alloc(2, 32, [[1, 2, 3, 4]])
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    top = following.top()
    following.close()
    assert (top.tokens["honoured"], top.late_tokens["honoured"]) == (96, 96)


def test_an_age_is_a_number_with_a_unit(tmp_path):
    write_journals(tmp_path, two_queries_ten_minutes_apart().records)
    assert [parse_age(text) for text in ("90", "30s", "1.5m", "2h", "1d")] == [90, 30, 90, 7200, 86400]
    shown = CliRunner().invoke(app, ["top", "--since", "5m", str(tmp_path)])
    assert "counts since " in shown.stdout
    assert "1 query, 300 prompt tokens" in shown.stdout
    for bad in ("soon", "-5m", "5 weeks", "0s", ""):
        refused = CliRunner().invoke(app, ["top", "--since", bad, str(tmp_path)])
        assert refused.exit_code == 2
        assert "write 30s, 5m, 2h or 1d" in " ".join(refused.stderr.split())


def test_bandwidth_is_shown_beside_the_stores_best(tmp_path):
    tape = Tape(groups=2)
    tape.add(StoreCeiling(tape.now, "local", None, Direction.LOAD, 1 << 20, 1 << 30, 1 << 29))
    tape.query(1, 100, 0, 64)
    tape.alloc(1, 64, [[1, 2, 3], [1, 2, 3]])
    tape.build([(1, 64, 36, 100, [[1, 2, 3], [1, 2, 3]])])
    for group in (0, 1):
        tape.transfer(Direction.LOAD, 1, [1, 2], group=group, started=tape.now, ended=tape.now + 1_000_000)
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    rates = following.top().rates
    following.close()
    assert [(rate.direction, rate.layer_group, rate.total_bytes, rate.ceiling_per_s) for rate in rates] == [
        ("load", 0, 8192, 1 << 30), ("load", 1, 8192, 1 << 30)
    ]  # fmt: skip
    assert rates[0].moving_per_s == 8192 / 1e-3
    assert rates[0].per_s == 819.2


def test_what_a_store_failed_to_give_is_no_bandwidth(tmp_path):
    tape = Tape()
    tape.stored(b"a", operation=Operation.READ)
    source, record = tape.records[-1]
    failed = msgspec.structs.replace(record, outcome=Outcome.UNAVAILABLE)
    for records in ([(source, record)], [(source, record), (source, failed)]):
        folder = tmp_path / str(len(records))
        folder.mkdir()
        write_journals(folder, [*tape.records[:-1], *records])
        following = follow(folder)
        (rate,) = following.top().rates
        following.close()
        assert rate.total_bytes == record.nbytes > 0


def test_a_live_process_is_followed_and_a_new_one_appears(tmp_path):
    first = live(tmp_path / "a.tkvring", loading().records)
    following = follow(tmp_path)
    top = following.top()
    assert [process.is_alive for process in top.processes] == [True]
    assert top.tokens["requests"] == 1
    more = Tape()
    more.now = time.perf_counter_ns()
    more.query(9, 50)
    first.write(more.records[-1][1])
    second = live(tmp_path / "b.tkvring", Tape().records)
    following.refresh()
    top = following.top()
    assert top.tokens["requests"] == 2
    assert len(top.processes) == 2
    second.in_progress[0] = int(Callback.WAIT_FOR_SAVE)
    second.in_progress[1] = time.perf_counter_ns()
    assert "worker.wait_for_save" in [process.inside for process in following.top().processes]
    first.close()
    assert sorted(process.is_alive for process in following.top().processes) == [False, True]
    following.close()
    second.close()


def test_a_file_that_appears_and_cannot_be_read_is_named_once(tmp_path):
    write_journals(tmp_path, loading().records)
    following = follow(tmp_path)
    assert following.top().notes == []
    bad = tmp_path / "later.tkvring"
    bad.write_bytes(b"no ring\n" * 16384)
    for _ in range(2):
        following.refresh()
    (note,) = following.top().notes
    following.close()
    assert f"{bad} is no journal" in note


def test_a_note_names_a_path_with_brackets_as_it_is(tmp_path):
    folder = tmp_path / "[red]"
    folder.mkdir()
    write_journals(folder, loading().records)
    (folder / "bad[x].tkvring").write_bytes(b"no ring\n" * 16384)
    shown = "".join(
        line.removeprefix(" " * 10).rstrip()
        for line in CliRunner().invoke(app, ["top", str(folder)]).stdout.splitlines()
    )
    assert "/[red]/bad[x].tkvring is no journal" in shown


def test_held_pages_and_broken_rules_are_shown(tmp_path):
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.query(2, 100, 0, 100)
    tape.add(Finding(tape.now, "L3", "note", "x", "y"))
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    top = following.top()
    following.close()
    assert (top.held_pages, top.held_requests) == (4, 1)
    assert top.rules["violation S2"] == 1
    shown = CliRunner().invoke(app, ["top", str(tmp_path)]).stdout
    assert "violation S2 x1" in shown
    assert "4 pages of 1 request, the oldest" in shown
    assert "L3" not in shown


def test_pages_are_held_until_the_last_rank_has_given_them_back(tmp_path):
    tape = Tape(ranks=2)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    held, waits = [], []
    for rank in (None, 0, 1):
        if rank is not None:
            tape.polled(rank, saving=[1], saved=[1])
        folder = tmp_path / f"{rank}"
        folder.mkdir()
        write_journals(folder, tape.records)
        following = follow(folder)
        top = following.top()
        following.close()
        held.append((top.held_pages, top.held_requests, top.open_requests))
        dumped = json.loads(CliRunner().invoke(app, ["dump", "--json", str(folder)]).stdout)
        waits.append([request["waits_for"] for request in dumped["processes"][0]["requests"]])
    assert held == [(4, 1, 1), (4, 1, 1), (0, 0, 0)]
    assert waits == [["its save (get_finished)"], ["its save on rank 1 (get_finished)"], []]


def test_a_rule_that_is_broken_very_often_is_counted_on(tmp_path):
    tape = Tape()
    for number in range(150):
        tape.query(number, 100, 0, 100)
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    assert following.top().rules["violation S2"] == 150
    following.close()


def test_what_is_held_since_long_ago_is_not_forgotten(tmp_path):
    tape = loading()
    tape.prefill(1, 100, [[5, 6, 7, 8]])
    tape.finish(1, keeps=True, pages=[[5, 6, 7, 8]])
    for _ in range(LATEST):
        tape.idle(ms=0.1)
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    top = following.top()
    following.close()
    assert top.held_pages == 4
    assert [move.request for move in top.moves if move.direction == "load"] == ["7"]


def test_lookups_of_queries_that_never_come_are_bounded(tmp_path):
    tape = Tape()
    for number in range(3000):
        tape.add(Lookup(number, 9, 0, 0, 0, 0, [], None, None, 0, 0, 0, None))
    write_journals(tmp_path, tape.records)
    following = follow(tmp_path)
    assert len(following.followed[0].view.lookups) == 1024
    following.close()


def test_one_screen_fits_80_columns_and_has_no_colours_where_there_are_none(tmp_path):
    write_journals(tmp_path, loading(ranks=2).records)
    for arguments in (["top", str(tmp_path)], ["top", "--once", "--since", "2h", str(tmp_path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 80


def in_a_terminal(arguments, path, seen, **environ):
    """What a terminal gets until ``seen`` comes, and the exit status after Ctrl-C."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "50", **environ}
    process = subprocess.Popen(
        [sys.executable, "-m", "tracekv.cli", *arguments, str(path)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=env,
    )
    os.close(follower)
    got = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            got += os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if seen in got and process.poll() is None:
            process.send_signal(signal.SIGINT)
            seen = b"\xff"
    os.close(leader)
    return got, process.wait(60)


def test_a_live_screen_ends_with_ctrl_c_and_leaves_the_last_one(tmp_path):
    write_journals(tmp_path, loading().records)
    got, status = in_a_terminal(["top", "--interval", "0.2"], tmp_path, b"tracer")
    assert status == 0
    assert b"\x1b[?1049h" in got  # a screen of its own
    assert got.rindex(b"tracekv top") > got.rindex(b"\x1b[?1049l")  # and the last one after it


def test_whoever_waits_at_a_terminal_sees_how_far_it_is(tmp_path):
    write_journals(tmp_path, loading().records)
    got, status = in_a_terminal(["explain", "7"], tmp_path, b"\xff")
    assert status == 0
    assert b"reading" in got
    assert b"100 %" in got
    assert "reading" not in CliRunner().invoke(app, ["explain", "7", str(tmp_path)]).output


def test_a_terminal_without_colours_gets_none(tmp_path):
    write_journals(tmp_path, loading().records)
    plain, status = in_a_terminal(["top", "--once"], tmp_path, b"\xff", NO_COLOR="1")
    assert status == 0
    assert b"\x1b[31m" not in plain
    coloured, _ = in_a_terminal(["top", "--once"], tmp_path, b"\xff")
    assert b"\x1b[31m" in coloured

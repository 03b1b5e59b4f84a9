"""Scanning: what it finds is what the readers read, at any size and in any state of the files."""

from __future__ import annotations

import os
import signal
import struct
import threading
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_support import SMALL, drop

from tracekv.bench.journals import write_journals
from tracekv.journal import bulk_frames, frames
from tracekv.journal.archive import copy_records
from tracekv.journal.layout import FRAME_REST, SLOT_BYTES, JournalFormatError
from tracekv.journal.opening import open_journals
from tracekv.journal.parallel import in_processes
from tracekv.journal.reader import RingReader
from tracekv.journal.records import (
    BuildCall,
    Call,
    ClockAnchor,
    Drop,
    Finding,
    FinishedCall,
    LayerHooks,
    ProcessStarted,
    QueryCall,
    RequestResetCall,
    Transfer,
)
from tracekv.journal.ring import RingJournal
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Callback


@pytest.fixture(autouse=True, params=["one by one", "many at once"])
def _finding(request, monkeypatch):
    """Both ways of finding frames, the second in windows that these small files have several of."""
    if request.param == "many at once":
        monkeypatch.setattr(frames, "_MANY_SLOTS", 0)
        monkeypatch.setattr(frames, "_WINDOW", 64 * SLOT_BYTES)


def reset(request_id: int, ended_ns: int = 0) -> RequestResetCall:
    return RequestResetCall(int(Callback.REQUEST_RESET), ended_ns, ended_ns, 1, None, request_id)


def the_only(found):
    (process,) = found.processes
    return process


def read_all(path):
    reader = RingReader(path, patience_ns=0)
    records, lost, cursor = [], 0, 0
    while True:
        more, cursor, gone = reader.read(cursor)
        lost += gone
        if not more:
            return records, lost
        records += more


def overwrite(path, before, after):
    """Replace some bytes in the file itself, which others have mapped."""
    at = path.read_bytes().index(before)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(after)


def test_a_scan_selects_what_a_reader_reads(journal):
    for number in range(20):
        journal.write(drop(number))
        journal.write(reset(number))
    with scan([journal.path]) as found:
        process = the_only(found)
        assert list(process.select()) == read_all(journal.path)[0]
        assert [record.at_ns for record in process.select(Drop)] == list(range(20))
        assert (process.records, process.lost, process.next_sequence) == (41, 0, 41)
        assert process.count(Drop, RequestResetCall) == 40
        assert process.count(Transfer) == 0
        assert process.facts == journal.facts
        assert process.is_alive()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["engine", "thread", "kept"]), st.integers(0, 900)), max_size=400))
def test_however_the_rings_were_written_and_overwritten_a_scan_finds_what_a_reader_finds(tmp_path_factory, writes):
    journal = RingJournal.create(tmp_path_factory.mktemp("ring") / "test.tkvring", SMALL)
    journal.claim_engine_thread()
    for number, (ring, length) in enumerate(writes):
        record = Finding(number, "X", "note", "", "x" * length)
        if ring == "engine":
            journal.write(record)
        elif ring == "kept":
            journal.write(ProcessStarted(number, b"", "x" * (length // 30), "", 0, 0, ""))
        else:
            thread = threading.Thread(target=journal.write, args=(record,))
            thread.start()
            thread.join()
    expected, lost = read_all(journal.path)
    with scan([journal.path]) as found:
        process = the_only(found)
        assert list(process.select()) == expected
        assert process.lost == lost
        assert [r for _, r in process.numbered(Finding)] == [r for r in expected if isinstance(r, Finding)]


def test_a_damaged_record_is_passed_over_and_counted_as_lost(journal):
    for number in range(20):
        journal.write(Finding(number, "X", "note", "", f"mark{number}."))
    overwrite(journal.path, b"mark7.", b"Xark7.")
    with scan([journal.path]) as found:
        process = the_only(found)
        assert list(process.select()) == read_all(journal.path)[0]
        assert (process.records, process.lost) == (20, 1)


def found_in(path):
    """What a scan finds, record by record."""
    with scan([path]) as found:
        return [(list(process.numbered()), process.lost, process.ring_positions) for process in found.processes]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=300),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    st.booleans(),
)
def test_whatever_is_damaged_many_at_once_finds_what_one_by_one_does(tmp_path_factory, lengths, damage, is_archive):
    folder = tmp_path_factory.mktemp("damaged")
    journal = RingJournal.create(folder / "test.tkvring", SMALL)
    journal.claim_engine_thread()
    for number, length in enumerate(lengths):
        journal.write(Finding(number, "X", "note", "", "x" * length))
    path = journal.path
    if is_archive:
        path = folder / "archive"
        copy_records([RingReader(journal.path)], path)
    data = bytearray(path.read_bytes())
    begin = 64 if is_archive else RingReader(path).areas[-1].offset  # no magic, and no other header, is damaged
    for share, value in damage:
        data[begin + int(share * (len(data) - begin))] = value
    path.write_bytes(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_MANY_SLOTS", 0)
        patch.setattr(frames, "_WINDOW", 16 * SLOT_BYTES)
        many = found_in(path)
        patch.setattr(frames, "_WINDOW", 1 << 30)
        patch.setattr(frames, "_bulk_frames", lambda: None)
        assert many == found_in(path)


def test_who_follows_goes_on_behind_the_last_whole_record_however_long_the_damaged_one_is(journal):
    journal.claim_engine_thread()
    for number in range(60):
        journal.write(drop(number))
    journal.write(Finding(0, "X", "note", "", "mark" + "x" * 100 * SLOT_BYTES))
    overwrite(journal.path, b"mark", b"Mark")
    with scan([journal.path]) as found:
        process = the_only(found)
        assert process.records == 61
        process.ring.follow_from(process.next_sequence, process.ring_positions)
        overwrite(journal.path, b"Mark", b"mark")  # it was only being written
        records, _, lost = process.ring.read(process.next_sequence)
        assert ([type(record) for record in records], lost) == ([Finding], 0)


def test_a_ring_that_is_overwritten_between_two_looks_is_found_in_order(journal, monkeypatch):
    journal.claim_engine_thread()
    for number in range(1000):
        journal.write(drop(number))
    slots = bulk_frames._SLOT

    class Overtaken(np.ndarray):
        """The ring's slots: when they are looked at again, twenty records more were written."""

        def __getitem__(self, key):
            if self.dtype == slots and not isinstance(key, str):
                for number in range(1000, 1020):
                    journal.write(drop(number))
            return super().__getitem__(key)

    plain = np.frombuffer
    monkeypatch.setattr(bulk_frames.np, "frombuffer", lambda *args: plain(*args).view(Overtaken))
    reader = RingReader(journal.path, patience_ns=0)
    kinds, position = frames.scan_ring(reader.mapping, reader.areas[-1], lambda _: None)
    (column,) = kinds.by_tag.values()
    assert list(column.numbers) == sorted(column.numbers)
    assert list(column.places) == sorted(column.places)
    assert kinds.records > 200
    assert column.places[-1] < position


def test_a_payload_that_looks_like_a_frame_is_none(journal):
    journal.claim_engine_thread()
    area = RingReader(journal.path).areas[-1]
    for shift in range(SLOT_BYTES):
        (position,) = struct.unpack_from("<q", journal.path.read_bytes(), area.cells)
        # Of the record that is written now, the third slot may begin with what would be a frame there.
        rest = FRAME_REST.pack(1, position + 2, 99) + b"\x90"
        fake = struct.pack("<I", crc32(rest)) + rest
        journal.write(LayerHooks(shift, bytes(SLOT_BYTES + shift) + fake + bytes(SLOT_BYTES), b""))
    expected, lost = read_all(journal.path)
    assert len(expected) > SLOT_BYTES
    with scan([journal.path]) as found:
        assert (list(the_only(found).select()), the_only(found).lost) == (expected, lost)


def test_records_within_numbers_are_selected(journal):
    for number in range(20):
        journal.write(drop(number))
    with scan([journal.path]) as found:
        numbers = [number for number, _ in the_only(found).numbered(Drop, first=5, last=9)]
        assert numbers == [5, 6, 7, 8]


def test_a_time_leads_to_the_number_from_which_on_records_are_later(journal):
    for at in range(100):
        journal.write(reset(1, at * 10))
    with scan([journal.path]) as found:
        process = the_only(found)
        first = next(process.numbered(first=process.sequence_at(505)))[1]
        assert first.ended_ns == 510
        assert process.sequence_at(10_000) == process.next_sequence


@pytest.mark.parametrize("request_id", [7, 127, 128, 70_000, 1 << 40])
def test_a_request_is_found_wherever_it_is_named(journal, request_id):
    head = (int(Callback.BUILD_CONNECTOR_META), 1, 2, 3, None)
    build = BuildCall(*head, 1, [request_id, 5], [0, 0], [1, 1], [9], [], True)
    other = BuildCall(*head, 1, [request_id + 1, 5], [0, 0], [request_id, 1], [request_id], [], True)
    for record in (reset(request_id), reset(request_id + 1), build, other, drop(request_id)):
        journal.write(record)
    with scan([journal.path]) as found:
        process = the_only(found)
        assert [record for _, record in process.of_request(request_id)] == [reset(request_id), build]
        assert [record for _, record in process.of_request(request_id, BuildCall)] == [build]
        assert list(process.of_request(request_id, ClockAnchor)) == []


def test_several_requests_are_found_in_one_pass_as_each_is_alone(journal):
    for request_id in range(4):
        journal.write(reset(request_id))
    journal.write(FinishedCall(int(Callback.GET_FINISHED), 0, 9, 1, None, [1], [2], [1, 2], [], None))
    journal.write(reset(1))
    with scan([journal.path]) as found:
        process = the_only(found)
        together = process.of_requests(frozenset({1, 2, 77}))
        assert together == {each: list(process.of_request(each)) for each in (1, 2, 77)}
    assert [number for number, _ in together[1]] == [2, 5, 6]
    assert together[77] == []


def test_an_archive_and_the_ring_that_went_on_are_one_process(journal, tmp_path):
    journal.claim_engine_thread()
    for number in range(300):
        journal.write(drop(number))
    reader = RingReader(journal.path)
    copy_records([reader], tmp_path / "archive")
    for number in range(300, 1500):
        journal.write(drop(number))
    with scan([tmp_path]) as found:
        process = the_only(found)
        seen = [record.at_ns for record in process.select(Drop)]
        assert seen[:300] == list(range(300))
        assert seen[-1] == 1499
        assert len(seen) == len(set(seen)) == process.records - 1
        assert process.lost == 1500 - len(seen)
        assert process.lost > 0  # between the archive's end and what the ring still has
        assert sorted(process.paths) == sorted([journal.path, tmp_path / "archive"])


def test_what_an_archive_keeps_of_a_process_is_told(journal, tmp_path):
    journal.waits[2 * 3] = 33
    reader = RingReader(journal.path)
    copy_records([reader], tmp_path / "archive")
    with scan([tmp_path / "archive"]) as found:
        process = the_only(found)
        assert process.state() == reader.state()
        assert process.anchors() == reader.anchors()
        assert not process.is_alive()


def test_a_truncated_archive_gives_its_whole_entries_and_says_how_much_is_left_out(journal, tmp_path):
    for number in range(20):
        journal.write(drop(number))
    path = tmp_path / "archive"
    copy_records([RingReader(journal.path)], path)
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"no_space") + 3])
    with scan([path]) as found:
        process = the_only(found)
        assert [record.at_ns for record in process.select(Drop)] == list(range(19))
        assert 0 < process.truncated_bytes[path] < 100


def test_a_directory_gives_what_it_can_and_says_what_it_leaves_out(journal, tmp_path):
    (tmp_path / "notes.txt").write_text("none of ours")
    (tmp_path / "broken.tkvring").write_bytes(b"x" * SMALL)
    (tmp_path / "begun.tkvring").write_bytes(bytes(SMALL))
    with scan([tmp_path]) as found:
        assert the_only(found).facts == journal.facts
        told = "\n".join(found.left_out)
        assert "broken.tkvring is no journal" in told
        assert "begun.tkvring is just being made" in told
        assert "notes" not in told
    with pytest.raises(JournalFormatError, match=r"notes\.txt is no journal"):
        scan([tmp_path / "notes.txt"])


def test_a_live_ring_may_be_overwritten_after_the_scan(journal):
    journal.claim_engine_thread()
    for number in range(100):
        journal.write(drop(number))
    with scan([journal.path]) as found:
        for number in range(100, 800):
            journal.write(drop(number))
        seen = [record.at_ns for record in the_only(found).select(Drop)]
        assert seen == [number for number in range(100) if number in seen]
        assert len(seen) < 100


def test_who_follows_goes_on_where_the_scan_ended(journal):
    for number in range(100):
        journal.write(drop(number))
    with scan([journal.path]) as found:
        process = the_only(found)
        process.ring.follow_from(process.next_sequence, process.ring_positions)
        assert process.ring.read(process.next_sequence)[0] == []
        journal.write(drop(100))
        records, cursor, lost = process.ring.read(process.next_sequence)
        assert ([record.at_ns for record in records], cursor, lost) == ([100], 102, 0)


def test_a_large_directory_is_shared_among_cores_and_nothing_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("tracekv.journal.scan._LARGE", 1)
    written = write_journals(tmp_path, 6_000)
    told = []
    with scan([tmp_path], progress=lambda done, total: told.append((done, total))) as found:
        assert found.records == written
        assert found.lost == 0
        assert len(found.processes) == 8
        counted = found.map(lambda process: sum(1 for _ in process.select()))
        assert sum(counted) == written
        assert counted == [process.records for process in found.processes]
    assert told[-1][0] == told[-1][1]
    assert told == sorted(told)
    readers = [reader for path in tmp_path.iterdir() for reader in open_journals(path, patience_ns=0)]
    queries = 0
    for reader in readers:
        cursor = 0
        while (batch := reader.read(cursor))[0]:
            cursor = batch[1]
            queries += sum(isinstance(record, QueryCall) for record in batch[0])
    with scan([tmp_path]) as found:
        assert sum(process.count(QueryCall) for process in found.processes) == queries


def test_tasks_keep_their_order_whoever_does_them():
    parent = os.getpid()
    done = in_processes([lambda n=n: (n, os.getpid()) for n in range(5)], [1, 5, 3, 2, 4], workers=2)
    assert [number for number, _ in done] == list(range(5))
    assert {pid == parent for _, pid in done} == {True, False}


def test_what_is_left_is_done_by_whoever_is_free():
    reading, writing = os.pipe()
    tasks = [lambda: os.read(reading, 1), lambda: b"", lambda: os.write(writing, b"x")]
    assert in_processes(tasks, [3, 2, 1], workers=2) == [b"x", b"", 1]


def test_an_error_in_a_child_is_raised_by_the_parent():
    with pytest.raises(ZeroDivisionError):
        in_processes([lambda: 1, lambda: 1 // 0], [2, 1], workers=2)


def test_a_child_that_is_killed_is_an_error_and_not_a_wait():
    with pytest.raises(ChildProcessError, match="ended early"):
        in_processes([lambda: 1, lambda: os.kill(os.getpid(), signal.SIGKILL)], [2, 1], workers=2)


def test_calls_of_one_kind_are_not_those_of_another(journal):
    journal.write(Call(int(Callback.WAIT_FOR_SAVE), 1, 2, 3, None))
    journal.write(reset(3))
    with scan([journal.path]) as found:
        assert [type(record) for record in the_only(found).select(Call)] == [Call]

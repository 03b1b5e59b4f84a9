"""One ring file: what is written is read, in order, with every loss counted."""

from __future__ import annotations

import os
import stat
import sys
import threading
from array import array
from pathlib import Path

import pytest
from ring_support import SMALL, drop

from tracekv.journal import layout
from tracekv.journal.layout import JournalFormatError, JournalNotReady, detail_of, with_detail
from tracekv.journal.memory import MemoryJournal
from tracekv.journal.process import read_clocks
from tracekv.journal.reader import OpenHook, RingReader
from tracekv.journal.records import AllocCall, Call, ClockAnchor, Drop, LayerHooks, ProcessStarted, RunJoined
from tracekv.journal.ring import ANCHOR_EVERY_NS, RingJournal
from tracekv.journal.vocabulary import Callback


def read_all(reader, cursor=0):
    records, lost = [], 0
    while True:
        more, cursor, gone = reader.read(cursor)
        records += more
        lost += gone
        if not more:
            return records, cursor, lost


def test_the_first_record_says_who_writes(journal):
    [first], cursor, lost = RingReader(journal.path).read(0)
    facts = journal.facts
    assert first == ProcessStarted(
        facts.pid, facts.process_id, facts.host, facts.boot_id, facts.monotonic_ns, facts.wall_ns, facts.version
    )
    assert (cursor, lost) == (1, 0)


def test_the_header_gives_the_facts_of_its_writer(journal):
    assert RingReader(journal.path).facts == journal.facts


def test_a_file_is_of_its_owner_only(journal):
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600


def test_a_file_has_all_its_room_reserved(journal):
    assert journal.path.stat().st_blocks * 512 >= SMALL


def test_a_symbolic_link_is_not_written_through(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(FileExistsError):
        RingJournal.create(tmp_path / "link", SMALL)
    assert target.read_bytes() == b"precious"


def test_a_symbolic_link_is_not_read_through(journal, tmp_path):
    (tmp_path / "link").symlink_to(journal.path)
    with pytest.raises(OSError, match="symbolic links"):
        RingReader(tmp_path / "link")


def test_an_existing_file_is_not_overwritten(journal):
    with pytest.raises(FileExistsError):
        RingJournal.create(journal.path, SMALL)
    assert RingReader(journal.path).facts == journal.facts


def test_records_of_all_rings_come_in_the_order_they_were_written(journal):
    written = [drop(0), RunJoined(bytes(16), 0, 1), drop(1)]
    for record in written:
        journal.write(record)
    assert journal.claim_engine_thread()
    journal.write(drop(2))
    other = threading.Thread(target=journal.write, args=[drop(3)])
    other.start()
    other.join()
    journal.write(drop(4))
    records, _, lost = RingReader(journal.path).read(0)
    assert records[1:] == [*written, drop(2), drop(3), drop(4)]
    assert lost == 0


def test_a_reader_goes_on_from_its_cursor(journal):
    reader = RingReader(journal.path)
    _, cursor, _ = reader.read(0)
    journal.write(drop(1))
    records, cursor, _ = reader.read(cursor)
    assert records == [drop(1)]
    assert reader.read(cursor) == ([], cursor, 0)


def test_another_reader_goes_on_from_the_same_cursor(journal):
    for number in range(10):
        journal.write(drop(number))
    _, cursor, _ = RingReader(journal.path).read(0)
    journal.write(drop(10))
    assert RingReader(journal.path).read(cursor) == ([drop(10)], cursor + 1, 0)


def test_the_journal_reads_itself_as_a_memory_journal_does(journal):
    memory = MemoryJournal()
    for number in range(5):
        journal.write(drop(number))
        memory.write(drop(number))
    records, cursor, lost = journal.read(1)
    assert (records, cursor - 1, lost) == memory.read(0)


def test_the_oldest_records_are_overwritten_and_counted(journal):
    journal.claim_engine_thread()
    for number in range(5000):
        journal.write(drop(number))
    records, cursor, lost = read_all(RingReader(journal.path))
    kept = [record for record in records if isinstance(record, ProcessStarted)]
    numbers = [record.at_ns for record in records[1:]]
    assert len(kept) == 1
    assert numbers == list(range(numbers[0], 5000))
    assert 0 < numbers[0] == lost
    assert cursor == 5001


def test_records_that_explain_the_others_outlive_them(journal):
    journal.claim_engine_thread()
    joined = RunJoined(bytes(range(16)), 3, 8)
    journal.write(drop(0))
    journal.write(joined)
    for number in range(5000):
        journal.write(drop(number))
    records, _, _ = read_all(RingReader(journal.path, patience_ns=0))
    assert joined in records
    assert drop(0) not in records[:3]


@pytest.mark.parametrize("pages", [3, 500, 2000])
def test_a_long_record_is_whole_wherever_it_lies(tmp_path, pages):
    journal = RingJournal.create(tmp_path / "test.tkvring", 1 << 18)
    journal.claim_engine_thread()
    reader = RingReader(journal.path)
    cursor = 0
    for number in range(400):  # goes over the ring's edge several times
        record = AllocCall(3, number, number, 1, None, number, None, [list(range(100_000, 100_000 + pages))])
        journal.write(record)
        records, cursor, lost = reader.read(cursor)
        assert records[-1] == record
        assert lost == 0


def test_a_record_too_large_for_its_ring_is_dropped_and_counted(journal):
    journal.write(drop(1))
    journal.write(AllocCall(3, 0, 0, 1, None, 7, None, [list(range(10_000))]))
    journal.write(drop(2))
    reader = RingReader(journal.path)
    records, _, lost = reader.read(0)
    assert records[1:] == [drop(1), drop(2)]
    assert lost == 0
    assert reader.state().dropped == 1


def test_a_damaged_record_is_passed_over_and_counted(journal):
    for number in range(10):
        journal.write(drop(number))
    where = journal.path.read_bytes().index(b"no_space", journal.layout.shared.offset + 4 * layout.SLOT_BYTES)
    with journal.path.open("r+b") as file:
        file.seek(where)
        file.write(b"NO")
    records, _, lost = read_all(RingReader(journal.path, patience_ns=0))
    assert [record.at_ns for record in records[1:]] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert lost == 1


def test_records_written_while_a_reader_goes_from_ring_to_ring_are_not_taken_for_lost(journal):
    reader = RingReader(journal.path, patience_ns=1 << 62)
    engine = reader._rings[2]
    collect = engine.collect

    def write_and_collect(limit: int) -> None:
        engine.collect = collect
        for number in range(10):
            journal.write(drop(number))  # to the shared ring, which was just read
        journal.claim_engine_thread()
        journal.write(drop(10))
        collect(limit)

    engine.collect = write_and_collect
    records, _, lost = reader.read(0)
    assert records[1:] == [drop(number) for number in range(11)]
    assert lost == 0


def test_a_record_in_the_making_is_waited_for(journal):
    # A thread that was stopped between taking its number and storing the record.
    journal.claim_engine_thread()
    number = journal._append_engine.__self__._next_sequence()
    other = threading.Thread(target=journal.write, args=[drop(1)])
    other.start()
    other.join()
    reader = RingReader(journal.path, patience_ns=1 << 62)
    records, cursor, lost = reader.read(0)
    assert (len(records), cursor, lost) == (1, number, 0)


def test_a_record_that_never_comes_is_given_up(journal):
    journal.claim_engine_thread()
    journal._append_engine.__self__._next_sequence()
    other = threading.Thread(target=journal.write, args=[drop(1)])
    other.start()
    other.join()
    records, _, lost = RingReader(journal.path, patience_ns=0).read(0)
    assert records[1:] == [drop(1)]
    assert lost == 1


def test_a_missing_record_of_an_ended_journal_is_lost_at_once(journal):
    journal._append_engine.__self__._next_sequence()
    journal.write(drop(1))
    journal.close()
    records, _, lost = RingReader(journal.path, patience_ns=1 << 62).read(0)
    assert records[1:] == [drop(1)]
    assert lost == 1


def test_limited_reads_give_the_same_as_one(journal):
    journal.claim_engine_thread()
    for number in range(40):
        thread = threading.Thread(target=journal.write, args=[drop(number)])
        thread.start()
        thread.join()
        for inner in range(number % 5):
            journal.write(drop(1000 * number + inner))
    whole = RingReader(journal.path).read(0)
    reader, cursor, records, lost = RingReader(journal.path), 0, [], 0
    while len(records) < len(whole[0]):
        more, cursor, gone = reader.read(cursor, limit=3)
        assert more
        records += more
        lost += gone
    assert (records, cursor, lost) == whole


def test_the_hook_slots_and_the_callback_in_progress_are_seen_by_a_reader(journal):
    reader = RingReader(journal.path)
    assert reader.state().callback == 0
    journal.in_progress[1], journal.in_progress[0] = 77, Callback.START_LOAD_KV
    journal.waits[2 * 5], journal.waits[2 * 5 + 1] = 100e-9, 110e-9
    journal.waits[2 * 37] = 120e-9
    journal.saves[0], journal.saves[1] = 130e-9, 20e-9  # entered again: the end is of the call before
    state = reader.state()
    assert (state.callback, state.since_ns) == (Callback.START_LOAD_KV, 77)
    assert state.waits == [OpenHook(5, 100, 110), OpenHook(37, 120, 0)]
    assert state.saves == [OpenHook(0, 130, 0)]


def test_the_hook_slots_are_as_many_as_a_memory_journal_has(journal):
    memory = MemoryJournal()
    for name in ("waits", "saves", "in_progress"):
        ours, theirs = getattr(journal, name), getattr(memory, name)
        assert (ours.itemsize, len(ours)) == (theirs.itemsize, len(theirs))


def test_a_pass_of_hooks_comes_back_in_nanoseconds(journal):
    begins = [10**15 + 1000 * layer for layer in range(61)]  # an uptime of eleven days
    for layer, begin in enumerate(begins):
        journal.waits[2 * layer], journal.waits[2 * layer + 1] = 1e-9 * begin, 1e-9 * (begin + 250)
    journal.write(LayerHooks(9, journal.waits[:122].tobytes(), journal.saves[:122].tobytes(), True))
    hooks = RingReader(journal.path).read(0)[0][1]
    assert hooks.waits == array("q", [moment for begin in begins for moment in (begin, begin + 250)]).tobytes()
    assert hooks.saves == bytes(61 * 16)
    assert not hooks.in_seconds


def test_the_control_word_goes_from_reader_to_writer(journal):
    reader = RingReader(journal.path)
    assert detail_of(journal.at_step(0)) == ""
    reader.set_control(with_detail(reader.control(), "full"))
    assert detail_of(journal.at_step(0)) == "full"
    assert detail_of(reader.control()) == "full"


def test_a_control_word_keeps_its_other_bits():
    assert with_detail(0b1101, "full") == 0b1110
    assert with_detail(0b1101, "") == 0b1100
    with pytest.raises(ValueError, match="economy, full, off"):
        with_detail(0, "fine")


def test_clock_anchors_are_taken_again_when_they_are_old(journal):
    reader = RingReader(journal.path)
    start = ClockAnchor(journal.facts.monotonic_ns, journal.facts.wall_ns)
    journal.at_step(journal.facts.monotonic_ns + ANCHOR_EVERY_NS - 1)
    assert reader.anchors() == [start]
    for _ in range(3):
        before = read_clocks()
        journal.at_step(1 << 62)
        after = read_clocks()
        [first, latest] = reader.anchors()
        assert first == start
        assert before[0] <= latest.monotonic_ns <= after[0]
    records, _, _ = reader.read(0)
    assert [type(record) for record in records] == [ProcessStarted, ClockAnchor, ClockAnchor, ClockAnchor]
    assert records[-1] == latest


def test_a_torn_anchor_is_not_believed(journal):
    journal.at_step(1 << 62)
    reader = RingReader(journal.path)
    assert len(reader.anchors()) == 2
    with journal.path.open("r+b") as file:
        file.seek(layout.ANCHOR_OFFSETS[1] + 9)
        file.write(b"\x55")
    assert len(reader.anchors()) == 1


def test_a_closed_journal_takes_nothing_and_is_over(journal):
    journal.claim_engine_thread()
    reader = RingReader(journal.path)
    assert reader.is_alive()
    journal.close()
    journal.write(drop(1))
    assert not reader.is_alive()
    assert len(reader.read(0)[0]) == 1
    assert not journal.claim_engine_thread()


def test_only_one_living_thread_has_the_engine_ring(journal):
    assert journal.claim_engine_thread()
    answers = []
    other = threading.Thread(target=lambda: answers.append(journal.claim_engine_thread()))
    other.start()
    other.join()
    assert answers == [False]


def test_the_engine_ring_passes_on_when_its_thread_has_ended(journal):
    answers = []
    first = threading.Thread(target=lambda: answers.append(journal.claim_engine_thread()))
    first.start()
    first.join()
    assert answers == [True]
    assert journal.claim_engine_thread()


def test_threads_share_a_ring_without_losing_a_record(tmp_path):
    journal = RingJournal.create(tmp_path / "test.tkvring", 1 << 21)
    journal.claim_engine_thread()
    threads = [
        threading.Thread(target=lambda base=base: [journal.write(drop(base + i)) for i in range(1000)])
        for base in (10_000, 20_000)
    ]
    for thread in threads:
        thread.start()
    for number in range(1000):
        journal.write(drop(number))
    for thread in threads:
        thread.join()
    records, _, lost = read_all(RingReader(journal.path))
    numbers = [record.at_ns for record in records[1:]]
    assert lost == 0
    assert len(numbers) == 3000
    for base in (0, 10_000, 20_000):
        assert [number for number in numbers if base <= number < base + 1000] == list(range(base, base + 1000))


def test_a_report_within_a_report_waits_for_nothing(journal):
    """As a finalizer's, which may run anywhere."""
    began = []

    def report(frame, event, argument):
        if frame.f_code.co_name == "append" and not began:
            began.append(True)
            journal.write(drop(2))
        return report

    def work():
        sys.settrace(report)
        journal.write(drop(1))
        sys.settrace(None)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert {record.at_ns for record in journal.read(0)[0] if isinstance(record, Drop)} == {1, 2}


def test_a_record_of_a_later_version_is_counted(journal):
    class Later(Call, tag=99):
        more: int

    journal.write(Later(1, 2, 3, 4, None, 5))
    journal.write(drop(1))
    reader = RingReader(journal.path)
    records, _, lost = reader.read(0)
    assert records[1:] == [drop(1)]
    assert (reader.undecodable, lost) == (1, 0)


def altered(journal: RingJournal, offset: int, data: bytes) -> Path:
    content = bytearray(journal.path.read_bytes())
    content[offset : offset + len(data)] = data
    path = journal.path.with_name("altered.tkvring")
    path.write_bytes(content)
    return path


def test_an_unknown_version_is_refused_with_both_versions(journal):
    with pytest.raises(JournalFormatError, match=r"altered.tkvring has journal format 9, .* reads format 2"):
        RingReader(altered(journal, 8, b"\x09"))


def test_a_damaged_header_is_refused(journal):
    with pytest.raises(JournalFormatError, match="damaged header"):
        RingReader(altered(journal, 70, b"\xff\x00\xff"))


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "song.tkvring"
    path.write_bytes(b"RIFF" * SMALL)
    with pytest.raises(JournalFormatError, match="song.tkvring is no journal: it begins with b'RIFFRIFF'"):
        RingReader(path)


def test_a_cut_file_is_refused(journal):
    path = altered(journal, 0, b"")
    with path.open("r+b") as file:
        file.truncate(SMALL + 100)
    with pytest.raises(JournalFormatError, match="its header says 65536"):
        RingReader(path)


def test_a_journal_that_is_finished_while_it_is_opened_is_not_ready_yet_and_never_none(journal, tmp_path, monkeypatch):
    begun = tmp_path / "begun.tkvring"
    begun.touch()
    looked = []

    def finishing(look):
        def look_and_finish(*args):
            seen = look(*args)
            if not looked:
                begun.write_bytes(journal.path.read_bytes())
            looked.append(look)
            return seen

        return look_and_finish

    for name in ("fstat", "pread"):
        monkeypatch.setattr(f"tracekv.journal.reader.os.{name}", finishing(getattr(os, name)))
    with pytest.raises(JournalNotReady):
        RingReader(begun)
    assert len(looked) == 2
    assert RingReader(begun).facts == journal.facts


def test_a_file_in_the_making_is_told_apart(journal, tmp_path):
    with pytest.raises(JournalNotReady):
        RingReader(altered(journal, 0, bytes(8)))
    (tmp_path / "empty.tkvring").touch()
    with pytest.raises(JournalNotReady):
        RingReader(tmp_path / "empty.tkvring")


@pytest.mark.parametrize("size", [0, 4096, 65_537])
def test_a_size_that_no_journal_can_have_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match=f"journal of {size} bytes"):
        RingJournal.create(tmp_path / "test.tkvring", size)
    assert not list(tmp_path.iterdir())

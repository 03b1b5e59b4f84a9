"""Archives: what journals held, for longer than a ring holds it."""

from __future__ import annotations

import stat
from zlib import crc32

import pytest
from ring_support import SMALL, drop

from tracekv.journal.archive import ArchiveReader, ArchiveWriter, copy_records
from tracekv.journal.layout import JournalFormatError
from tracekv.journal.opening import open_journal, open_journals
from tracekv.journal.reader import OpenHook, RingReader
from tracekv.journal.ring import RingJournal


def test_an_archive_reads_as_the_journal_that_it_is_of(journal, tmp_path):
    for number in range(20):
        journal.write(drop(number))
    journal.waits[2 * 3] = 33e-9
    journal.at_step(1 << 62)
    reader = RingReader(journal.path)
    assert copy_records([reader], tmp_path / "archive") == 22
    archived = open_journal(tmp_path / "archive")
    assert archived.facts == journal.facts
    assert archived.read(0) == RingReader(journal.path).read(0)
    assert archived.state() == reader.state()
    assert archived.state().waits == [OpenHook(3, 33, 0)]
    assert archived.anchors() == reader.anchors()
    assert not archived.is_alive()


def test_an_archive_goes_on_from_a_cursor(journal, tmp_path):
    for number in range(20):
        journal.write(drop(number))
    copy_records([RingReader(journal.path)], tmp_path / "archive")
    archived = open_journal(tmp_path / "archive")
    whole, end, _ = archived.read(0)
    first, cursor, _ = archived.read(0, limit=7)
    rest, last, _ = archived.read(cursor)
    assert first + rest == whole
    assert last == end
    assert open_journal(tmp_path / "archive").read(cursor)[0] == rest


def test_an_archive_holds_more_than_the_ring(journal, tmp_path):
    journal.claim_engine_thread()
    reader = RingReader(journal.path)
    with ArchiveWriter(tmp_path / "archive") as archive:
        for number in range(2000):
            journal.write(drop(number))
            if number % 50 == 0:
                archive.copy(reader)
        archive.copy(reader)
    records, _, lost = open_journal(tmp_path / "archive").read(0)
    assert [record.at_ns for record in records[1:]] == list(range(2000))
    assert lost == 0
    assert RingReader(journal.path).read(0)[2] > 0


def test_what_the_ring_lost_is_a_counted_gap_in_the_archive(journal, tmp_path):
    journal.claim_engine_thread()
    for number in range(2000):
        journal.write(drop(number))
    copy_records([RingReader(journal.path)], tmp_path / "archive")
    assert open_journal(tmp_path / "archive").read(0) == RingReader(journal.path).read(0)


def test_an_archive_holds_several_processes(tmp_path):
    journals = [RingJournal.create(tmp_path / f"{number}.tkvring", SMALL) for number in range(3)]
    readers = [RingReader(journal.path) for journal in journals]
    with ArchiveWriter(tmp_path / "archive") as archive:
        for number in range(10):
            journals[number % 3].write(drop(number))
            for reader in readers:
                archive.copy(reader)
    archived = open_journals(tmp_path / "archive")
    assert [reader.facts for reader in archived] == [journal.facts for journal in journals]
    for number, reader in enumerate(archived):
        assert [record.at_ns for record in reader.read(0)[0][1:]] == list(range(number, 10, 3))
    with pytest.raises(JournalFormatError, match="of 3 processes"):
        open_journal(tmp_path / "archive")


def test_an_archive_can_be_archived(journal, tmp_path):
    journal.write(drop(1))
    copy_records([RingReader(journal.path)], tmp_path / "first")
    copy_records(open_journals(tmp_path / "first"), tmp_path / "second")
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_cut_tail_is_tolerated_and_counted(journal, tmp_path, cut):
    for number in range(20):
        journal.write(drop(number))
    path = tmp_path / "archive"
    copy_records([RingReader(journal.path)], path)
    whole = open_journal(path).read(0)[0]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - cut)
    archived = open_journal(path)
    assert isinstance(archived, ArchiveReader)
    records = archived.read(0)[0]
    assert records == whole[: len(records)]
    assert archived.truncated_bytes > 0


def test_a_whole_archive_has_no_cut_tail(journal, tmp_path):
    copy_records([RingReader(journal.path)], tmp_path / "archive")
    archived = open_journal(tmp_path / "archive")
    assert archived.truncated_bytes == 0
    archived.read(0)
    assert archived.truncated_bytes == 0


def test_an_archive_that_still_grows_is_followed(journal, tmp_path):
    reader = RingReader(journal.path)
    with ArchiveWriter(tmp_path / "archive") as archive:
        archive.copy(reader)
        archived = open_journal(tmp_path / "archive")
        _, cursor, _ = archived.read(0)
        journal.write(drop(1))
        archive.copy(reader)
        assert archived.read(cursor) == ([drop(1)], cursor + 1, 0)


def test_a_damaged_entry_ends_the_reading(journal, tmp_path):
    for number in range(20):
        journal.write(drop(number))
    path = tmp_path / "archive"
    copy_records([RingReader(journal.path)], path)
    content = bytearray(path.read_bytes())
    where = content.index(b"no_space", content.index(b"no_space") + 1)
    content[where] ^= 1
    path.write_bytes(content)
    archived = open_journal(path)
    assert [record.at_ns for record in archived.read(0)[0][1:]] == [0]
    assert archived.truncated_bytes > 0


def test_an_archive_is_never_overwritten(journal, tmp_path):
    (tmp_path / "archive").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        copy_records([RingReader(journal.path)], tmp_path / "archive")
    assert (tmp_path / "archive").read_bytes() == b"precious"


def test_an_archive_is_of_its_owner_only(journal, tmp_path):
    copy_records([RingReader(journal.path)], tmp_path / "archive")
    assert stat.S_IMODE((tmp_path / "archive").stat().st_mode) == 0o600


def test_an_unknown_archive_version_is_refused(journal, tmp_path):
    path = tmp_path / "archive"
    copy_records([RingReader(journal.path)], path)
    content = bytearray(path.read_bytes())
    content[8] = 7
    path.write_bytes(content)
    with pytest.raises(JournalFormatError, match="damaged header"):
        open_journal(path)
    content[12:16] = crc32(content[:12]).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(JournalFormatError, match=r"archive has archive format 7, .* reads format 1"):
        open_journal(path)


def test_a_file_that_is_neither_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello" * 20_000)
    with pytest.raises(JournalFormatError, match=r"notes.txt is no journal"):
        open_journal(tmp_path / "notes.txt")

"""From a path to the journals that are there: a ring file, an archive of several processes, or a directory of both."""

from __future__ import annotations

from pathlib import Path

from tracekv.journal import archive
from tracekv.journal.archive import ArchiveReader
from tracekv.journal.directory import journal_files
from tracekv.journal.layout import JournalFormatError, JournalNotReady
from tracekv.journal.reader import PATIENCE_NS, JournalReader, RingReader


def open_journals(path: Path, *, patience_ns: int = PATIENCE_NS) -> list[JournalReader]:
    """A reader for each process that ``path`` holds a journal of.

    Of a directory, its ring files; one that is just being made, or goes away meanwhile, is left out. ``patience_ns`` is
    :class:`RingReader`'s: 0 for who reads once.

    Raises:
        JournalFormatError: A file that is neither ring nor archive, or of a version that this one doesn't read.
        OSError: It can't be read.
    """
    if path.is_dir():
        return [reader for file in journal_files(path) if (reader := _open_if_ready(file, patience_ns)) is not None]
    with path.open("rb") as file:
        magic = file.read(len(archive.MAGIC))
    if magic == archive.MAGIC:
        return [ArchiveReader(path, number, facts) for number, facts in archive.sources(path).items()]
    return [RingReader(path, patience_ns=patience_ns)]


def open_journal(path: Path, *, patience_ns: int = PATIENCE_NS) -> JournalReader:
    """The reader of a ring file, or of an archive that holds one process.

    Raises:
        JournalFormatError: As :func:`open_journals`; or there are several processes, or none.
        OSError: It can't be read.
    """
    readers = open_journals(path, patience_ns=patience_ns)
    if len(readers) != 1:
        for reader in readers:
            reader.close()
        raise JournalFormatError(
            f"tracekv: {path} holds the journals of {len(readers)} processes, not of one: use open_journals"
        )
    return readers[0]


def _open_if_ready(path: Path, patience_ns: int) -> RingReader | None:
    try:
        return RingReader(path, patience_ns=patience_ns)
    except (JournalNotReady, FileNotFoundError):
        return None

"""From a path to the journals that are there: a ring file, an archive of several processes, or a directory of both."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tracekv.journal import archive
from tracekv.journal.archive import ArchiveReader
from tracekv.journal.directory import SUFFIX, journal_files
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


def files_of(paths: Sequence[Path]) -> list[tuple[Path, bool]]:
    """Ring files and archives at some paths, and whether each was named itself; of a directory, what it holds.

    Raises:
        OSError: A path isn't there, or a directory can't be listed.
    """
    found: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            path.stat()
            found[path] = True
            continue
        archives = archive_files(path)  # first: it raises where a glob would pass over what can't be listed
        for file in [*journal_files(path), *archives]:
            found.setdefault(file, False)
    return list(found.items())


def archive_files(directory: Path) -> list[Path]:
    """The archives in a directory, by name: whatever a file is called, its first bytes tell."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.suffix != SUFFIX and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # what it is can't be said, so neither that it is missing
                if is_archive(path):
                    found.append(path)
    return found


def is_archive(path: Path) -> bool:
    """Whether a file begins as an archive does.

    Raises:
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        return file.read(len(archive.MAGIC)) == archive.MAGIC


def why_left_out(path: Path, error: JournalFormatError | OSError) -> str:
    """Why a file of a directory couldn't be read, in a sentence."""
    if isinstance(error, JournalNotReady):
        return f"tracekv: {path} is just being made, or was left unfinished"
    if isinstance(error, JournalFormatError):
        return str(error)
    return f"tracekv: {path} can't be read: {error.strerror or error}"


def _open_if_ready(path: Path, patience_ns: int) -> RingReader | None:
    try:
        return RingReader(path, patience_ns=patience_ns)
    except (JournalNotReady, FileNotFoundError):
        return None

"""From what a person names to journals: files, directories, or the place where journals are by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tracekv import settings as settings_module
from tracekv.journal.directory import default_directory, journal_files
from tracekv.journal.layout import JournalFormatError, JournalNotReady
from tracekv.journal.opening import archive_files, open_journals
from tracekv.journal.reader import PATIENCE_NS, JournalReader


class NoJournals(Exception):
    """There is nothing to read; the message says where was looked and what to do."""


def journal_directory() -> Path:
    """``TRACEKV_JOURNAL_DIR``, or the user's own directory in the system's tmpfs.

    Raises:
        NoJournals: A setting has no valid value.
    """
    try:
        named = settings_module.load().journal_dir
    except settings_module.SettingsError as error:
        raise NoJournals(str(error)) from error
    return Path(named) if named else default_directory()


@contextmanager
def opened(paths: Sequence[Path], *, patience_ns: int = PATIENCE_NS) -> Iterator[tuple[list[JournalReader], list[str]]]:
    """Readers of all journals that ``paths`` hold, and what had to be left out of directories.

    Raises:
        NoJournals: There is none, or a named file can't be read.
    """
    readers: list[JournalReader] = []
    left_out: list[str] = []
    try:
        for path in paths or [journal_directory()]:
            readers += _open(path, left_out, patience_ns)
        if not readers:
            where = ", ".join(str(path) for path in paths or [journal_directory()])
            raise NoJournals(
                f"tracekv: no journal in {where}. An engine with a traced connector writes one, unless TRACEKV_DETAIL=off; name its "
                "directory, or set TRACEKV_JOURNAL_DIR as it is set there"
                + "".join(f"\n{reason}" for reason in left_out)
            )
        yield readers, left_out
    finally:
        for reader in readers:
            reader.close()


def _files_at(path: Path) -> list[Path]:
    """The file, or what a directory holds: archives first, so that who copies goes on in the ring files."""
    if not path.is_dir():
        return [path]
    try:
        return [*archive_files(path), *journal_files(path)]
    except OSError as error:
        raise NoJournals(f"tracekv: {path} can't be read: {error.strerror or error}") from None


def _open(path: Path, left_out: list[str], patience_ns: int) -> list[JournalReader]:
    if not path.exists():
        raise NoJournals(f"tracekv: there is no {path}")
    readers: list[JournalReader] = []
    for file in _files_at(path):
        try:
            readers += open_journals(file, patience_ns=patience_ns)
        except JournalNotReady:
            left_out.append(f"tracekv: {file} is just being made, or was left unfinished")
        except (JournalFormatError, OSError) as error:
            message = str(error) if isinstance(error, JournalFormatError) else f"tracekv: {file}: {error.strerror}"
            if not path.is_dir():
                raise NoJournals(message) from error
            left_out.append(message)
    return readers

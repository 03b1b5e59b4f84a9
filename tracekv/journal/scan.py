"""Opens many journals at once: every frame is found and checked, and only the records that are asked for are decoded.

A million records are a million objects when they are all decoded, and most questions need a tenth of them. So :func:`scan` keeps two
numbers per record, by kind, and :meth:`ProcessScan.select` makes records of the kinds that a view asks for.

A process whose journal was also archived is one process here: its records are joined by their sequence numbers.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from tracekv.journal import archive, frames
from tracekv.journal.frames import ArchiveScan, Kinds, Progress
from tracekv.journal.layout import JournalFacts, JournalFormatError
from tracekv.journal.opening import files_of, is_archive, why_left_out
from tracekv.journal.parallel import in_processes
from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.reader import RingReader

T = TypeVar("T")
#: Told the bytes that are done, and those that there are.
Tell = Callable[[int, int], object]

#: Bytes from which on several cores share the work.
_LARGE = 32 << 20


class _RingFile:
    """A ring file that is open."""

    def __init__(self, path: Path) -> None:
        self._reader = RingReader(path, patience_ns=0)
        self.close = self._reader.close

    def scan(self, progress: Progress) -> list[tuple[Kinds, int]]:
        return [frames.scan_ring(self._reader.mapping, area, progress) for area in self._reader.areas]

    def tell(self, found: list[tuple[Kinds, int]], process_of: Callable[[JournalFacts], ProcessScan]) -> None:
        process_of(self._reader.facts).add_ring(self._reader, found)


class _ArchiveFile:
    """An archive that is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            archive.check_prefix(file, path)
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.close = self._mapping.close

    def scan(self, progress: Progress) -> ArchiveScan:
        return ArchiveScan(self._mapping, progress)

    def tell(self, found: ArchiveScan, process_of: Callable[[JournalFacts], ProcessScan]) -> None:
        for number, encoded in found.facts.items():
            facts = msgspec.msgpack.decode(encoded, type=JournalFacts)
            process_of(facts).add_archived(self._path, number, self._mapping, found)


class Scan:
    """What was found at some paths. To be closed; ``with scan(paths) as found`` does it.

    Attributes:
        processes: By the time of their start.
        left_out: Files of directories that couldn't be read, a sentence each.
    """

    def __init__(self, left_out: list[str]) -> None:
        self.processes: list[ProcessScan] = []
        self.left_out = left_out
        self._files = contextlib.ExitStack()

    @property
    def records(self) -> int:
        """Records of all processes."""
        return sum(process.records for process in self.processes)

    @property
    def lost(self) -> int:
        """Records of all processes that were overwritten, or never got whole."""
        return sum(process.lost for process in self.processes)

    @property
    def notes(self) -> list[str]:
        """What a person has to know of the files: those left out, and archives that are cut short."""
        cut = {path: nbytes for process in self.processes for path, nbytes in process.truncated_bytes.items()}
        return [
            *self.left_out,
            *(
                f"tracekv: {path} is cut short: {n} bytes after its last whole entry are left out"
                for path, n in cut.items()
            ),
        ]

    def map(self, work: Callable[[ProcessScan], T]) -> list[T]:
        """What ``work`` makes of each process, in their order; done on several cores by forked children, so it has to be picklable."""
        tasks = [functools.partial(work, process) for process in self.processes]
        return in_processes(
            tasks, [process.records for process in self.processes], workers=_workers(self.records * 256)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the files back."""
        self._files.close()

    def process(self, facts: JournalFacts) -> ProcessScan:
        """The process of ``facts``, made where it isn't known."""
        for known in self.processes:
            if known.facts.process_id == facts.process_id:
                return known
        fresh = ProcessScan(facts)
        self.processes.append(fresh)
        return fresh

    def read(self, files: Sequence[_RingFile | _ArchiveFile], sizes: Sequence[int], tell: Tell | None) -> None:
        """Scan files that are open, and give them back with this scan."""
        for file in files:
            self._files.callback(file.close)
        workers = _workers(sum(sizes))
        progress = _Progress(sum(sizes) // workers, tell)
        found: list[Any] = in_processes(
            [functools.partial(file.scan, progress.passed) for file in files], sizes, workers=workers
        )
        for file, each in zip(files, found, strict=True):
            file.tell(each, self.process)
        for process in self.processes:
            process.close()
        self.processes.sort(key=lambda process: (process.facts.wall_ns, process.facts.process_id))
        progress.end()


def scan(paths: Sequence[Path], *, progress: Tell | None = None) -> Scan:
    """Scan the journals, archives and directories at ``paths``.

    A large input is scanned on several cores by forked children, so no other thread should run.

    Args:
        paths: Files and directories; of a directory, the ring files and archives in it.
        progress: Called now and then with the bytes that are done, and those that there are to do.

    Raises:
        JournalFormatError: A named file is no journal, or of a version that this one doesn't read.
        OSError: A named path can't be read.
    """
    left_out: list[str] = []
    files: list[_RingFile | _ArchiveFile] = []
    sizes: list[int] = []
    with contextlib.ExitStack() as on_error:
        for path, is_named in files_of(paths):
            try:
                sizes.append(path.stat().st_size)
                files.append(_ArchiveFile(path) if is_archive(path) else _RingFile(path))
            except (JournalFormatError, OSError) as error:
                if is_named:
                    raise
                del sizes[len(files) :]
                left_out.append(why_left_out(path, error))
            else:
                on_error.callback(files[-1].close)
        on_error.pop_all()
    found = Scan(left_out)
    try:
        found.read(files, sizes, progress)
    except BaseException:
        found.close()
        raise
    return found


class _Progress:
    """Adds up what is passed."""

    def __init__(self, total: int, tell: Tell | None) -> None:
        self._total = total
        self._tell = tell
        self._done = 0

    def passed(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        if self._tell is not None:
            self._tell(self._done, self._total)

    def end(self) -> None:
        self.passed(self._total - self._done)


def _workers(nbytes: int) -> int:
    """A fork isn't worth it for what takes milliseconds."""
    return len(os.sched_getaffinity(0)) if nbytes >= _LARGE else 1

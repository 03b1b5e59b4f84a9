"""``tracekv record``: keep more than a ring holds."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tracekv.agent.paths import NoJournals, journal_directory, opened
from tracekv.cli._opening import Paths
from tracekv.journal.archive import ArchiveWriter
from tracekv.journal.directory import journal_files
from tracekv.journal.layout import JournalFormatError
from tracekv.journal.reader import JournalReader, RingReader
from tracekv.views.amounts import plural

_INTERVAL_S = 0.1


def record(
    output: Annotated[Path, typer.Option("-o", "--output", help="The archive to make; it must not exist.")],
    paths: Paths = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the engines have ended, or until interrupted.")
    ] = False,
) -> None:
    """Copy what journals hold into one archive file, with what each process was doing."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with opened(paths or []) as (readers, left_out):
            archive = ArchiveWriter(output)
            try:
                records = _follow(archive, readers, paths or []) if follow else sum(map(archive.copy, readers))
            finally:
                archive.close()
            for note in left_out:
                console.print(note, markup=False)
            processes = len({reader.facts.process_id for reader in readers})
            of = f"{processes} process{'' if processes == 1 else 'es'}"
            console.print(f"{plural(records, 'record')} of {of} in {output}", markup=False)
    except NoJournals as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from None
    except FileExistsError:
        console.print(f"tracekv: {output} exists; an archive is never overwritten: name another file", markup=False)
        raise typer.Exit(1) from None
    except OSError as error:
        console.print(
            f"tracekv: {output} can't be written: {error.strerror or error}. Name another file with -o", markup=False
        )
        raise typer.Exit(1) from None


def _follow(archive: ArchiveWriter, readers: list[JournalReader], paths: list[Path]) -> int:
    """Copy again and again; readers of journals that appear in a directory are added to ``readers``."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    directories = [path for path in paths or [journal_directory()] if path.is_dir()]
    # What was archived before doesn't grow: read once, before the ring files that it goes on in.
    total = sum(archive.copy(reader) for reader in readers if not isinstance(reader, RingReader))
    while True:
        is_over = stop.is_set() or not any(reader.is_alive() for reader in readers)
        total += sum(archive.copy(reader) for reader in readers if isinstance(reader, RingReader))
        if is_over:
            return total
        known = {reader.path for reader in readers}
        for file in [file for directory in directories for file in journal_files(directory)]:
            if file not in known:
                with contextlib.suppress(JournalFormatError, OSError):
                    readers.append(RingReader(file))
        stop.wait(_INTERVAL_S)

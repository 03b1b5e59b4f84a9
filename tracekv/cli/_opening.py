"""Opens what a command was asked to read, however much it is, with a progress bar for whoever waits at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tracekv.agent.paths import NoJournals, journal_directory
from tracekv.journal.layout import JournalFormatError
from tracekv.journal.scan import Scan, scan

#: What a command that reads journals is told to read.
Paths = Annotated[
    list[Path] | None,
    typer.Argument(help="Journals, archives, or folders of them; by default TRACEKV_JOURNAL_DIR.", show_default=False),
]


@contextmanager
def scanned(paths: Sequence[Path]) -> Iterator[Scan]:
    """Everything that ``paths`` hold (by default ``TRACEKV_JOURNAL_DIR``), found and not yet decoded.

    Raises:
        NoJournals: There is nothing to read, or a named file can't be; the message says what to do.
    """
    with scanned_at(list(paths) or [journal_directory()]) as found:
        yield found


def scanned_at(where: Sequence[Path]) -> Scan:
    """As :func:`scanned`, for who closes it later.

    Raises:
        NoJournals: As there.
    """
    try:
        with progress_bar("reading") as tell:
            found = scan(where, progress=tell)
    except JournalFormatError as error:
        raise NoJournals(str(error)) from None
    except FileNotFoundError as error:
        raise NoJournals(
            f"tracekv: there is no {error.filename or where[0]}. An engine with a traced connector makes its journals' directory; "
            "name it, or set TRACEKV_JOURNAL_DIR as it is set there"
        ) from None
    except OSError as error:
        raise NoJournals(
            f"tracekv: {error.filename or where[0]} can't be read: {error.strerror or error}. "
            "Journals are for their owner alone (mode 0600): read them as the engine's user"
        ) from None
    if not found.records:
        found.close()
        raise NoJournals(_nothing(where, found))
    return found


def _nothing(where: Sequence[Path], found: Scan) -> str:
    told = ", ".join(str(path) for path in where)
    return (
        f"tracekv: no journal in {told}. An engine with a traced connector writes one, unless TRACEKV_DETAIL=off; name its "
        "directory, or set TRACEKV_JOURNAL_DIR as it is set there" + "".join(f"\n{reason}" for reason in found.left_out)
    )


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that shows ``(done, total)`` on stderr; nothing is shown where that is no terminal.

    It draws when it is told, and has no thread: what runs meanwhile may fork.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _untold
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task: TaskID = bar.add_task(what, total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        yield tell


def _untold(done: int, total: int) -> None:
    """Nobody looks."""

"""``tracekv set``: change how a running engine is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tracekv.agent.paths import NoJournals, opened
from tracekv.journal.layout import DETAILS, with_detail
from tracekv.journal.reader import RingReader


def set_detail(
    assignment: Annotated[str, typer.Argument(metavar="detail=WORD", help="economy, full, off, or default.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Journals, or folders of them; by default TRACEKV_JOURNAL_DIR.", show_default=False),
    ] = None,
) -> None:
    """Change the detail of running engines, from their next step on: economy, full, off, or default (as configured)."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    name, _, word = assignment.partition("=")
    if name != "detail" or word not in (*DETAILS[1:], "default"):
        console.print(
            f"tracekv: {assignment} can't be set in a running engine. Valid: "
            + ", ".join(f"detail={valid}" for valid in (*DETAILS[1:], "default")),
            markup=False,
        )
        raise typer.Exit(2)
    try:
        with opened(paths or []) as (readers, _):
            running = [reader for reader in readers if isinstance(reader, RingReader) and reader.is_alive()]
            for reader in running:
                reader.set_control(with_detail(reader.control(), "" if word == "default" else word))
            pids = ", ".join(str(reader.facts.pid) for reader in running)
    except NoJournals as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from None
    except OSError as error:
        console.print(
            f"tracekv: {error.filename} can't be changed: {error.strerror}. Journals are for their owner alone: run this as the "
            "engine's user",
            markup=False,
        )
        raise typer.Exit(1) from None
    if not running:
        console.print("tracekv: none of these journals is of a running engine", markup=False)
        raise typer.Exit(1)
    console.print(f"{assignment} from the next step on, in pid {pids}", markup=False)

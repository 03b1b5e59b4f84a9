"""``tracekv agent``: follow the journals of a directory, as a sidecar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tracekv import settings as settings_module
from tracekv.agent.lock import AgentLock, holder
from tracekv.agent.main import run_agent, wants_export
from tracekv.agent.paths import NoJournals, journal_directory
from tracekv.agent.spawn import can_export


def agent(
    directory: Annotated[
        Path | None,
        typer.Argument(help="Where the journals are; by default TRACEKV_JOURNAL_DIR.", show_default=False),
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for engines, and go on when they have ended.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds to stay without an engine.", min=0.0)] = 10.0,
) -> None:
    """Read the journals of all engines of a directory and export spans and metrics, until the engines are gone.

    Where to is said by TRACEKV_TRACE_FILE, TRACEKV_METRICS_PORT and OTEL_EXPORTER_OTLP_*. One agent runs per directory.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        settings = settings_module.load()
        directory = directory or journal_directory()
    except (NoJournals, settings_module.SettingsError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from None
    missing = can_export()
    if missing is not None:
        console.print(
            f"tracekv: the agent needs {missing}. Install it with: pip install 'tracekv[agent]'", markup=False
        )
        raise typer.Exit(1)
    if not wants_export(settings, os.environ):
        console.print(
            "tracekv: there is nothing for an agent to do: set TRACEKV_TRACE_FILE, OTEL_EXPORTER_OTLP_ENDPOINT or "
            "TRACEKV_METRICS_PORT",
            markup=False,
        )
        raise typer.Exit(2)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = AgentLock(directory)
    except OSError as error:
        console.print(
            f"tracekv: {directory} can't be the folder of journals: {error.strerror}. Name the engines' own, or set "
            "TRACEKV_JOURNAL_DIR as it is set there, and run this as their user",
            markup=False,
        )
        raise typer.Exit(1) from None
    if not lock.acquire():
        there = holder(directory)
        console.print(f"tracekv: {directory} has its agent already (pid {there.pid if there else '?'})", markup=False)
        raise typer.Exit(3)
    raise typer.Exit(run_agent(directory, lock, settings, stays=stay, grace_s=grace))

"""``tracekv top``: what engines are doing, live."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from tracekv import settings as settings_module
from tracekv.agent.paths import NoJournals, journal_directory
from tracekv.cli._following import Following
from tracekv.cli._opening import Paths, scanned_at
from tracekv.cli._top_screen import render

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_age(text: str) -> float:
    """Seconds of an age such as ``5m``; a bare number is seconds."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _SECONDS else (text, "s")
    try:
        seconds = float(number) * _SECONDS[unit]
    except ValueError:
        seconds = -1
    if not 0 < seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is no age: write 30s, 5m, 2h or 1d")
    return seconds


def top(
    paths: Paths = None,
    interval: Annotated[float, typer.Option(help="Seconds from one screen to the next.", min=0.1)] = 1.0,
    window: Annotated[float, typer.Option(help="Seconds that rates are taken over.", min=1)] = 10.0,
    since: Annotated[
        float | None,
        typer.Option(
            parser=parse_age,
            metavar="AGE",
            help="Count only what happened since then: 30s, 5m, 2h or 1d before now (before the last record, where no engine runs).",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and end; so it does where stdout is no terminal.")
    ] = False,
) -> None:
    """Show what engines are doing: KV in flight, hits and misses, bandwidth, stalls, held pages, broken rules, and tracing itself.

    It only reads; Ctrl-C ends it.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    console = Console(highlight=False)
    try:
        hashed = settings_module.load().hash_request_ids
        where = paths or [journal_directory()]
        following = Following(where, scanned_at(where), window_s=window, hashed=hashed, since_s=since)
    except (NoJournals, settings_module.SettingsError) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from None
    try:
        following.refresh()
        if once or not console.is_terminal:
            console.print(render(following.top()))
        else:
            _live(console, following, interval)
    finally:
        following.close()


def _live(console: Console, following: Following, interval: float) -> None:
    with _until_interrupted() as stop, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(following.top(), keys="  Ctrl-C ends"), refresh=True)
            if stop.wait(interval):
                break
            following.refresh()
    console.print(render(following.top()))


@contextlib.contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    stop = threading.Event()

    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

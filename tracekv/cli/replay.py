"""``tracekv replay``: drive another connector with recorded callbacks, and compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tracekv.connectors import ConnectorError, resolve
from tracekv.journal.layout import JournalFormatError
from tracekv.testing.replay_compare import BytesPair, CallbackPair, Durations, Offer, RequestPair

if TYPE_CHECKING:
    from tracekv.testing.replay import Replay


def replay(
    paths: Annotated[list[Path], typer.Argument(help="Journals or archives, or folders of them.", exists=True)],
    connector: Annotated[str, typer.Option(help="package.module:SchedulerClass,WorkerClass, or a backend's name.")],
    seed: Annotated[str | None, typer.Option(help="Of the pseudo tokens; by default a new one at each replay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Drive a connector with the callbacks that TRACEKV_RECORD=replay recorded, without a model or GPU, and compare.

    Exits with 1 if a callback raised or answered what the runtime would not survive; differences alone are no errors.
    """
    # torch is slow to import, and no other command needs it.
    from tracekv.testing.replay import NoRecording
    from tracekv.testing.replay import replay as replay_against

    if "" not in sys.path:
        sys.path.insert(0, "")  # a connector under work lies in the current folder, as for python -m
    try:
        result = replay_against(paths, resolve(connector), seed=seed)
    except (ConnectorError, NoRecording, JournalFormatError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    else:
        _print(result)
    if result.errors:
        raise typer.Exit(1)


def _print(result: Replay) -> None:
    # A table that is cut to a narrow terminal is of no use: let the terminal wrap it.
    console = Console(highlight=False, width=max(Console().width, 120))
    console.print(
        f"recorded {', '.join(dict.fromkeys(result.recorded))}, replayed {result.replayed} (seed {result.seed})"
    )
    if result.lost:
        console.print(f"{result.lost} records are missing in the recording: from there on the replay may stray")
    if result.has_shared_rows:
        console.print("the recorded caches were too large for this machine: all page slots shared one row")
    console.print(_requests(result.requests))
    console.print(_callbacks(result.callbacks))
    console.print(_moved(result.moved))
    for told in result.differences:
        console.print(f"differs: {told}", soft_wrap=True, markup=False)
    for error in result.errors:
        who = "" if error.request_id is None else f" for request {error.request_id}"
        console.print(
            f"ERROR: life {error.life}, {error.callback}{who}: {error.error}: {error.message}",
            soft_wrap=True,
            markup=False,
        )
    console.print(f"{len(result.differences)} differences, {len(result.errors)} errors")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _requests(pairs: list[RequestPair]) -> Table:
    table = _table("life.request", "prompt", "on device", "offered then", "now", "honoured then", "now")
    for pair in pairs:
        then, now = pair.recorded, pair.replayed
        table.add_row(
            f"{pair.life}.{pair.request_id}",
            str(pair.prompt_tokens or ""),
            str(pair.computed_tokens),
            _offered(then),
            _offered(now),
            _number(then.honoured),
            _number(now.honoured if now else None),
        )
    return table


def _offered(offer: Offer | None) -> str:
    return "-" if offer is None else f"{offer.offered}{' async' if offer.is_async else ''}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _callbacks(pairs: list[CallbackPair]) -> Table:
    table = _table("callback", "calls then", "now", "median then", "now", "longest then", "now")
    for pair in pairs:
        then, now = pair.recorded, pair.replayed
        table.add_row(
            pair.callback,
            *(_number(each.calls if each else None) for each in (then, now)),
            *(_time(each, "median_ns") for each in (then, now)),
            *(_time(each, "max_ns") for each in (then, now)),
        )
    return table


def _time(durations: Durations | None, which: str) -> str:
    return "-" if durations is None else f"{getattr(durations, which) / 1e3:.0f} us"


def _moved(pairs: list[BytesPair]) -> Table:
    table = _table("bytes", "then", "now")
    for pair in pairs:
        table.add_row(
            f"{pair.direction}, layer group {pair.layer_group}, {pair.source}", str(pair.recorded), str(pair.replayed)
        )
    return table

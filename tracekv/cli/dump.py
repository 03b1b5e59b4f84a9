"""``tracekv dump``: what engines are in the middle of, or were when they died."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tracekv import settings as settings_module
from tracekv.agent.flight import Flight, describe
from tracekv.agent.paths import NoJournals
from tracekv.cli._opening import Paths, scanned


def dump(
    paths: Paths = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what is in flight in each journal, of a live process or one that was killed.

    The callback entered and not left with its layer and source line, the requests and what they wait for, and the loads and
    saves that had begun: pages that callbacks were handed, less what the connector reported as moved.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        hashed = settings_module.load().hash_request_ids
        with scanned(paths or []) as scan:
            left_out = scan.left_out
            processes = describe([Flight(process, hash_request_ids=hashed) for process in scan.processes])
    except (NoJournals, settings_module.SettingsError) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from None
    if as_json:
        sys.stdout.write(json.dumps({"processes": processes, "left_out": left_out}) + "\n")
        return
    console = Console(highlight=False)
    for process in processes:
        _print(console, process)
    for note in [*left_out, *(note for process in processes for note in process["notes"])]:
        errors.print(note, markup=False)


def _print(console: Console, process: dict[str, Any]) -> None:
    rank = "" if process["rank"] is None else f" rank {process['rank']} of {process['world']}"
    state = ("runs", "green") if process["is_alive"] else ("is gone", "red")
    last = process["last_record_age_s"]
    ago = "" if last is None else f", last record {_age(last)} ago"
    lost = f", {process['records_lost']} records overwritten" if process["records_lost"] else ""
    name = f"{process['host']} pid {process['pid']}{rank}"
    console.print(Text.assemble((name, "bold"), " ", state, f"{ago}{lost}"), soft_wrap=True)
    for inside in process["callbacks"]:
        layer = "" if inside["layer"] is None else f" layer {inside['layer']} (group {inside['layer_group']})"
        where = "" if inside["file"] is None else f"  {inside['file']}:{inside['line']}"
        what = f"{layer} for {_age(inside['age_s'])}: {inside['function']}{where}"
        console.print(Text.assemble("  in ", (inside["callback"], "bold"), what), soft_wrap=True)
    if not process["callbacks"]:
        console.print("  in no callback")
    if process["requests"]:
        _print_requests(console, process["requests"])
    if process["moves"]:
        _print_moves(console, process["moves"])
    console.print()


def _print_requests(console: Console, requests: list[dict[str, Any]]) -> None:
    table = Table("request", "waits for", "since", "step", title="open requests", title_justify="left", box=None)
    for name in ("prompt", "computed", "offered", "honoured", "pages by group"):
        table.add_column(name, justify="right")
    for request in requests:
        table.add_row(
            request["request"], request["waits_for"], _age(request["age_s"]), str(request["step"] or ""),
            *(_number(request[f"{name}_tokens"]) for name in ("prompt", "computed", "offered", "honoured")),
            " ".join(map(str, request["pages"])),
        )  # fmt: skip
    console.print(table)


def _print_moves(console: Console, moves: list[dict[str, Any]]) -> None:
    table = Table("request", "direction", title="loads and saves in flight", title_justify="left", box=None)
    for name in ("layer group", "pages", "bytes", "step", "since"):
        table.add_column(name, justify="right")
    for move in moves:
        table.add_row(
            move["request"], move["direction"], str(move["layer_group"]), str(move["pages"]), _number(move["bytes"]),
            _number(move["step"]), _age(move["age_s"]),
        )  # fmt: skip
    console.print(table)


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"

"""``tracekv test``: puts a connector through the contract, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tracekv.testing.cells import Cell
    from tracekv.testing.kit import Kit
    from tracekv.testing.verdicts import CellResult

_WIDTH = 135
_STYLES = {"ok": "green", "broken": "bold red", "not supported": "yellow", "could not run": "magenta"}


def put_to_the_test(
    connector: Annotated[
        str | None,
        typer.Argument(help="package.module:SchedulerClass,WorkerClass, or a backend's name.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    cells: Annotated[str, typer.Option(help="Glob of cells, such as 'v2/*' or '*/parked'.")] = "*",
    env: Annotated[
        list[str] | None,
        typer.Option(help="[GLOB:]NAME=VALUE for the cells; {folder} is an empty folder of a cell's own."),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="GLOB=CONNECTOR: another pair for some cells (a parking one, for example).")
    ] = None,
    not_supported: Annotated[
        list[str] | None, typer.Option(help="GLOB=REASON: cells that aren't run.", show_default=False)
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Most difference of the first token's logits.")] = 1e-3,
    tokens_per_block: Annotated[int, typer.Option(help="Of the engine.")] = 16,
    patience: Annotated[float, typer.Option(help="Seconds without a scheduled pass that count as hanging.")] = 10.0,
    watch: Annotated[bool, typer.Option(help="Observe the bytes that callbacks move.")] = True,
    fake_trtllm: Annotated[
        bool, typer.Option("--fake-trtllm", help="Stand in for the tensorrt_llm that the connector imports.")
    ] = False,
    itself: Annotated[
        bool, typer.Option("--self", help="Test the kit: our minimal connector, then the corpus of broken ones.")
    ] = False,
) -> None:
    """Drive a connector through the reference executor, cell by cell, and name what is broken.

    Exits with 1 if a cell is broken; with --self also if the rules miss a fault or name a false one.
    """
    if (connector is None) is not itself:
        raise typer.BadParameter("name a connector, or give --self (and not both)")
    if importlib.util.find_spec("transformers") is None:
        raise typer.BadParameter("the reference executor needs the demo extra: pip install 'tracekv[demo,testing]'")
    import torch

    torch.set_num_threads(1)  # the models are tiny: threads cost more than they save
    sys.path.insert(0, str(Path.cwd()))  # a connector that is being written is no installed package
    if fake_trtllm:
        from tracekv.testing import fake_trtllm as fake

        fake.install()
    started = time.monotonic()
    options = {
        "environment": _pairs(env, "--env"),
        "not_supported": _pairs(not_supported, "--not-supported"),
        "tolerance": tolerance,
        "tokens_per_block": tokens_per_block,
        "patience_s": patience,
        "watch": watch,
    }
    kit = _own_kit(options) if itself else _kit(str(connector), _pairs(variant, "--variant"), options)
    results, told, played = _play(kit, cells, tokens_per_block, quiet=as_json)
    corpus = _corpus(as_json) if itself else {}
    if as_json:
        told_all = {
            "connector": connector,
            "verdicts": dict(Counter(result.verdict.value for result in results)),
            "limits": told,
            "cells": [result.as_dict() for result in results],
            "seconds": round(time.monotonic() - started, 1),
            **corpus,
        }
        sys.stdout.write(json.dumps(told_all) + "\n")
    else:
        _print(results, told, corpus, time.monotonic() - started)
    if not played:
        raise typer.BadParameter(f"no cell matches {cells!r}")
    if any(result.verdict.value == "broken" for result in results) or corpus.get("missed") or corpus.get("false"):
        raise typer.Exit(1)


def _pairs(values: list[str] | None, option: str) -> dict[str, str]:
    found = {}
    for value in values or ():
        name, separator, rest = value.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{option} {value!r} has no '='")
        found[name] = rest
    return found


def _kit(connector: str, variants: dict[str, str], options: dict[str, Any]) -> Kit:
    from tracekv.connectors import ConnectorError, resolve
    from tracekv.testing.kit import Kit

    try:
        pair = resolve(connector)
        others = {glob: tuple(resolve(name)) for glob, name in variants.items()}
    except ConnectorError as error:
        raise typer.BadParameter(str(error).removeprefix("tracekv: ")) from None
    return Kit(*pair, variants=others, **options)  # type: ignore[arg-type]


def _own_kit(options: dict[str, Any]) -> Kit:
    from tracekv.testing import minimal
    from tracekv.testing.kit import Kit

    options["environment"] = {minimal.VARIABLE: "{folder}", **options["environment"]}
    parking = {"*parked": (minimal.ParkingScheduler, minimal.ParkingWorker)}
    return Kit(minimal.Scheduler, minimal.Worker, variants=parking, **options)


def _play(kit: Kit, glob: str, block: int, *, quiet: bool) -> tuple[list[CellResult], list[str], list[Cell]]:
    from tracekv.testing.limits import limits
    from tracekv.testing.stories import matrix

    cells = matrix(block, glob)
    console = Console(stderr=True, highlight=False)
    results = []
    with kit, console.status("building the models") as status:
        for number, cell in enumerate(cells, 1):
            if not quiet:
                status.update(f"{number} of {len(cells)}  {cell.name}")
            results.append(kit.run(cell))
    return results, limits(results, cells, block), cells


def _corpus(quiet: bool) -> dict[str, Any]:
    from tracekv.testing.corpus import run_corpus

    with Console(stderr=True, highlight=False).status("" if quiet else "the corpus of broken connectors"):
        return run_corpus()


def _print(results: list[CellResult], told: list[str], corpus: dict[str, Any], seconds: float) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", no_wrap=True, min_width=max((len(result.name) for result in results), default=4))
    for name in ("verdict", "requests", "served", "loaded", "saved", "rules"):
        table.add_column(name, justify="right" if name in ("requests", "served", "loaded", "saved") else "left")
    for result in results:
        rules = ", ".join(f"{line.rule}{'' if line.severity == 'violation' else '?'}" for line in result.rules)
        table.add_row(
            result.name,
            Text(result.verdict.value, _STYLES[result.verdict.value]),
            str(len(result.requests)),
            str(sum(line.honoured_tokens for line in result.requests)),
            _bytes(result, "load"),
            _bytes(result, "save"),
            rules,
        )
    console.print(table)
    for result in results:
        for fault in result.faults:
            console.print(Text.assemble((f"{result.name}  ", "bold red"), fault), soft_wrap=True)
    _print_reasons(console, results)
    for limit in told:
        console.print(Text.assemble(("limit  ", "bold yellow"), limit), soft_wrap=True)
    if corpus:
        _print_corpus(console, corpus)
    counts = Counter(result.verdict.value for result in results)
    console.print(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; {seconds:.0f} s")


def _print_reasons(console: Console, results: list[CellResult]) -> None:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.reason:
            by_reason.setdefault((result.verdict.value, result.reason), []).append(result.name)
    for (verdict, reason), names in by_reason.items():
        console.print(
            Text.assemble((f"{verdict}  ", _STYLES[verdict]), f"{reason} ({', '.join(names)})"), soft_wrap=True
        )


def _print_corpus(console: Console, corpus: dict[str, Any]) -> None:
    from tracekv.testing.corpus import FAULTS

    table = Table(
        box=None, pad_edge=False, header_style="bold", title=f"{corpus['faults']} faults", title_justify="left"
    )
    for name in ("fault", "rule", "found", "what is wrong"):
        table.add_column(name)
    for fault in FAULTS.values():
        is_missed = fault.id in corpus["missed"]
        table.add_row(
            fault.id, fault.rule, Text("missed", "bold red") if is_missed else Text("yes", "green"), fault.what
        )
    console.print(table)
    console.print(
        f"missed: {', '.join(corpus['missed']) or 'none'}; falsely named: {', '.join(corpus['false']) or 'none'}"
    )


def _bytes(result: CellResult, direction: str) -> str:
    """Reported bytes, else observed ones; ``?`` where some may have moved unseen."""
    reported = result.nbytes.get(f"{direction} reported")
    observed = result.nbytes.get(f"{direction} observed")
    if reported is not None:
        return str(reported)
    if observed is not None:
        return f"{observed}{'' if result.is_watch_complete else '?'}"
    return "0" if result.is_watch_complete else "-"

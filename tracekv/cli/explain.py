"""``tracekv explain``: one request on one screen - what it hit or missed and why, where its time went, which rules it broke."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tracekv import settings as settings_module
from tracekv.agent.paths import NoJournals
from tracekv.cli._explaining import Teller
from tracekv.cli._opening import Paths, scanned


def explain(
    request: Annotated[
        str | None, typer.Argument(help="Its id, or its digest where ids are hashed.", show_default=False)
    ] = None,
    paths: Paths = None,
    slowest_count: Annotated[
        int | None, typer.Option("--slowest", metavar="N", help="The N that waited longest for their KV.", min=1)
    ] = None,
    missed_count: Annotated[
        int | None, typer.Option("--missed", metavar="N", help="The N that computed most for want of a hit.", min=1)
    ] = None,
    violations: Annotated[bool, typer.Option("--violations", help="Those that broke a rule.")] = False,
    in_full: Annotated[bool, typer.Option("--all", help="The screen of each chosen request, not a table.")] = False,
    run: Annotated[
        str | None, typer.Option(help="The run, where several have such a request; the last one else.")
    ] = None,
    trace_url: Annotated[
        str | None,
        typer.Option(help="Where traces are shown, {trace_id} in it; TRACEKV_TRACE_URL else.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Explain one request: what it hit or missed and why, where its time went, which rules it broke.

    The first line says it in plain words. With --slowest, --missed or --violations the requests are chosen, and every argument
    is a path.
    """
    ways = (slowest_count is not None) + (missed_count is not None) + violations
    chooses = ways > 0
    if chooses and request is not None:
        paths = [Path(request), *(paths or [])]
        request = None
    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if request is None and not chooses:
            raise NoJournals("tracekv: name a request, or let --slowest N, --missed N or --violations choose some")
        if ways > 1:
            raise NoJournals("tracekv: choose by one of --slowest, --missed and --violations")
        if chooses and paths and str(paths[0]).isdecimal() and not paths[0].exists():
            raise NoJournals(
                f"tracekv: where requests are chosen, every argument is a path: there is no {paths[0]}. Leave it out, or name a "
                "request alone"
            )
        if request is not None and not _may_name_a_request(request) and Path(request).exists():
            raise NoJournals(
                f"tracekv: {request} is a path: the request comes first, as in `tracekv explain 7 {request}`"
            )
        settings = settings_module.load()
        with scanned(paths or []) as scan:
            teller = Teller(scan, hashed=settings.hash_request_ids, trace_url=trace_url or settings.trace_url)
            runs = teller.runs(run)
            if request is not None:
                chosen = [teller.find(request, runs)]
            elif violations:
                chosen = teller.violating(runs)
            elif slowest_count is not None:
                chosen = teller.slowest(runs, slowest_count)
            else:
                chosen = teller.missed(runs, missed_count or 1)
            if as_json:
                told = [teller.data(each) for each in chosen]
                answer: object = told[0] if request is not None else {"requests": told}
                sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            elif request is not None or in_full:
                for each in chosen:
                    teller.screen(console, each)
            else:
                teller.table(console, chosen)
            for note in teller.notes:
                errors.print(note, markup=False)
    except (NoJournals, settings_module.SettingsError) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(1) from None


def _may_name_a_request(text: str) -> bool:
    """A number, or a digest: 16 hexadecimal digits."""
    return text.isdecimal() or (len(text) == 16 and set(text) <= set("0123456789abcdef"))

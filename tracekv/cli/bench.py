"""``tracekv bench``: what tracekv costs and how fast it is, on the machine at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tracekv.bench import page

bench = typer.Typer(help="Measure what tracing costs and how fast the store is, on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Write = Annotated[
    Path | None, typer.Option(help="A page (docs/performance.md) whose part is to be replaced.", dir_okay=False)
]


@bench.command()
def overhead(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=3)] = 15,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """What tracing adds to a forward pass and to a callback, beside none and beside one SDK span per hook."""
    from tracekv.bench.overhead import measure

    console = Console(stderr=True, highlight=False)
    with console.status(f"{rounds} interleaved rounds"):
        cost = measure(rounds)
    if write is not None:
        page.write_part(write, "overhead", "What tracing costs the engine", _overhead_body(cost))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(cost) + b"\n")
        return
    typer.echo(_overhead_body(cost))


def _overhead_body(cost: object) -> str:
    facts = msgspec.to_builtins(cost)
    spread = facts["spread"]

    def row(label: str, value: float, name: str, goal: str) -> tuple[str, str, str, str]:
        low, high = spread[name]
        return label, f"{value:.1f}", f"[{low:.1f}, {high:.1f}]", goal

    callbacks = facts["added_us_per_callback"]
    alloc, build, idle = callbacks
    rows = [
        row(f"bare pass of {facts['layers']} layers x 2 hooks, µs", facts["bare_us_per_pass"], "bare_us_per_pass", ""),
        row("traced, µs", facts["traced_us_per_pass"], "traced_us_per_pass", ""),
        row("an SDK span per hook, µs", facts["span_per_hook_us_per_pass"], "span_per_hook_us_per_pass", ""),
        row("added per pass, µs", facts["added_us_per_pass"], "added_us_per_pass", "<= 30"),
        row("SDK span per hook / traced", facts["ratio_span_per_hook"], "ratio_span_per_hook", ""),
        row(f"added: {alloc}, µs", callbacks[alloc], "alloc", "<= 35"),
        row(f"added: {build}, µs", callbacks[build], "build", "<= 30"),
        row(f"added: {idle}, µs", callbacks[idle], "idle", ""),
    ]
    clock = f"One clock reading took {facts['clock_ns']:.0f} ns in the same rounds; each hook reads the clock twice."
    described = page.machine("msgspec", "opentelemetry-sdk")
    return f"{described}. {facts['rounds']} rounds.\n\n{page.table(('', 'median', 'range', 'goal'), rows)}\n\n{clock}"

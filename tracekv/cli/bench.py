"""``tracekv bench``: what tracekv costs and how fast it is, on the machine at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tracekv.bench import page
from tracekv.bench import store_tables as tables
from tracekv.journal.current import current
from tracekv.journal.directory import start_journal
from tracekv.settings import SettingsError, load, load_section

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


@bench.command()
def store(
    url: Annotated[
        str | None, typer.Option("--store", help="An fsspec URL; TRACEKV_FSSPEC__URL otherwise.", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=2)] = 5,
    sizes: Annotated[
        list[int] | None, typer.Option("--block-kib", help="Block sizes; 64, 1024 and 8192 otherwise.")
    ] = None,
    round_mib: Annotated[int, typer.Option(help="What a round moves.", min=1)] = 64,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """How fast a store takes and gives blocks, beside the connector document's way and the limit of the same bytes."""
    from tracekv.bench.store import SIZES, measure
    from tracekv_fsspec.settings import Settings as FsspecSettings
    from tracekv_fsspec.store import StoreError, StoreUnusable

    console = Console(stderr=True, highlight=False)
    try:
        settings = load_section("fsspec", FsspecSettings)
        with _journal(), console.status("opening the store") as status:
            speed = measure(
                url or settings.url,
                rounds=rounds,
                sizes=[kib << 10 for kib in sizes] if sizes else SIZES,
                round_bytes=round_mib << 20,
                options=settings.storage_options,
                s3_client=settings.s3_client,
                progress=lambda what: status.update(f"{rounds} interleaved rounds: {what}"),
            )
    except (SettingsError, StoreUnusable, StoreError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        typer.echo(f"tracekv: this benchmark needs {error.name}; install tracekv[demo]", err=True)
        raise typer.Exit(2) from None
    body = tables.store_body(speed)
    if write is not None:
        page.write_part(write, f"store-{speed.engine}", f"The store: {tables.store_name(speed.engine)}", body)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(speed) + b"\n")
        return
    typer.echo(body)


@bench.command()
def lookup(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=3)] = 15,
    blocks: Annotated[int, typer.Option(help="Blocks in the index.", min=8192)] = 1_000_000,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """What hashing a prompt and looking it up cost, and how much memory an index takes."""
    from tracekv.bench.lookup import measure

    console = Console(stderr=True, highlight=False)
    with console.status(f"an index of {blocks} blocks, {rounds} interleaved rounds"):
        cost = measure(rounds, blocks)
    body = tables.lookup_body(cost)
    if write is not None:
        page.write_part(write, "lookup", "Looking a prompt up", body)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(cost) + b"\n")
        return
    typer.echo(body)


@contextmanager
def _journal() -> Iterator[None]:
    """A journal for the ceilings that are measured, where ``TRACEKV_JOURNAL_DIR`` says that somebody reads journals there."""
    folder = load().journal_dir
    journal = start_journal(Path(folder)) if folder and current.journal is None else None
    if journal is None:
        yield
        return
    current.journal = journal
    try:
        yield
    finally:
        current.journal = None
        journal.close()

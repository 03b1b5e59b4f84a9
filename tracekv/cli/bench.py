"""``tracekv bench``: what tracekv costs and how fast it is, on the machine at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
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

bench = typer.Typer(
    add_completion=False,
    help="Measure what tracing costs and how fast the store is, on this machine.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Write = Annotated[
    Path | None, typer.Option(help="A page (docs/performance.md) whose part is to be replaced.", dir_okay=False)
]


@bench.command()
def overhead(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=3)] = 15,
    turns: Annotated[
        int, typer.Option(help="Turns of two steps that a running engine makes of each kind; 0: leave it out.", min=0)
    ] = 500,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """What tracing adds to a callback and to a running engine that exports through a real collector."""
    from tracekv.bench import overhead as callbacks
    from tracekv.bench import steps
    from tracekv.cli._bench_tables import callbacks_body, steps_body

    console = Console(stderr=True, highlight=False)
    with console.status(f"callbacks: {rounds} interleaved rounds"):
        cost = callbacks.measure(rounds)
    running = None
    if turns:
        with console.status(f"a running engine: {turns} turns, traced and bare"):
            try:
                running = steps.measure(turns)
            except RuntimeError as error:
                console.print(str(error), markup=False)
                raise typer.Exit(1) from None
    body = callbacks_body(cost) + (f"\n\n{steps_body(running)}" if running else "")
    numbers = msgspec.to_builtins(cost) | (msgspec.to_builtins(running) if running else {})
    _tell(numbers, body, "overhead", "What tracing costs the engine", write, as_json=as_json)


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
    _tell(speed, body, f"store-{speed.engine}", f"The store: {tables.store_name(speed.engine)}", write, as_json=as_json)


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
    _tell(cost, body, "lookup", "Looking a prompt up", write, as_json=as_json)


@bench.command("open")
def opening(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 3,
    records: Annotated[int, typer.Option(help="Records in the journals.", min=1000)] = 1_000_000,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """How long a person waits until a million records are open in explain, top and report; rules on a row of their own."""
    from tracekv.bench.opening import body, measure

    console = Console(stderr=True, highlight=False)
    with console.status(f"{records:,} records, {rounds} interleaved rounds"):
        try:
            cost = measure(rounds, records)
        except RuntimeError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(1) from None
    told = body(cost)
    _tell(cost, told, "open", "Opening a million records", write, as_json=as_json)


@bench.command("rules")
def judging(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=3)] = 9,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """What the rules cost the agent per record, with 1 to 256 requests that decode at once."""
    from tracekv.bench.judging import body, measure

    console = Console(stderr=True, highlight=False)
    with console.status(f"journals of busy engines, {rounds} interleaved rounds"):
        cost = measure(rounds)
    told = body(cost)
    _tell(cost, told, "rules", "What the rules cost the agent", write, as_json=as_json)


@bench.command()
def prefill(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=2)] = 9,
    s3: Annotated[
        str | None,
        typer.Option(help="An S3 URL, for staging from there; it is left out otherwise.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    write: Write = None,
) -> None:
    """What loading and saving KV cost an engine, and how soon stored KV is there."""
    from tracekv.bench.prefill import measure
    from tracekv.bench.prefill_tables import prefill_body

    console = Console(stderr=True, highlight=False)
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        typer.echo(f"tracekv: this benchmark needs {missing[0]}; install tracekv[demo]", err=True)
        raise typer.Exit(2)
    with console.status(f"{rounds} interleaved rounds; they take minutes"):
        try:
            cost = measure(rounds, s3)
        except RuntimeError as error:
            console.print(str(error), markup=False)
            raise typer.Exit(1) from None
    body = prefill_body(cost)
    _tell(cost, body, "prefill", "What the flow of KV costs an engine", write, as_json=as_json)


def _tell(numbers: object, body: str, part: str, title: str, write: Path | None, *, as_json: bool) -> None:
    """Print what was measured, and put it into its part of a page where one is given."""
    if write is not None:
        page.write_part(write, part, title, body)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(numbers) + b"\n")
    else:
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

"""The commands, each in a module of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from tracekv._version import __version__
from tracekv.cli.agent import agent
from tracekv.cli.bench import bench
from tracekv.cli.check import check
from tracekv.cli.control import set_detail
from tracekv.cli.demo import demo
from tracekv.cli.diff import diff
from tracekv.cli.doctor import doctor
from tracekv.cli.dump import dump
from tracekv.cli.explain import explain
from tracekv.cli.export import export
from tracekv.cli.prefetch import prefetch
from tracekv.cli.record import record
from tracekv.cli.replay import replay
from tracekv.cli.report import report
from tracekv.cli.store import store
from tracekv.cli.test import put_to_the_test
from tracekv.cli.top import top

app = typer.Typer(
    name="tracekv",
    help="Trace KV cache connectors of LLM inference engines, and see where the KV went.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(doctor)
app.command()(check)
app.command("test")(put_to_the_test)
app.command()(explain)
app.command()(top)
app.command()(agent)
app.command()(dump)
app.command()(prefetch)
app.command()(record)
app.command()(replay)
app.command()(report)
app.command()(diff)
app.command("set")(set_detail)
app.add_typer(export, name="export")
app.add_typer(bench, name="bench")
app.add_typer(store, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[  # acted on by its callback
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Trace KV cache connectors of LLM inference engines, and see where the KV went."""

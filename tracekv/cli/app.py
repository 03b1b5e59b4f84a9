"""The commands, each in a module of its own, which is imported when its command is asked for: together they import everything."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tracekv._version import __version__

#: Module and function, or group, of each command, in the order in which they are shown.
_WHERE = {
    "demo": ("demo", "demo"),
    "doctor": ("doctor", "doctor"),
    "check": ("check", "check"),
    "test": ("test", "put_to_the_test"),
    "explain": ("explain", "explain"),
    "top": ("top", "top"),
    "agent": ("agent", "agent"),
    "dump": ("dump", "dump"),
    "prefetch": ("prefetch", "prefetch"),
    "record": ("record", "record"),
    "replay": ("replay", "replay"),
    "report": ("report", "report"),
    "diff": ("diff", "diff"),
    "set": ("control", "set_detail"),
    "export": ("export", "export"),
    "bench": ("bench", "bench"),
    "store": ("store", "store"),
}


class _Commands(Mapping[str, Any]):
    """The commands by name, as typer makes them (its classes of them are private to it)."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, attribute = _WHERE[name]
            found = getattr(importlib.import_module(f"tracekv.cli.{module}"), attribute)
            if not isinstance(found, typer.Typer):
                function, found = found, typer.Typer(add_completion=False)
                found.command(name)(function)
            self._made[name] = typer.main.get_command(found)
            self._made[name].name = name
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_WHERE)

    def __len__(self) -> int:
        return len(_WHERE)


class _Root(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # nothing is added to them


app = typer.Typer(
    cls=_Root,
    name="tracekv",
    help="Trace KV cache connectors of LLM inference engines, and see where the KV went.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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

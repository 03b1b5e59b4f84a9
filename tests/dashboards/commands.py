"""Whether a command that is written somewhere exists."""

from __future__ import annotations

from typing import Any

import typer

from tracekv.cli.app import app


def assert_is_a_command(words: list[str]) -> None:
    """The command exists and has the options; it isn't run."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command = command.commands[words.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    for word in words:
        if word.startswith("-"):
            assert word in options, f"{command.name} {word}"

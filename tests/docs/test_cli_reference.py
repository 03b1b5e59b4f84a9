"""The committed reference is the one that the commands make, and leaves none of them out."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from tracekv.cli.app import app
from tracekv.cli.reference import page

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def commands(command, path):
    """Every command of the tree, with its path."""
    for name, each in getattr(command, "commands", {}).items():
        yield f"{path} {name}", each
        yield from commands(each, f"{path} {name}")


def test_the_committed_page_is_what_the_commands_make():
    assert PAGE.read_text() == page(), "run: python -m tracekv.cli.reference > docs/cli.md"


def test_nothing_of_a_help_is_taken_for_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    for path, command in commands(typer.main.get_command(app), "tracekv"):
        shown = " ".join(CliRunner().invoke(app, [*path.split()[1:], "--help"]).stdout.split())
        for parameter in command.params:
            meaning = " ".join((parameter.help or "").split())
            assert meaning in shown, f"{path} {parameter.name}"


def test_every_command_has_a_section_and_every_option_a_row():
    sections = {part.partition("\n")[0].lstrip("# "): part for part in PAGE.read_text().split("\n## ")[1:]}
    sections |= {part.partition("\n")[0]: part for part in PAGE.read_text().split("\n### ")[1:]}
    told = list(commands(typer.main.get_command(app), "tracekv"))
    assert len(told) > 20
    for path, command in told:
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in sections[path], f"{path} {option}"

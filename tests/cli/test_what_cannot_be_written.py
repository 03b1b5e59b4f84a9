"""Commands that write say which place can't be written, and what to do."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tests.support.journaled import write_journals
from tracekv.cli.app import app
from tracekv.testing.corpus.tape import Tape


@pytest.fixture
def journals(tmp_path):
    return write_journals(tmp_path, Tape().records)


def error_of(*arguments, **environ):
    result = CliRunner().invoke(app, list(map(str, arguments)), env=environ)
    assert result.exit_code == 1, result.output
    return result.stderr


def test_an_archive(journals):
    error = error_of("record", journals, "-o", "/proc/none/archive")
    assert "/proc/none/archive can't be written: " in error
    assert "Name another file with -o" in error


def test_the_folder_of_an_agent(monkeypatch):
    error = error_of("agent", "/proc/none", TRACEKV_TRACE_FILE="/dev/null")
    assert "/proc/none can't be the folder of journals: " in error
    assert "TRACEKV_JOURNAL_DIR" in error

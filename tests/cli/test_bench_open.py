"""``tracekv bench open``: it opens what it wrote with each command, and writes its part of the page."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from tracekv.cli.app import app


def test_each_command_opens_the_journals_and_is_measured(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\n<!-- begin other -->\nkept\n<!-- end other -->\n")
    arguments = ["bench", "open", "--rounds", "1", "--records", "4000", "--json", "--write", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["records"] >= 4000
    assert [each["name"] for each in told["commands"]] == ["explain", "top", "report", "rules"]
    for each in told["commands"]:
        assert each["seconds"]["median"] > 0
        assert each["peak_mb"]["median"] > 10
    text = page.read_text()
    assert "kept" in text
    assert "## Opening a million records" in text
    assert "`tracekv explain --violations`" in text

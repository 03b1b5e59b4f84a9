"""What ``tracekv bench rules`` measures; its numbers are for the machine that it runs on."""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from tracekv.bench import judging
from tracekv.bench.judging import DECODING, JudgingCost
from tracekv.bench.traffic import busy
from tracekv.cli.app import app
from tracekv.journal.records import BuildCall
from tracekv.rules import RULES


def test_the_command_tells_a_row_for_each_number_of_decoding_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "busy", lambda passes, *, decoding: busy(20, decoding=decoding))
    page = tmp_path / "performance.md"
    result = CliRunner().invoke(app, ["bench", "rules", "--rounds", "3", "--json", "--write", str(page)])
    assert result.exit_code == 0, (result.output, result.exception)
    cost = msgspec.convert(json.loads(result.stdout), JudgingCost)
    assert (cost.rules, cost.rounds) == (len(RULES), 3)
    assert [row.decoding for row in cost.rows] == list(DECODING)
    for row in cost.rows:
        assert row.spread[0] <= row.us_per_record <= row.spread[1]
        assert row.records_per_s == pytest.approx(1e6 / row.us_per_record)
    text = page.read_text()
    assert "<!-- begin rules -->" in text
    assert "| 64 |" in text


@pytest.mark.parametrize("decoding", [1, 16, 64])
def test_the_traffic_keeps_as_many_requests_decoding_as_it_says(decoding):
    builds = [record for _, record in busy(600, decoding=decoding).records if isinstance(record, BuildCall)]
    # Its prompts come in two passes; the others decode.
    assert max(len(record.request_ids) - record.new_requests for record in builds[300:]) >= decoding * 0.9
    assert max(len(record.request_ids) for record in builds) <= decoding + 1


def test_a_benchmark_of_something_broken_is_no_benchmark():
    tape = busy(5, decoding=1)
    tape.query(99, 96, 0, 96)
    with pytest.raises(RuntimeError, match="S2"):
        judging._judged(tape)()

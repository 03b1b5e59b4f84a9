"""``tracekv explain`` on each fault of the corpus: the first line names what is at fault."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.faults import played
from tests.support.journaled import write_journals
from tracekv.cli import _explaining, _judging
from tracekv.cli.app import app
from tracekv.journal.records import BuildCall
from tracekv.journal.scan import scan
from tracekv.testing.corpus import CLEAN, FAULTS, LIMITS
from tracekv.views.runs import runs_of


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    # The corpus' own limits: a busy machine is no fault. And a play's journals are judged once, whichever command asks.
    judged = {}
    find_all = _judging.find_all

    def find_once(processes, **_):
        key = tuple(process.facts.process_id for process in processes)
        if key not in judged:
            judged[key] = find_all(processes, limits=LIMITS)
        return judged[key]

    for module in (_judging, _explaining):
        monkeypatch.setattr(module, "find_all", find_once)


def run_explain(*arguments):
    result = CliRunner().invoke(app, ["explain", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def first_line(*arguments):
    return run_explain(*arguments).stdout.splitlines()[0]


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_line_names_the_fault(name, tmp_path):
    rule, found = FAULTS[name].rule, played.findings(name)[0]
    write_journals(tmp_path, played.records(name))
    assert f"{rule}: " in first_line("--violations", tmp_path)
    whose = found.request if found.request is not None else someone(played.records(name), found.step)
    if whose is not None:
        assert f"{rule}: " in first_line(whose, tmp_path, *run_of_the_first(tmp_path))


def run_of_the_first(folder):
    """Arguments that name the run of the first finding, where a play has several."""
    with scan([folder]) as found:
        if len(runs_of(found.processes)) == 1:
            return ()
    told = json.loads(run_explain("--violations", "--json", folder).stdout)
    return ("--run", told["requests"][0]["run"])


def someone(records, step):
    """A request of a pass, or any for what is about no pass."""
    for _, record in records:
        if isinstance(record, BuildCall) and record.request_ids and step in (0, record.step):
            return record.request_ids[0]
    return None


@pytest.mark.parametrize("name", CLEAN)
def test_of_a_clean_run_nothing_is_named(name, tmp_path):
    write_journals(tmp_path, played.records(name))
    assert first_line("--violations", tmp_path).startswith("no rule was broken in ")
    line = first_line("1", tmp_path)
    assert line.startswith(("hit: ", "miss: ", "partial hit: "))

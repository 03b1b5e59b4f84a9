"""The rules for Prometheus: by promtool, against the registry, and each alert with its runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards import rules
from dashboards.rules import ALERTS, RECORDED
from tests.dashboards.commands import assert_is_a_command
from tests.support.prometheus import tool
from tracekv.settings import _all_variables
from tracekv.views.registry import prometheus_label, prometheus_name, registry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards" / "prometheus"
RULES, TESTS = FOLDER / "tracekv.rules.yml", sorted(FOLDER.glob("*.test.yml"))
RUNBOOKS = ROOT / "docs" / "runbooks"
EXPRESSIONS = [pytest.param(expr, id=name) for name, expr in [*RECORDED.items(), *((a.name, a.expr) for a in ALERTS)]]


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.prometheus
def test_promtool_accepts_the_rules() -> None:
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in checked.stdout


@pytest.mark.prometheus
def test_promtool_accepts_the_configuration_of_the_compose_file() -> None:
    checked = promtool("check", "config", "--lint=all", "--lint-fatal", str(FOLDER / "prometheus.yml"))

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "tracekv.rules.yml" in checked.stdout


@pytest.mark.prometheus
def test_every_alert_fires_when_it_should_and_only_then() -> None:
    tested = promtool("test", "rules", *map(str, TESTS))

    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.prometheus
def test_without_the_alerts_the_cases_of_each_fail(tmp_path: Path) -> None:
    """The control: the cases depend on the alert that they are of."""
    told = yaml.safe_load(RULES.read_text())
    for group in told["groups"]:
        for rule in group["rules"]:
            rule["expr"] = f"({rule['expr']}) and vector(1) == 2" if "alert" in rule else rule["expr"]
    (tmp_path / RULES.name).write_text(yaml.safe_dump(told))
    for path in TESTS:
        (tmp_path / path.name).write_text(path.read_text())
    tested = promtool("test", "rules", *(str(tmp_path / path.name) for path in TESTS))

    assert tested.returncode != 0
    failed = set(re.findall(r"alertname: ?(\w+)", tested.stdout + tested.stderr))
    assert failed == {alert.name for alert in ALERTS}


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [
        case for path in TESTS for test in yaml.safe_load(path.read_text())["tests"] for case in test["alert_rule_test"]
    ]

    for alert in ALERTS:
        of_alert = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert.name]
        assert set(of_alert) == {True, False}, alert.name
    assert {case["alertname"] for case in cases} == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_rules_name_only_what_the_endpoint_has(expr: str) -> None:
    on_the_endpoint = {
        prometheus_name(name) + suffix: entry
        for name, entry in registry().metrics.items()
        for suffix in (("_bucket", "_sum", "_count") if entry.instrument == "histogram" else ("",))
    }
    labels = {prometheus_label(attribute) for entry in on_the_endpoint.values() for attribute in entry.attributes}
    named = set(re.findall(r"(?<![\w:])tracekv_\w+(?![\w:])", expr))

    assert named <= on_the_endpoint.keys() | labels
    assert set(re.findall(r"\b\w+:tracekv_\w+:\w+", expr)) <= RECORDED.keys()
    for metric, where in re.findall(r"(tracekv_\w+)\{([^}]*)\}", expr):
        attributes = {prometheus_label(attribute): attribute for attribute in on_the_endpoint[metric].attributes}
        name = next(name for name in registry().metrics if metric.startswith(prometheus_name(name)))
        for label, words in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', where):
            known = registry().words(name, attributes[label])
            assert known is None or set(words.split("|")) <= set(known)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_has_a_runbook_that_tells_what_to_do(alert: rules.Alert) -> None:
    text = (RUNBOOKS / f"{alert.runbook}.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)

    assert text.startswith(f"# {alert.name}\n")
    assert sections == ["What it means", "What to look at first", "Causes", "What to do"]
    assert "\ntracekv " in text
    assert "{{ $labels.instance }}" in alert.summary
    for link in re.findall(r"\]\(([\w-]+\.md)\)", text):
        assert (RUNBOOKS / link).exists()


def test_there_is_no_runbook_without_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == {alert.runbook for alert in ALERTS}


@pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda path: path.stem)
def test_a_runbook_names_commands_settings_reasons_and_panels_that_exist(path: Path) -> None:
    from dashboards.boards import BOARDS

    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"(?:^|`)tracekv ((?!:)[^`\n]+)", text, re.MULTILINE):
        assert_is_a_command(line.split())
    settings = set(re.findall(r"\bTRACEKV_[A-Z_0-9]+\b", text))
    assert settings <= set(_all_variables()), path
    titles = {panel.title for board in BOARDS for panel in board.panels}
    titles |= {board.title for board in BOARDS} | {row for board in BOARDS for row, _ in board.rows}
    assert set(re.findall(r"(?<![*\w])\*([^*|\n]+)\*(?!\*)", text)) <= titles
    known = {word for enum in registry().enums.values() for word in enum.words}
    metrics = {prometheus_name(name) for name in registry().metrics}
    for word in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", text):
        methods = {callback.partition(".")[2] for callback in registry().enums["callback"].words}
        labels = {prometheus_label(attribute) for attribute in registry().attributes}
        assert word in known | metrics | methods | labels | set(registry().spans) | {"tracekv_fsspec", "runbook_url"}, (
            word
        )


def test_the_rules_can_be_printed_for_another_address() -> None:
    printed = yaml.safe_load(rules.as_yaml("https://docs.example.com/runbooks/"))
    urls = {rule["annotations"]["runbook_url"] for rule in printed["groups"][1]["rules"]}

    assert "https://docs.example.com/runbooks/store-breaker-open.md" in urls
    assert len(urls) == len(ALERTS)


def test_every_rule_of_the_contract_is_in_one_of_the_two_alerts() -> None:
    from tracekv import rules as contract

    listed = [
        set(re.findall(r'tracekv_rule=~"([^"]+)"', alert.expr)[0].split("|"))
        for alert in ALERTS
        if alert.name in ("TracekvContractViolated", "TracekvContractSuspect")
    ]
    assert listed[0] | listed[1] == {rule.id for rule in contract.RULES}
    assert not listed[0] & listed[1]

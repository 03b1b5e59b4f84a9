"""The dashboards as files: what Grafana's SDK makes of them, names, units, links, and that they are what the code makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import promql
from dashboards.__main__ import files
from dashboards.board import as_json
from dashboards.boards import BOARDS
from dashboards.panels import Panel
from dashboards.units import SHARE, unit_of
from tracekv.views import names
from tracekv.views.registry import prometheus_name, registry

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
PANELS = [pytest.param(panel, id=f"{board.uid}: {panel.title}") for board in BOARDS for panel in board.panels]
ON_THE_ENDPOINT = {
    prometheus_name(name) + suffix
    for name, entry in registry().metrics.items()
    for suffix in (("_bucket", "_sum", "_count") if entry.instrument == "histogram" else ("",))
}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    register_default_plugins()


def encoded(dashboard: Any) -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard) + "\n"


def test_what_is_committed_is_what_the_code_makes_byte_for_byte() -> None:
    for path, text in files().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run python -m dashboards"
    assert {path.name for path in FILES} == {f"{board.uid}.json" for board in BOARDS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_sdk_reads_a_file_and_writes_it_again_unchanged(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert encoded(Dashboard.from_json(json.loads(text))) == text


def test_a_key_that_grafana_does_not_know_would_not_come_back() -> None:
    """The control of the equality above."""
    told = json.loads(FILES[0].read_text(encoding="utf-8"))
    told["panels"][1]["fieldConfig"]["defaults"]["noValues"] = "typo"
    text = json.dumps(told, indent=2, sort_keys=True) + "\n"

    assert encoded(Dashboard.from_json(json.loads(text))) != text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_datasource_is_named_but_by_a_variable(path: Path) -> None:
    told = json.loads(path.read_text(encoding="utf-8"))
    uids = set(re.findall(r'"uid": "([^"]+)"', path.read_text(encoding="utf-8")))

    assert uids == {"${datasource}", told["uid"]}
    variables = {variable["name"]: variable["type"] for variable in told["templating"]["list"]}
    assert variables == {
        "datasource": "datasource",
        "traces": "datasource",
        "job": "query",
        "instance": "query",
        "rank": "query",
        "layer_group": "query",
        "source": "custom",
        "jaeger": "textbox",
    }


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    for board in BOARDS:
        panels = json.loads(as_json(board))["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
            for panel in panels
            for x in range(panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert max(x for x, _ in cells) < 24
    assert len({board.uid for board in BOARDS}) == len(BOARDS)


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_answers_and_ends_with_its_metrics(panel: Panel) -> None:
    assert panel.question.endswith("?")
    assert panel.answer.endswith(".")
    last = panel.description.rsplit("\n\n", 1)[1]
    used = {
        name
        for query in panel.queries
        for name in re.findall(r"[a-zA-Z_:][\w:]*", re.sub(r'"[^"]*"', "", query.expr))
        if (name.startswith("tracekv_") and name in ON_THE_ENDPOINT) or name == "ALERTS"
    }
    assert last == f"Metrics: {', '.join(sorted(used))}"
    assert used


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_tells_absence_from_zero_and_names_its_lines(panel: Panel) -> None:
    assert panel.absent
    assert panel.absent != "0"
    for query in panel.queries:
        assert query.legend
        if "/" in query.expr:
            assert "> 0)" in query.expr or "count(count by" in query.expr  # nothing to divide by is no data
        if "histogram_quantile" in query.expr:
            assert query.expr.endswith(">= 0")  # NaN is no data
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert re.search(rf"by \([^)]*\b{label}\b", query.expr) or "ALERTS" in query.expr, label


@pytest.mark.parametrize("panel", PANELS)
def test_a_plain_rate_or_value_has_the_unit_of_its_metric(panel: Panel) -> None:
    by_name = {
        prometheus_name(name) + suffix: name
        for name in registry().metrics
        for suffix in ("", "_bucket", "_sum", "_count")
    }
    for query in panel.queries:
        metrics = promql.metrics_in(query.expr)
        if len(metrics) != 1 or "/" in query.expr or metrics == ["ALERTS"] or panel.unit.endswith("faults/s"):
            continue
        metric = by_name[metrics[0]]
        is_rate = query.expr.startswith("sum") and "(rate(" in query.expr
        assert panel.unit == unit_of(metric, "a second" if is_rate else "now"), query.expr


def test_units_follow_from_the_registry() -> None:
    assert unit_of(names.METRIC_TRANSFER_IO) == "bytes"
    assert unit_of(names.METRIC_TRANSFER_IO, "a second") == "binBps"
    assert unit_of(names.METRIC_STORE_CEILING) == "binBps"
    assert unit_of(names.METRIC_TRANSFER_STALL, "a second") == SHARE
    assert unit_of(names.METRIC_PASSES, "a second") == "suffix: passes/s"
    assert unit_of(names.METRIC_HELD_PAGES) == "short"


def test_every_metric_but_a_few_is_on_a_dashboard() -> None:
    shown = {name for board in BOARDS for panel in board.panels for name in panel.metrics}
    missing = {
        name
        for name in registry().metrics
        if not any(prometheus_name(name) + suffix in shown for suffix in ("", "_bucket", "_sum", "_count"))
    }

    assert missing == {
        names.METRIC_PREFETCH_IO,  # blocks are shown
        names.METRIC_SETTINGS_INFO,  # for a person who looks into TracekvSettingsDiffer
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: promql.rate("tracekv.nonsense"), "nonsense"),
        (lambda: promql.rate(names.METRIC_PROMPTS, tier="host"), "has no label tracekv_tier"),
        (lambda: promql.rate(names.METRIC_TRANSFER_IO, direction="sideways"), "never 'sideways'"),
        (lambda: promql.rate(names.METRIC_PROMPTS, ["callback"]), "can't be added up by tracekv_callback"),
    ],
)
def test_a_query_cannot_name_what_is_not_there(wrong: Any, said: str) -> None:
    with pytest.raises((KeyError, ValueError), match=said):
        wrong()


def links() -> list[Any]:
    return [
        pytest.param(panel["title"], link["url"], id=f"{panel['title']}: {link['title']}")
        for board in BOARDS
        for panel in json.loads(as_json(board))["panels"]
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", [])
    ]


@pytest.mark.parametrize(("title", "url"), links())
def test_a_link_to_traces_is_a_search_with_listed_names_over_the_time_that_is_shown(title: str, url: str) -> None:
    if url.startswith("/explore?"):
        (panes,) = parse_qs(urlsplit(url).query)["panes"]
        (pane,) = json.loads(panes).values()
        assert pane["datasource"] == "${traces}"
        assert pane["range"] == {"from": "${__from}", "to": "${__to}"}
        (query,) = pane["queries"]
        assert (query["queryType"], query["datasource"]["type"]) == ("traceql", "tempo")
        for attribute in re.findall(r"(?:span|event)\.(tracekv[\w.]*)", query["query"]):
            assert attribute in registry().attributes, attribute
        for name in re.findall(r'(?<![\w.:])name = "([^"$]+)"', query["query"]):
            assert name in registry().spans
        for name in re.findall(r'event:name = "([^"]+)"', query["query"]):
            assert name in registry().events
    else:
        assert url.startswith("${jaeger}/search?service=tracekv&operation=")
        told = parse_qs(url.partition("?")[2])
        assert told["operation"][0] in registry().spans
        assert (told["start"], told["end"]) == (["${__from}000"], ["${__to}000"])
        for attribute in json.loads(told.get("tags", ["{}"])[0]):
            assert attribute in registry().attributes or attribute == "error"


def test_only_variables_stay_unquoted_in_a_link() -> None:
    urls = [url for _, url in (param.values for param in links())]

    assert len(urls) > 40
    for url in urls:
        rest = re.sub(r"\$\{[^}]+\}", "", url)
        assert not set(' "{}<>|') & set(rest)
        assert "tracekv" in unquote(url)

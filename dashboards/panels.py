"""What a panel is here, and how Grafana's SDK is told: the fields that every panel sets are set in one place."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.promql import metrics_in

PROMETHEUS = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_CALCS = ["mean", "max", "lastNotNull"]
_Builder = timeseries.Panel | stat.Panel | statetimeline.Panel | table.Panel


@dataclass(frozen=True)
class Query:
    """A query and what its lines are called; ``{{label}}`` is replaced by the label's value."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Traces:
    """Which traces a click on a point looks for.

    Attributes:
        traceql: For Tempo; ``${__field.labels.X}`` is the clicked line's label.
        operation: For Jaeger: a span's name, and the attributes that it has.
    """

    traceql: str
    operation: str = "request"
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One picture that answers one question.

    Attributes:
        question: What a person on call asks.
        answer: How to read it, and what to do where it looks bad.
        unit: Grafana's; see :mod:`dashboards.units`.
        absent: What is shown where there is no data: which isn't the same as 0.
        limits: Values from which on it is orange and red.
        words: A value -> how it is shown, for states.
    """

    title: str
    question: str
    answer: str
    queries: Sequence[Query]
    unit: str
    kind: Literal["graph", "stack", "stat", "states", "table"] = "graph"
    width: int = 8
    height: int = 8
    absent: str = "no traffic"
    limits: tuple[float, float] | None = None
    low_is_bad: bool = False
    words: dict[str, tuple[str, str]] = field(default_factory=dict)
    traces: Traces | None = None
    most: float | None = None

    @property
    def description(self) -> str:
        """Question and answer; it ends with the metrics that are used."""
        return f"{self.question} {self.answer}\n\nMetrics: {', '.join(self.metrics)}"

    @property
    def metrics(self) -> list[str]:
        """What the queries read, as the endpoint names it."""
        return sorted({name for query in self.queries for name in metrics_in(query.expr)})


def build(panel: Panel, panel_id: int) -> _Builder:
    """The panel for Grafana's SDK."""
    builder = _visualization(panel)
    builder.id(panel_id).title(panel.title).description(panel.description).datasource(PROMETHEUS)
    builder.span(panel.width).height(panel.height).unit(panel.unit).no_value(panel.absent).min(0)
    if panel.most is not None:
        builder.max(panel.most)
    if panel.limits is not None or panel.kind == "stat":
        builder.thresholds(_thresholds(panel))
    if panel.words:
        results = {
            value: models.ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(panel.words.items())
        }
        builder.mappings([models.ValueMap(options=results)])
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + index))
        target.datasource(PROMETHEUS)
        if panel.kind == "table":
            target.format(PromQueryFormat.TABLE)
        builder.with_target(target.instant() if panel.kind in ("stat", "table") else target.range())
    if panel.traces is not None:
        builder.data_links([_link(title, url) for title, url in trace_urls(panel.traces).items()])
    return builder


def _visualization(panel: Panel) -> _Builder:
    legend = common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    tooltip = (
        common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )
    if panel.kind == "stat":
        reduced = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
        many = len(panel.queries) > 1 or "{{" in panel.queries[0].legend
        return (
            stat.Panel()
            .reduce_options(reduced)
            .graph_mode(common.BigValueGraphMode.NONE)
            .color_mode(common.BigValueColorMode.VALUE)
            .text_mode(common.BigValueTextMode.VALUE_AND_NAME if many else common.BigValueTextMode.VALUE)
        )
    if panel.kind == "states":
        legend.display_mode(common.LegendDisplayMode.LIST)
        return statetimeline.Panel().legend(legend).tooltip(tooltip).fill_opacity(70).merge_values(True)
    if panel.kind == "table":
        # A line per series, its labels as columns; value and time say nothing here.
        hidden = dict.fromkeys(("Time", "Value", "__name__", "alertstate"), True)
        organized = models.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
        return table.Panel().with_transformation(organized)
    legend.display_mode(common.LegendDisplayMode.TABLE).calcs(_CALCS)
    graph = timeseries.Panel().legend(legend).tooltip(tooltip).line_width(1).fill_opacity(10)
    # A gap in the data stays a gap.
    graph.span_nulls(False).show_points(common.VisibilityMode.NEVER)
    if panel.kind == "stack":
        graph.fill_opacity(40).stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if panel.limits is not None:
        dashed = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        graph.thresholds_style(dashed)
    return graph


def _thresholds(panel: Panel) -> builders.ThresholdsConfig:
    steps = [models.Threshold(value=None, color="text")]
    if panel.limits is not None:
        colors = ("red", "orange", "green") if panel.low_is_bad else ("green", "orange", "red")
        steps = [
            models.Threshold(value=value, color=color)
            for value, color in zip((None, *panel.limits), colors, strict=True)
        ]
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _link(title: str, url: str) -> builders.DashboardLink:
    return builders.DashboardLink(title).url(url).target_blank(True)


def trace_urls(traces: Traces) -> dict[str, str]:
    """Links by title: a search in Tempo through Grafana's Explore, and one in Jaeger, over the time that is shown."""
    tempo = {"type": "tempo", "uid": "${traces}"}
    query = {"refId": "A", "datasource": tempo, "queryType": "traceql", "query": traces.traceql, "limit": 20}
    pane = {"datasource": "${traces}", "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}
    panes = json.dumps({"tracekv": pane}, separators=(",", ":"))
    # Jaeger wants microseconds, Grafana has milliseconds.
    jaeger = f"service=tracekv&operation={quote(traces.operation)}&start=${{__from}}000&end=${{__to}}000&limit=20"
    if traces.tags:
        jaeger += f"&tags={_quoted(json.dumps(traces.tags, separators=(',', ':')))}"
    return {
        "Search these traces in Tempo": f"/explore?schemaVersion=1&orgId=1&panes={_quoted(panes)}",
        "Search these traces in Jaeger": f"${{jaeger}}/search?{jaeger}",
    }


def _quoted(text: str) -> str:
    """Percent-encoded, but for Grafana's variables."""
    return "".join(part if part.startswith("${") else quote(part) for part in re.split(r"(\$\{[^}]+\})", text))

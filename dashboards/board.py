"""A dashboard: rows of panels below the same variables and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import PROMETHEUS, Panel, build
from tracekv.views import names
from tracekv.views.registry import prometheus_label, prometheus_name

TAG = "tracekv"
_ALL = models.VariableOption(text="All", value="$__all", selected=True)
_SOURCES = ("reported", "observed", "planned", "eligible")


@dataclass(frozen=True)
class Board:
    """A dashboard.

    Attributes:
        uid: Of the dashboard in Grafana, and the name of its file.
        purpose: What it is opened for.
        rows: Title and panels of each row.
    """

    uid: str
    title: str
    purpose: str
    rows: Sequence[tuple[str, Sequence[Panel]]]

    @property
    def panels(self) -> Iterator[Panel]:
        """All panels in their order."""
        for _, panels in self.rows:
            yield from panels


def as_json(board: Board) -> str:
    """The file that Grafana imports. No datasource is named: whoever looks picks one."""
    dashboard = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.purpose)
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables(_variables())
        .link(
            builders.DashboardLink("tracekv")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(_alerts())
    )
    number = 0
    for title, panels in board.rows:
        number += 1
        dashboard.with_row(builders.Row(title).id(number))
        for panel in panels:
            number += 1
            dashboard.with_panel(build(panel, number))
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build()) + "\n"


def _alerts() -> builders.AnnotationQuery:
    return (
        builders.AnnotationQuery()
        .name("tracekv's alerts")
        .datasource(PROMETHEUS)
        .enable(True)
        .icon_color("red")
        .expr('ALERTS{alertname=~"Tracekv.+", alertstate="firing", job=~"$job|"}')
        .title_format("{{alertname}}")
        .text_format("{{instance}} rank {{tracekv_rank}}")
        .step("60s")
    )


def _variables() -> list[Builder[models.VariableModel]]:
    processes = prometheus_name(names.METRIC_PROCESSES)
    rank, group = prometheus_label(names.RANK), prometheus_label(names.GROUP)
    here = 'job=~"$job", instance=~"$instance"'
    source = "|".join(_SOURCES)
    return [
        builders.DatasourceVariable("datasource").label("Metrics").type("prometheus"),
        builders.DatasourceVariable("traces").label("Traces").type("tempo"),
        _labels("job", "Job", f"label_values({processes}, job)"),
        _labels("instance", "Instance", f'label_values({processes}{{job=~"$job"}}, instance)'),
        _labels("rank", "Rank", f"label_values({processes}{{{here}}}, {rank})"),
        _labels(
            "layer_group",
            "Layer group",
            f"label_values({prometheus_name(names.METRIC_TRANSFER_IO)}{{{here}}}, {group})",
        ),
        builders.CustomVariable("source")
        .label("Bytes as")
        .description("Each source tells the same movement in its own way; see docs/telemetry.md")
        .values(source.replace("|", ","))
        .options([models.VariableOption(text=word, value=word, selected=word == "reported") for word in _SOURCES])
        .current(models.VariableOption(text="reported", value="reported", selected=True)),
        builders.TextBoxVariable("jaeger")
        .label("Jaeger")
        .description("Where Jaeger's UI is, for links to traces")
        .default_value("http://localhost:16686")
        .current(models.VariableOption(text="http://localhost:16686", value="http://localhost:16686", selected=True)),
    ]


def _labels(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query(query)
        .definition(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(_ALL)
    )

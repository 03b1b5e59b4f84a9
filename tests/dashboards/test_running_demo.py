"""Every panel's queries, in a real Prometheus that scrapes the running demo, which runs as the compose file runs it: with its S3
server, its environment, and its spans and metrics going through a collector."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dashboards.boards import BOARDS
from dashboards.panels import Panel
from dashboards.rules import ALERTS, RECORDED
from tests.support import seaweed
from tests.support.collector import Sink, collector, free_port
from tests.support.prometheus import Prometheus, prometheus
from tracekv.views import names
from tracekv.views.registry import registry

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(600)]

COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "dashboards" / "compose.yaml").read_text())["services"]
WINDOW = {"$__rate_interval": "60s", "$__range": "120s"}
VARIABLES = {"$job": "tracekv", "$instance": ".*", "$rank": ".*", "$layer_group": ".*", "$source": "reported", **WINDOW}
PANELS = [(f"{board.uid}: {panel.title}", panel) for board in BOARDS for panel in board.panels]
#: What the demo, one engine with one rank, a healthy store and a connector that keeps its promises, has nothing of.
UNFILLED = {
    "tracekv-overview: Alerts that fire",  # no rules are loaded here
    "tracekv-overview: Bytes given up",
    "tracekv-requests: Rank skew",
    "tracekv-requests: Last rank",
    "tracekv-layer-groups: Group that ended the hit",
    "tracekv-store: Share of the ceiling",
    "tracekv-store: Blocks given up",
    "tracekv-store: Blocks read ahead",
    "tracekv-store: Useful share of reading ahead",
    "tracekv-store: Lead of useful blocks",
    "tracekv-store: From commit to offer",
    "tracekv-store: Misses for the store's sake",
    "tracekv-tracer: What tracing costs",
    "tracekv-tracer: The agent's processor time",  # the agent is a thread of the engine
}


@dataclass
class Running:
    """The demo and what watches it."""

    prometheus: Prometheus
    sink: Sink
    metrics_port: int
    s3_port: int


@pytest.fixture(scope="module")
def s3_of_the_compose_file() -> Iterator[seaweed.S3Server]:
    service = COMPOSE["seaweedfs"]
    keys = service["environment"]
    with tempfile.TemporaryDirectory(prefix="tracekv-weed-") as folder:
        ports = dict(zip(("s3", "master", "volume", "filer", "admin"), seaweed._free_ports(5), strict=True))
        command = [seaweed.weed_binary(), *service["command"][1:]]
        ours = {"-dir": f"{folder}/data", "-ip.bind": "127.0.0.1", "-s3.port": str(ports["s3"])}
        command = [f"{flag}={ours[flag]}" if (flag := word.partition("=")[0]) in ours else word for word in command] + [
            f"-{name}.port={port}" for name, port in ports.items() if name != "s3"
        ]
        server = seaweed.S3Server(
            f"http://127.0.0.1:{ports['s3']}", "tracekv-demo", keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"]
        )
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "WEED_"))}
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environ | keys, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            seaweed._wait_for_bucket(process, server, Path(folder, "log"))
            yield server
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def running(s3_of_the_compose_file: seaweed.S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("demo")
    service, port, sink = COMPOSE["demo"], free_port(), Sink()
    with collector(sink.url, folder) as otlp:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_", "AWS_"))
        }
        environ |= service["environment"] | {
            "AWS_ENDPOINT_URL": s3_of_the_compose_file.endpoint,
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.http,
            "TRACEKV_METRICS_PORT": str(port),
            "TRACEKV_JOURNAL_DIR": str(folder / "journals"),
            "XDG_CACHE_HOME": str(folder),
        }
        with (folder / "demo.out").open("wb") as log:
            demo = subprocess.Popen(
                [sys.executable, "-m", "tracekv.cli", *service["command"]],
                env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            with prometheus(f"127.0.0.1:{port}", folder, every="1s") as server:
                enough = "sum(tracekv_prompts_total) >= 20 and sum(tracekv_prompt_tokens_honoured_total) > 0"
                try:
                    server.wait_for(enough, timeout_s=400)
                except AssertionError as error:
                    raise AssertionError(f"{error}\n{(folder / 'demo.out').read_text()[-4000:]}") from None
                yield Running(server, sink, port, int(s3_of_the_compose_file.endpoint.rpartition(":")[2]))
        finally:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
            sink.close()


def substituted(expr: str) -> str:
    for name in sorted(VARIABLES, key=len, reverse=True):
        expr = expr.replace(name, VARIABLES[name])
    assert "$" not in expr
    return expr


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=[name for name, _ in PANELS])
def test_the_queries_of_a_panel_run_and_fill_it(running: Running, name: str, panel: Panel) -> None:
    results = [running.prometheus.get("query", query=substituted(query.expr))["result"] for query in panel.queries]

    assert any(results) or name in UNFILLED
    for query, result in zip(panel.queries, results, strict=True):
        for series in result:
            float(series["value"][1])
            legend = query.legend
            for label, value in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            # What is 0 since nothing was found has no labels to be named by.
            assert "{{" not in legend or series["metric"] == {}


@pytest.mark.parametrize("query", [*RECORDED.values(), *(alert.expr for alert in ALERTS)])
def test_the_expressions_of_rules_run(running: Running, query: str) -> None:
    running.prometheus.get("query", query=query)


def test_the_hit_ratio_is_one(running: Running) -> None:
    """Not only is there a number: it is the one that the counters of the endpoint give."""
    (panel,) = [panel for _, panel in PANELS if panel.title == "Hit ratio"]
    expr = substituted(panel.queries[0].expr).replace("120s", "10m")
    ((ratio,),) = [running.prometheus.get("query", query=expr)["result"]]

    assert 0 < float(ratio["value"][1]) < 1


def test_nobody_is_told_a_zero_where_nothing_is_watched(running: Running) -> None:
    """The control: with another job's name, no panel has anything to show."""
    for name, panel in PANELS:
        for query in panel.queries:
            expr = substituted(query.expr.replace("$job", "another"))
            assert running.prometheus.get("query", query=expr)["result"] == [], f"{name}: {expr}"


def test_spans_and_metrics_go_through_a_collector(running: Running) -> None:
    spans = running.sink.wait_for_spans(20)
    sent = {
        metric.name
        for request in list(running.sink.metrics)
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }

    assert {"request", "step", "get_num_new_matched_tokens"} <= {span.name for span in spans} <= set(registry().spans)
    assert {names.METRIC_PROMPTS, names.METRIC_TRANSFER_IO, names.METRIC_STORE_OPERATIONS} <= sent
    assert sent <= set(registry().metrics)


@pytest.mark.parametrize("service", ["demo", "seaweedfs"])
def test_the_health_check_of_the_compose_file_says_healthy_and_without_the_service_it_does_not(
    running: Running, service: str
) -> None:
    _, _, *arguments = COMPOSE[service]["healthcheck"]["test"]
    inside, outside = {"demo": ("9464", running.metrics_port), "seaweedfs": ("8333", running.s3_port)}[service]
    code = arguments[-1]
    assert inside in code

    def status(port: int) -> int:
        return subprocess.run(
            [sys.executable, "-c", code.replace(inside, str(port))], capture_output=True, timeout=30
        ).returncode

    assert status(outside) == 0
    assert status(free_port()) != 0

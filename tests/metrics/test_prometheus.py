"""A real Prometheus scrapes the endpoint and answers queries; promtool finds nothing to object to."""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.metrics.conftest import Start
from tests.metrics.reading import SOURCE, source, worker
from tests.support.prometheus import prometheus, tool
from tests.telemetry.everything import EVERYTHING
from tests.views.sample_run import call, polled
from tracekv.agent.metrics import MetricsService
from tracekv.journal.vocabulary import Callback
from tracekv.views.registry import prometheus_name, registry

pytestmark = pytest.mark.prometheus


class _Exporter:
    exported = 12
    failed = 3


def _fed(start: Start) -> MetricsService:
    service = start(metrics_port=0)
    service.watch(_Exporter())
    service.feed_all(SOURCE, EVERYTHING)
    service.feed_all(source(1), [*worker(1), call(Callback.WAIT_FOR_SAVE, 8000, 8010)])
    for number in (0, 1):
        service.feed(source(number), polled(9000 + number, 9010, saving_returned=[31], loading_returned=[31]))
    return service


def test_promtool_accepts_the_endpoint(start: Start) -> None:
    service = _fed(start)
    assert service.url is not None
    with urllib.request.urlopen(service.url, timeout=10) as answer:
        text = answer.read()
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_promtool_would_have_objected() -> None:
    """The control: the same tool refuses a counter without its suffix."""
    text = b"# HELP tracekv_x X\n# TYPE tracekv_x counter\ntracekv_x 1\n"
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)

    assert checked.returncode != 0


def test_prometheus_scrapes_all_ranks_and_answers_queries(start: Start, tmp_path: Path) -> None:
    service = _fed(start)
    assert service.url is not None
    with prometheus(service.url.removeprefix("http://").removesuffix("/metrics"), tmp_path) as server:
        (up,) = server.wait_for("up{job='tracekv'} == 1")
        assert up["metric"]["job"] == "tracekv"
        loaded = server.wait_for(
            "tracekv_transfer_io_bytes_total{tracekv_source='reported', tracekv_direction='load', tracekv_tier='host'}"
        )
        assert [(one["metric"]["tracekv_layer_group_id"], one["value"][1]) for one in loaded] == [("0", "200")]
        (hit_ratio,) = server.wait_for(
            "sum(tracekv_prompt_tokens_honoured_total) / sum(tracekv_prompt_tokens_queried_total)"
        )
        assert 0 < float(hit_ratio["value"][1]) < 1
        (quantile,) = server.wait_for("histogram_quantile(1, sum by (le) (tracekv_finished_skew_seconds_bucket))")
        assert float(quantile["value"][1]) == 0.0001
        ranks = server.wait_for("count by (tracekv_rank) (tracekv_tracer_records_read_total)")
        assert {one["metric"]["tracekv_rank"] for one in ranks} == {"0", "1"}

        known = set(server.get("label/__name__/values"))
        metadata = server.get("metadata")
        for name, entry in registry().metrics.items():
            mapped = prometheus_name(name)
            assert (f"{mapped}_bucket" if entry.instrument == "histogram" else mapped) in known
            kind = "gauge" if entry.instrument == "updowncounter" else entry.instrument
            # Prometheus asks for OpenMetrics, where a counter is described without its suffix.
            family = mapped.removesuffix("_total")
            assert [(one["type"], one["help"]) for one in metadata[family]] == [(kind, entry.meaning)]

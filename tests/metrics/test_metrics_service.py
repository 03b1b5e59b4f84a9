"""The endpoint that Prometheus scrapes, and a service that nothing stops."""

from __future__ import annotations

import logging
import os
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.metrics.conftest import Start
from tests.metrics.reading import BRING_UP, SOURCE, of, source
from tests.telemetry.everything import EVERYTHING
from tests.views.sample_run import call, joined, looked_up, transferred
from tracekv.agent import metrics as metrics_module
from tracekv.agent.metrics import ENDPOINT_FILE, MetricsService
from tracekv.journal.records import Record, SettingsSeen
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.settings import Settings
from tracekv.views.registry import prometheus_label, prometheus_name, registry


def scrape(service: MetricsService) -> str:
    assert service.url is not None
    with urllib.request.urlopen(service.url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text: str = answer.read().decode()
    return text


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset((f"tracekv_{name}", value) for name, value in labels.items())


def test_a_scrape_gives_what_was_fed(start: Start) -> None:
    service = start(metrics_port=0)
    service.feed_all(SOURCE, [*BRING_UP, transferred(Direction.LOAD, 0, [3, 4], 200, 0, 2_000_000)])
    found = samples(scrape(service))

    labels = labelled(rank="0", direction="load", layer_group_id="0", tier="host", source="reported")
    assert found["tracekv_transfer_io_bytes_total", labels] == 200
    buckets = labelled(rank="0", direction="load", tier="host")
    assert found["tracekv_transfer_duration_seconds_sum", buckets] == 0.002
    assert found["tracekv_transfer_duration_seconds_bucket", buckets | {("le", "0.001")}] == 0
    assert found["tracekv_transfer_duration_seconds_bucket", buckets | {("le", "0.005")}] == 1
    assert found["tracekv_transfer_duration_seconds_bucket", buckets | {("le", "+Inf")}] == 1
    assert found["target_info", frozenset({("service_name", "tracekv"), ("host_name", "node-1")})] == 1


def test_a_label_that_a_point_does_not_have_is_not_there(start: Start) -> None:
    service = start(metrics_port=0)
    service.feed_all(SOURCE, EVERYTHING)

    assert '=""' not in scrape(service)


def test_every_name_and_label_on_the_endpoint_is_listed(start: Start) -> None:
    service = start(metrics_port=0)
    service.feed_all(SOURCE, EVERYTHING)
    listed = {prometheus_name(name): entry for name, entry in registry().metrics.items()}

    for name, labels in samples(scrape(service)):
        if name == "target_info":
            continue
        entry = next(listed[base] for base in (name, *(name.removesuffix(s) for s in _SUFFIXES)) if base in listed)
        assert {label for label, _ in labels} - {"le"} <= {prometheus_label(one) for one in entry.attributes}


_SUFFIXES = ("_bucket", "_sum", "_count")


def test_ranks_of_a_node_share_the_endpoint(start: Start) -> None:
    service = start(metrics_port=0)
    for rank in range(3):
        service.feed_all(source(rank), [joined(rank, 3), looked_up()])
    found = samples(scrape(service))

    assert [found["tracekv_lookups_total", labelled(rank=str(rank))] for rank in range(3)] == [1, 1, 1]


def test_the_endpoint_listens_on_the_loopback_address_and_its_file_tells_where(start: Start, tmp_path: Path) -> None:
    service = start(metrics_port=0)
    file = tmp_path / "journals" / ENDPOINT_FILE

    assert service.url is not None
    assert service.url.startswith("http://127.0.0.1:")
    assert file.read_text() == f"{service.url}\n"
    url = service.url
    service.close()
    assert not file.exists()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=1)


def test_another_services_file_is_left_alone(start: Start, tmp_path: Path) -> None:
    first, second = start(metrics_port=0), start(metrics_port=0)
    first.close()

    assert (tmp_path / "journals" / ENDPOINT_FILE).read_text() == f"{second.url}\n"


def test_a_port_that_is_taken_is_said_once_and_the_rest_goes_on(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = start(metrics_port=port)
        service.feed_all(SOURCE, [*BRING_UP, looked_up()])

    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"127.0.0.1:{port}" in warnings[0]
    assert "TRACEKV_METRICS_PORT" in warnings[0]
    assert service.url is None
    assert of(service.metrics(), "tracekv.lookups") == {(): 1}


def test_a_port_is_served_on_once_whoever_had_it_is_gone(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_module, "SERVE_AGAIN_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = start(metrics_port=port)
        service.tick()
        assert service.url is None
    service.tick()

    assert service.url == f"http://127.0.0.1:{port}/metrics"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_without_a_port_nothing_is_served(start: Start, tmp_path: Path) -> None:
    assert start().url is None
    assert not (tmp_path / "journals").exists()


def test_a_record_on_which_the_metrics_fail_is_left_out_and_said_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = transferred(Direction.LOAD, 0, [3], 100, 0, 1)
    broken.nbytes = "x"
    service = start()
    service.feed_all(SOURCE, [*BRING_UP, broken, looked_up(), broken, looked_up()])

    assert of(service.metrics(), "tracekv.lookups") == {(): 2}
    assert of(service.metrics(), "tracekv.tracer.view_faults") == {(): 2}
    assert sum("metrics failed on a record" in record.getMessage() for record in caplog.records) == 1


def test_differing_settings_of_ranks_are_warned_about(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = start()
    for rank in range(2):
        service.feed_all(source(rank), [SettingsSeen(bytes([rank])), joined(rank, 2)])

    (warning,) = [record.getMessage() for record in caplog.records]
    assert "rank 1 has other settings than rank 0" in warning


def test_scrapes_and_records_may_come_at_the_same_time(start: Start) -> None:
    service = start(metrics_port=0)
    service.feed_all(SOURCE, BRING_UP)
    records: list[Record] = [call(Callback.START_LOAD_KV, n, n + 5) for n in range(2000)]
    has_fed = threading.Event()

    def feed() -> None:
        for record in records:
            service.feed(SOURCE, record)
        has_fed.set()

    thread = threading.Thread(target=feed)
    thread.start()
    name, labels = "tracekv_callback_duration_seconds_count", labelled(rank="0", callback="worker.start_load_kv")
    seen: list[float] = []
    while not has_fed.is_set():
        seen.append(samples(scrape(service)).get((name, labels), 0))
    thread.join()

    assert seen == sorted(seen)
    assert samples(scrape(service))[name, labels] == 2000


def test_spans_exported_and_failed_are_told(start: Start) -> None:
    class Exporter:
        exported = 5
        failed = 2

    service = start()
    exporter = Exporter()
    service.watch(exporter)
    exporter.exported = 9

    assert of(service.metrics(), "tracekv.tracer.exported") == {("spans",): 9}
    assert of(service.metrics(), "tracekv.tracer.export.failed") == {("spans",): 2}


def test_processor_time_is_told_where_the_process_is_the_agents_own(start: Start) -> None:
    assert of(start().metrics(), "tracekv.tracer.cpu")[()] >= 0
    assert of(start(agent="thread").metrics(), "tracekv.tracer.cpu") == {}


def test_a_missing_package_is_said_with_what_to_install(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tracekv.agent.prometheus", None)
    service = start(metrics_port=0)

    assert service.url is None
    assert "pip install 'tracekv[agent]'" in caplog.text


def test_closing_twice_or_in_a_forked_child_does_no_harm(start: Start) -> None:
    service = start(metrics_port=0)
    child = os.fork()
    if child == 0:
        os._exit(0 if service.close() else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert "tracekv_settings_differing" in scrape(service)
    assert service.close()
    assert service.close()


def test_the_service_needs_no_start_to_add_up() -> None:
    service = MetricsService(Settings(), {})
    service.feed_all(SOURCE, [*BRING_UP, looked_up()])

    assert of(service.metrics(), "tracekv.lookups") == {(): 1}

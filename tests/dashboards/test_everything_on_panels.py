"""What the demo has nothing of is on its panels too, once it happens: two ranks to which everything happens that records can tell."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.panels import Panel
from tests.dashboards.test_running_demo import PANELS, UNFILLED, substituted
from tests.metrics.reading import source, worker
from tests.support.prometheus import Prometheus, prometheus
from tests.telemetry.everything import EVERYTHING
from tests.views.sample_run import call, polled
from tracekv.agent.metrics import MetricsService
from tracekv.journal.records import StoreCeiling
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.settings import Settings

pytestmark = pytest.mark.prometheus


class _Exporter:
    exported = 12
    failed = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder: Path = tmp_path_factory.mktemp("everything")
    service = MetricsService(
        Settings(agent="external", metrics_port=0, journal_dir=str(folder / "journals")), {"service.name": "tracekv"}
    )
    service.watch(_Exporter())
    service.start()
    assert service.url is not None
    ends = threading.Event()

    def keep_happening() -> None:
        number = 0
        while not ends.wait(0.5):
            leader, other = source(number), source(number + 1)
            service.feed_all(leader, [*EVERYTHING, StoreCeiling(7130, "s3", None, Direction.SAVE, 65536, 2000, 1000)])
            service.feed_all(other, [*worker(1), call(Callback.WAIT_FOR_SAVE, 8000, 8010)])
            for end, process in ((9000, leader), (5_000_000, other)):
                service.feed(process, polled(end, end + 10, saving_returned=[31], loading_returned=[31]))
            for process in (source(number - 2), source(number - 1)) if number else ():
                service.ended(process)
            number += 2

    happening = threading.Thread(target=keep_happening)
    happening.start()
    try:
        with prometheus(service.url.removeprefix("http://").removesuffix("/metrics"), folder) as running:
            running.wait_for("increase(tracekv_finished_last_total[60s]) > 3", 60)
            yield running
    finally:
        ends.set()
        happening.join()
        service.close(1.0)


@pytest.mark.parametrize(
    ("name", "panel"),
    [pair for pair in PANELS if pair[0] in UNFILLED - {"tracekv-overview: Alerts that fire"}],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_panel_that_the_demo_leaves_empty_is_filled_by_what_it_is_about(
    server: Prometheus, name: str, panel: Panel
) -> None:
    results = [server.get("query", query=substituted(query.expr))["result"] for query in panel.queries]

    assert any(results), [query.expr for query in panel.queries]

"""How the tests read metrics, and whose records they feed."""

from __future__ import annotations

from collections.abc import Iterable

from tests.views.sample_run import EPOCH, PROCESS, RUN, joined, registered, started, wrapped
from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import CallbackSource, ConnectorWrapped, Record
from tracekv.journal.vocabulary import Side
from tracekv.views.metrics import HistogramPoint, MetricPoints, MetricsView, Point

BOOT = "boot"


def source(number: int = 0, boot_id: str = BOOT, monotonic_ns: int = 0, wall_ns: int = EPOCH) -> JournalFacts:
    """The journal of one process."""
    process_id = PROCESS if number == 0 else b"process-%07d-" % number
    return JournalFacts(4711 + number, 1, 1, process_id, boot_id, monotonic_ns, wall_ns, "0.1.0", "node-1")


SOURCE = source()
#: Bring-up of a process that is scheduler and worker of rank 0, with both layer hooks and the sample's two layer groups.
HOOKED = ConnectorWrapped(
    Side.WORKER,
    "pkg.mod.Worker",
    [CallbackSource("wait_for_layer_load", "/src/mod.py", 20), CallbackSource("save_kv_layer", "/src/mod.py", 30)],
    [],
)
BRING_UP: list[Record] = [started(), wrapped(Side.SCHEDULER), HOOKED, registered(), joined()]


def worker(rank: int, world: int = 2, run_id: bytes = RUN) -> list[Record]:
    """Bring-up of a rank's worker process."""
    return [HOOKED, registered(), joined(rank, world, run_id)]


def view_of(*records: Record, before: Iterable[Record] = BRING_UP) -> MetricsView:
    """A view that was fed with a process's bring-up and then ``records``."""
    view = MetricsView()
    view.feed_all(SOURCE, [*before, *records])
    return view


def of(metrics: MetricsView | list[MetricPoints], name: str) -> dict[tuple[str | int, ...], int | float]:
    """Values of a metric by its attributes' values but the rank, which has to be 0 where there is one."""
    return {key: point.value for key, point in _points(metrics, name).items() if isinstance(point, Point)}


def histograms(metrics: MetricsView | list[MetricPoints], name: str) -> dict[tuple[str | int, ...], HistogramPoint]:
    """Histograms of a metric, likewise."""
    return {key: point for key, point in _points(metrics, name).items() if isinstance(point, HistogramPoint)}


def by_rank(metrics: MetricsView | list[MetricPoints], name: str) -> dict[tuple[str | int, ...], int | float]:
    """Values of a metric by its attributes' values, the rank's too."""
    metrics = metrics.metrics() if isinstance(metrics, MetricsView) else metrics
    found = [metric for metric in metrics if metric.name == name]
    return {
        tuple(point.attributes.values()): point.value
        for metric in found
        for point in metric.points
        if isinstance(point, Point)
    }


def _points(
    metrics: MetricsView | list[MetricPoints], name: str
) -> dict[tuple[str | int, ...], Point | HistogramPoint]:
    metrics = metrics.metrics() if isinstance(metrics, MetricsView) else metrics
    found: dict[tuple[str | int, ...], Point | HistogramPoint] = {}
    for metric in metrics:
        if metric.name == name:
            for point in metric.points:
                attributes = dict(point.attributes)
                assert attributes.pop("tracekv.rank", 0) == 0
                assert tuple(attributes.values()) not in found
                found[tuple(attributes.values())] = point
    return found

"""One Prometheus endpoint for all ranks of a node, on the loopback address. Needs ``prometheus_client`` (the ``agent`` extra).

Names are those of OpenTelemetry's mapping. An attribute that a point doesn't have is a label that isn't there; the resource is
``target_info``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tracekv.views.metrics_model import HistogramPoint, MetricPoints, Point
from tracekv.views.model import AttributeValue
from tracekv.views.registry import prometheus_label, prometheus_name, registry

ADDRESS = "127.0.0.1"
_TYPES = {"counter": "counter", "updowncounter": "gauge", "gauge": "gauge", "histogram": "histogram"}


class PrometheusEndpoint:
    """Serves the metrics until it is closed; each scrape collects anew, on a thread of its own.

    Args:
        port: 0 for a free one.
        collect: Gives the metrics; called on any thread.
        resource: What ``target_info`` tells.

    Attributes:
        url: Where it is scraped.

    Raises:
        OSError: The port is taken, or may not be had.
    """

    def __init__(
        self, port: int, collect: Callable[[], list[MetricPoints]], resource: Mapping[str, AttributeValue]
    ) -> None:
        known = CollectorRegistry(auto_describe=False)
        # Without a ``describe`` method nothing is collected at the registration.
        known.register(_Collector(collect, resource))
        self._server, self._thread = start_http_server(port, addr=ADDRESS, registry=known)
        self.url = f"http://{ADDRESS}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector(Collector):
    def __init__(self, collect: Callable[[], list[MetricPoints]], resource: Mapping[str, AttributeValue]) -> None:
        self._collect = collect
        self._resource = resource

    def collect(self) -> Iterable[Metric]:
        """What prometheus_client asks for at a scrape."""
        yield _target_info(self._resource)
        for metric in self._collect():
            yield _family(metric)


def _family(metric: MetricPoints) -> Metric:
    entry = registry().metrics[metric.name]
    name = prometheus_name(metric.name)
    family = Metric(name.removesuffix("_total"), entry.meaning, _TYPES[entry.instrument])
    bounds = [f"{bound:g}" for bound in registry().bounds(metric.name)] + ["+Inf"]
    for point in metric.points:
        labels = {prometheus_label(attribute): str(value) for attribute, value in point.attributes.items()}
        if isinstance(point, Point):
            family.add_sample(name, labels, point.value)
        else:
            for suffix, more, value in _samples(point, bounds):
                family.add_sample(name + suffix, labels | more, value)
    return family


def _samples(point: HistogramPoint, bounds: list[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    for bound, count in zip(bounds, accumulate(point.counts), strict=True):
        yield "_bucket", {"le": bound}, count
    yield "_count", {}, point.count
    yield "_sum", {}, point.sum


def _target_info(resource: Mapping[str, AttributeValue]) -> Metric:
    family = Metric("target", "The agent that serves this endpoint", "info")
    labels = {re.sub(r"\W", "_", name): str(value) for name, value in resource.items()}
    family.add_sample("target_info", labels, 1)
    return family

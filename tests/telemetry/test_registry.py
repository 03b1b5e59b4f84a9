"""The registry and what is emitted, held against each other both ways."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from tests.metrics.reading import source, worker
from tests.telemetry.everything import EVERYTHING
from tests.views.sample_run import call, polled, spans_of
from tracekv.agent.metrics import MetricsService
from tracekv.journal import vocabulary
from tracekv.journal.vocabulary import Callback, Operation
from tracekv.settings import Settings
from tracekv.views import names
from tracekv.views.metrics import HistogramPoint, MetricPoints, Point
from tracekv.views.model import Attributes, AttributeValue, Span
from tracekv.views.registry import prometheus_name, registry, total_series_bound
from tracekv.views.spans import SpanView
from tracekv.views.telemetry_page import page

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"


class _Exporter:
    name = "file"
    exported = 12
    failed = 3


@pytest.fixture(scope="module")
def metrics() -> list[MetricPoints]:
    """All that the metrics have to say, of two ranks."""
    service = MetricsService(Settings(agent="external"), {})
    service.feed_all(source(), EVERYTHING)
    service.feed_all(source(1), [*worker(1), call(Callback.WAIT_FOR_SAVE, 8000, 8010)])
    for number in (0, 1):
        service.feed(source(number), polled(9000 + number, 9010, saving_returned=[31], loading_returned=[31]))
    service.watch(_Exporter())
    return service.metrics()


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    """All that the spans have to say, in either detail."""
    told = []
    for detail in ("full", "economy"):
        view = SpanView(detail=detail)
        told += spans_of(EVERYTHING[:12], view, is_closed=False)
        view.lost(1)
        told += spans_of(EVERYTHING[12:], view)
    return told


def attributes_of(spans: list[Span]) -> Iterator[Attributes]:
    for span in spans:
        yield span.attributes
        yield from (event.attributes for event in span.events)
        yield from (link.attributes for link in span.links)


def type_of(value: AttributeValue) -> str:
    if isinstance(value, (str, bool, int, float)):
        return type(value).__name__
    (kind,) = {type(item).__name__ for item in value} or {"int"}
    return f"{kind}[]"


def check(name: str, value: AttributeValue) -> None:
    """An attribute is listed, has the type that is listed, and a word of the set that is listed."""
    entry = registry().attributes[name]
    assert entry.type == type_of(value), name
    if entry.enum is not None and not registry().enums[entry.enum].is_open:
        for word in [value] if isinstance(value, str) else value:
            assert word in registry().enums[entry.enum].words, name


def test_every_span_event_and_attribute_of_spans_is_listed(spans: list[Span]) -> None:
    assert {span.name for span in spans} <= registry().spans.keys()
    assert {event.name for span in spans for event in span.events} <= registry().events.keys()
    for attributes in attributes_of(spans):
        for name, value in attributes.items():
            check(name, value)


def test_every_listed_span_and_event_is_emitted(spans: list[Span]) -> None:
    assert {span.name for span in spans} == registry().spans.keys()
    assert {event.name for span in spans for event in span.events} == registry().events.keys()


def test_every_listed_attribute_is_emitted(spans: list[Span], metrics: list[MetricPoints]) -> None:
    emitted = {name for attributes in attributes_of(spans) for name in attributes}
    emitted |= {name for metric in metrics for point in metric.points for name in point.attributes}

    assert registry().attributes.keys() - emitted == set()


def test_every_metric_point_has_listed_attributes_with_listed_words_and_types(metrics: list[MetricPoints]) -> None:
    for metric in metrics:
        entry = registry().metrics[metric.name]
        for point in metric.points:
            missing = set(entry.attributes) - point.attributes.keys()
            assert missing <= {names.TIER}
            assert point.attributes.keys() <= set(entry.attributes)
            for name, value in point.attributes.items():
                check(name, value)
                words = registry().words(metric.name, name)
                assert words is None or value in words


def test_every_listed_metric_is_produced(metrics: list[MetricPoints]) -> None:
    assert [metric.name for metric in metrics] == list(registry().metrics)


def test_values_have_the_types_of_their_units(metrics: list[MetricPoints]) -> None:
    for metric in metrics:
        entry = registry().metrics[metric.name]
        for point in metric.points:
            if entry.instrument == "histogram":
                assert isinstance(point, HistogramPoint)
                assert len(point.counts) == len(registry().bounds(metric.name)) + 1
                assert sum(point.counts) == point.count
            else:
                assert isinstance(point, Point)
                assert type(point.value) is (float if entry.unit in ("s", "1") else int), metric.name


def test_no_request_is_an_attribute_of_a_metric() -> None:
    identifying = {names.REQUEST_ID, names.GEN_AI_REQUEST_ID, names.KEY, names.RUN, names.STEP_NUMBER}

    for metric in registry().metrics.values():
        assert not identifying & set(metric.attributes)


@pytest.mark.parametrize(
    ("enum", "words"),
    [
        ("direction", vocabulary.Direction),
        ("source", vocabulary.Source),
        ("tier", vocabulary.Tier),
        ("miss_reason", vocabulary.MissReason),
        ("drop_reason", vocabulary.DropReason),
        ("operation", vocabulary.Operation),
        ("store_outcome", vocabulary.Outcome),
        ("prefetch_fate", vocabulary.PrefetchFate),
    ],
)
def test_closed_sets_are_those_of_the_records(enum: str, words: type[Enum]) -> None:
    assert list(registry().enums[enum].words) == [word.value for word in words]


def test_every_callback_is_a_listed_word_and_a_listed_span() -> None:
    words = [f"{callback.side.value}.{callback.method}" for callback in Callback]

    assert [*words, "other"] == list(registry().enums["callback"].words)
    assert {callback.method for callback in Callback} <= registry().spans.keys()


def test_every_store_operation_has_a_span() -> None:
    assert {names.STORE + operation.value for operation in Operation} <= registry().spans.keys()


def test_every_listed_name_has_a_constant() -> None:
    constants = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    stores = {names.STORE + operation.value for operation in Operation}
    callbacks = {callback.method for callback in Callback}
    listed = {*registry().spans, *registry().events, *registry().attributes, *registry().metrics}

    assert listed - stores - callbacks <= constants


def test_a_constant_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"tracekv\.nonsense isn't listed among the attributes"):
        names._attribute("tracekv.nonsense")


def test_metrics_names_follow_the_conventions() -> None:
    for name, entry in registry().metrics.items():
        assert name.startswith("tracekv.")
        assert not name.endswith(("_total", ".total", "_seconds", "_bytes"))
        assert (entry.buckets is not None) == (entry.instrument == "histogram")
        assert entry.narrowed.keys() <= set(entry.attributes)
        # A name that is also a namespace of others reads badly in a tree of names.
        assert not any(other.startswith(f"{name}.") for other in registry().metrics)


def test_metrics_names_differ_on_an_endpoint() -> None:
    mapped = [prometheus_name(name) for name in registry().metrics]

    assert len(set(mapped)) == len(mapped)


@pytest.mark.parametrize(
    ("metric", "mapped"),
    [
        ("tracekv.transfer.io", "tracekv_transfer_io_bytes_total"),
        ("tracekv.transfer.pages", "tracekv_transfer_pages_total"),
        ("tracekv.callback.duration", "tracekv_callback_duration_seconds"),
        ("tracekv.transfer.hidden", "tracekv_transfer_hidden_seconds_total"),
        ("tracekv.tracer.cost", "tracekv_tracer_cost_ratio"),
        ("tracekv.held.pages", "tracekv_held_pages"),
        ("tracekv.store.ceiling", "tracekv_store_ceiling_bytes_per_second"),
    ],
)
def test_names_on_an_endpoint_are_those_of_opentelemetrys_mapping(metric: str, mapped: str) -> None:
    assert prometheus_name(metric) == mapped


def test_the_bound_is_a_product_of_closed_sets() -> None:
    assert registry().series_bound("tracekv.layer_hook.time", ranks=8, layer_groups=4) == 9 * 2 * 5
    assert registry().series_bound("tracekv.transfer.io", ranks=8, layer_groups=4) == 9 * 2 * 5 * (2 * 4 + 2)
    assert registry().series_bound("tracekv.finished.skew", ranks=8, layer_groups=4) == 2 * (11 + 3)
    assert total_series_bound(ranks=8, layer_groups=4) < 15_000


def test_the_committed_page_is_what_the_registry_makes() -> None:
    assert PAGE.read_text() == page(), "run: python -m tracekv.views.telemetry_page > docs/telemetry.md"


def test_every_name_is_on_the_page() -> None:
    text = page()
    known = registry()
    for name in (*known.spans, *known.events, *known.attributes, *known.metrics, *known.enums):
        assert f"| `{name}` |" in text or f"### {name}\n" in text

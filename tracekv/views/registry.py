"""The registry of names: ``registry.yaml``, read into types. Documentation, constants, the metrics' exposition and tests go by it.

Nothing here is on an engine's path: the file is read when the first view is imported (12 ms).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

RANK = "tracekv.rank"
LAYER_GROUP = "tracekv.layer_group.id"
TIER = "tracekv.tier"
SETTINGS_DIGEST = "tracekv.settings.digest"

#: Prometheus' words for units of UCUM, as OpenTelemetry's mapping has them.
_UNIT_WORDS = {"By": "bytes", "s": "seconds", "By/s": "bytes_per_second"}


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A closed set of words with a line of meaning each.

    Attributes:
        is_open: Whether spans may have further words; a metric never has.
    """

    meaning: str
    words: dict[str, str]
    is_open: bool = False


class Attribute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An attribute of spans, events, links or metrics. ``enum`` names the set that its values are of."""

    type: Literal["str", "int", "bool", "str[]", "int[]"]
    meaning: str
    unit: str = ""
    enum: str | None = None


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric.

    Attributes:
        unit: UCUM; ``s`` means that values are floats, all others are integers but for ``1``, a ratio.
        attributes: What its points have; ``tracekv.tier`` may be absent from a point.
        narrowed: The words of an attribute that this metric uses, where it doesn't use all.
        buckets: Name of the upper bounds of a histogram's buckets.
    """

    instrument: Literal["counter", "updowncounter", "gauge", "histogram"]
    unit: str
    attributes: list[str]
    meaning: str
    narrowed: dict[str, list[str]] = {}
    buckets: str | None = None


class Registry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file, everything by name."""

    enums: dict[str, Words]
    spans: dict[str, str]
    events: dict[str, str]
    attributes: dict[str, Attribute]
    buckets: dict[str, list[float]]
    metrics: dict[str, Metric]

    def bounds(self, metric: str) -> list[float]:
        """Upper bounds of a histogram's buckets; empty for other instruments."""
        name = self.metrics[metric].buckets
        return self.buckets[name] if name is not None else []

    def words(self, metric: str, attribute: str) -> list[str] | None:
        """The values that an attribute of a metric can have, None where they are numbers or digests."""
        known = self.metrics[metric].narrowed.get(attribute)
        enum = self.attributes[attribute].enum
        if known is None and enum is not None:
            known = list(self.enums[enum].words)
        return known

    def series_bound(self, metric: str, *, ranks: int, layer_groups: int) -> int:
        """The most time series that a metric can have on a Prometheus endpoint.

        A rank or layer group that isn't known counts as one more (-1). A histogram has a series per bucket, two more for sum and
        count, and one for the bucket without an end.
        """
        entry = self.metrics[metric]
        sizes = {RANK: ranks + 1, LAYER_GROUP: layer_groups + 1, SETTINGS_DIGEST: 1}
        bound = 1
        for attribute in entry.attributes:
            words = self.words(metric, attribute)
            bound *= sizes[attribute] if words is None else len(words)
        if TIER in entry.attributes and "tracekv.source" in entry.attributes:
            # Only what moved has a tier: two of the four sources tell of it.
            tiers = len(self.words(metric, TIER) or ())
            bound = bound // (4 * tiers) * (2 * tiers + 2)
        return bound * (len(self.bounds(metric)) + 3) if entry.instrument == "histogram" else bound


@cache
def registry() -> Registry:
    """The file that ships with this version."""
    return msgspec.yaml.decode(files("tracekv.views").joinpath("registry.yaml").read_bytes(), type=Registry)


def total_series_bound(*, ranks: int, layer_groups: int) -> int:
    """The most series that an endpoint can have, ``target_info`` included."""
    known = registry()
    return 1 + sum(known.series_bound(name, ranks=ranks, layer_groups=layer_groups) for name in known.metrics)


def prometheus_name(metric: str) -> str:
    """A metric's name on a Prometheus endpoint, as OpenTelemetry's mapping gives it; a histogram's suffixes come on top."""
    entry = registry().metrics[metric]
    parts = [prometheus_label(metric)]
    if entry.unit in _UNIT_WORDS:
        parts.append(_UNIT_WORDS[entry.unit])
    elif entry.unit == "1" and entry.instrument == "gauge":
        parts.append("ratio")
    if entry.instrument == "counter":
        parts.append("total")
    return "_".join(parts)


def prometheus_label(attribute: str) -> str:
    """An attribute's name on a Prometheus endpoint."""
    return attribute.replace(".", "_")


def bounds_ns(metric: str) -> tuple[int, ...]:
    """Upper bounds of a histogram of seconds, in nanoseconds."""
    return tuple(round(bound * 1e9) for bound in registry().bounds(metric))

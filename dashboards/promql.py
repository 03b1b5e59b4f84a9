"""PromQL over tracekv's metrics: every name, label and word is looked up in the registry, so that a query can't name what isn't there.

The dashboards' variables are in each selector: job and instance always, rank and layer group where the metric has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tracekv.views import names
from tracekv.views.registry import prometheus_label, prometheus_name, registry

#: A window that fits the resolution of a graph.
STEP = "$__rate_interval"
#: All of the time that a dashboard shows.
SHOWN = "$__range"

_VARIABLES = {names.RANK: "$rank", names.GROUP: "$layer_group"}


def series(metric: str, suffix: str = "", **where: str) -> str:
    """A selector.

    Args:
        metric: Name in the registry.
        suffix: ``_bucket``, ``_sum`` or ``_count`` of a histogram.
        where: Label without its ``tracekv_`` -> a word, several with ``|`` between them, none of them with ``!`` before them.

    Raises:
        KeyError: No such metric.
        ValueError: The metric hasn't that label, or the label not that word.
    """
    labels = {prometheus_label(attribute): attribute for attribute in registry().metrics[metric].attributes}
    matchers = ['job=~"$job"', 'instance=~"$instance"']
    for label, attribute in labels.items():
        variable = _VARIABLES.get(attribute)
        if variable is not None and label.removeprefix("tracekv_") not in where:
            matchers.append(f'{label}=~"{variable}"')
    for key, words in where.items():
        label = f"tracekv_{key}"
        if label not in labels:
            raise ValueError(f"{metric} has no label {label}; it has {', '.join(labels)}")
        _check_words(metric, labels[label], words.removeprefix("!"))
        matchers.append(f'{label}{_operator(words)}"{words.removeprefix("!")}"')
    return f"{prometheus_name(metric)}{suffix}{{{', '.join(matchers)}}}"


def rate(metric: str, by: Sequence[str] = (), window: str = STEP, suffix: str = "", **where: str) -> str:
    """How much a counter grows in a second, added up by labels."""
    return f"sum{_by(metric, by)} (rate({series(metric, suffix, **where)}[{window}]))"


def events(metric: str, by: Sequence[str] = (), window: str = SHOWN, **where: str) -> str:
    """How often something rare has happened in a window.

    A series begins with its first event, at 1 and not at 0, so that ``increase`` alone would never see that one: a series that
    wasn't there a window ago counts as a whole.
    """
    counter = series(metric, **where)
    return f"sum{_by(metric, by)} (({counter} unless {counter} offset {window}) or increase({counter}[{window}]))"


def now(metric: str, by: Sequence[str] = (), how: str = "max", **where: str) -> str:
    """A gauge as it is, the highest (``how``: or ``sum``, ``min``) by labels."""
    return f"{how}{_by(metric, by)} ({series(metric, **where)})"


def quantile(q: float, metric: str, by: Sequence[str] = (), **where: str) -> str:
    """A quantile of a histogram; nothing, rather than NaN, where nothing was counted."""
    labels = ", ".join(["le", *(f"tracekv_{key}" for key in by)])
    return f"histogram_quantile({q:g}, sum by ({labels}) (rate({series(metric, '_bucket', **where)}[{STEP}]))) >= 0"


def ratio(part: str, whole: str) -> str:
    """A quotient; nothing, rather than 0 or NaN, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str) -> str:
    """As :func:`ratio`, of parts whose series are only there once there was one: 0 where the whole is there without them."""
    return ratio(f"({part} or 0 * {whole})", whole)


def mean(metric: str, by: Sequence[str] = (), **where: str) -> str:
    """The mean of a histogram."""
    return ratio(rate(metric, by, suffix="_sum", **where), rate(metric, by, suffix="_count", **where))


def zero_if_watched(query: str) -> str:
    """0 where the query has no series but journals are being read: what was looked for and not found. Nothing where nobody looks."""
    return f"{query} or on () (0 * sum({series(names.METRIC_PROCESSES)} > 0))"


def metrics_in(query: str) -> list[str]:
    """The metrics that a query reads, as the endpoint names them, sorted; ``ALERTS`` is Prometheus' own."""
    return sorted(set(re.findall(r"\b(?:tracekv_[a-z_]+(?=\{|\[)|ALERTS)", query)))


def _by(metric: str, keys: Sequence[str]) -> str:
    if not keys:
        return ""
    labels = [f"tracekv_{key}" for key in keys]
    known = {"job", "instance", *(prometheus_label(attribute) for attribute in registry().metrics[metric].attributes)}
    for label in labels:
        if label not in known:
            raise ValueError(f"{metric} can't be added up by {label}")
    return f" by ({', '.join(labels)})"


def _operator(words: str) -> str:
    is_pattern = "|" in words or words.startswith("$")
    return {(False, False): "=", (False, True): "=~", (True, False): "!=", (True, True): "!~"}[
        words.startswith("!"), is_pattern
    ]


def _check_words(metric: str, attribute: str, words: str) -> None:
    known = registry().words(metric, attribute)
    if known is None or words.startswith("$"):
        return
    for word in words.split("|"):
        if word not in known:
            raise ValueError(f"{attribute} of {metric} is never {word!r}; it is one of {', '.join(known)}")

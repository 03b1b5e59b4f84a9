"""The shapes that most panels have: a counter by the second, a gauge as it is, the percentiles of a histogram.

Unit and legend follow from the metric and from the labels that it is added up by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, Unpack

from dashboards.panels import Panel, Query, Traces
from dashboards.promql import STEP, now, quantile, rate
from dashboards.units import unit_of


class Told(TypedDict):
    """What a panel says of itself, its title aside; see :class:`Panel`."""

    question: str
    answer: str


class Look(Told, total=False):
    """... and how it looks."""

    kind: Literal["graph", "stack", "stat", "states"]
    width: int
    height: int
    absent: str
    limits: tuple[float, float]
    most: float
    words: dict[str, tuple[str, str]]
    traces: Traces


def per_second(
    title: str,
    metric: str,
    by: Sequence[str] = (),
    legend: str | None = None,
    *,
    where: Mapping[str, str] | None = None,
    window: str = STEP,
    suffix: str = "",
    **look: Unpack[Look],
) -> Panel:
    """How much a counter grows in a second, a line for each word of ``by``."""
    query = Query(rate(metric, by, window, suffix, **(where or {})), legend_of(by) if legend is None else legend)
    return Panel(title=title, queries=[query], unit=unit_of(metric, "a second"), **look)


def at_present(
    title: str,
    metric: str,
    by: Sequence[str] = (),
    legend: str | None = None,
    *,
    how: Literal["max", "sum"] = "max",
    **look: Unpack[Look],
) -> Panel:
    """A gauge as it is."""
    query = Query(now(metric, by, how), legend_of(by) if legend is None else legend)
    return Panel(title=title, queries=[query], unit=unit_of(metric), **look)


def percentiles(
    title: str, metric: str, quantiles: Sequence[float], by: Sequence[str] = (), **look: Unpack[Look]
) -> Panel:
    """Quantiles (0 to 1) of a histogram, as lines that are called p50 and so on."""
    queries = [Query(quantile(q, metric, by), f"p{q * 100:g} {legend_of(by)}".rstrip()) for q in quantiles]
    return Panel(title=title, queries=queries, unit=unit_of(metric), **look)


def legend_of(by: Sequence[str]) -> str:
    """The words of a line's labels, one after the other."""
    return " ".join(f"{{{{tracekv_{label}}}}}" for label in by)

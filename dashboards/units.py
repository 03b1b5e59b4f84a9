"""UCUM to what Grafana shows: a metric's unit is in the registry, a panel's unit follows from it and from what the query does."""

from __future__ import annotations

from typing import Literal

from tracekv.views.registry import registry

#: A share of something, 0 to 1.
SHARE = "percentunit"

_NOW = {"By": "bytes", "By/s": "binBps", "s": "s", "1": SHARE}
#: Of a second: bytes become bandwidth, seconds a share of the time.
_A_SECOND = {"By": "binBps", "s": SHARE}


def unit_of(metric: str, form: Literal["now", "a second"] = "now") -> str:
    """Grafana's unit for a metric's values, or for how much they grow in a second.

    A count of things (``{page}``) has no unit of Grafana's own; of a second it is told with the thing's name.
    """
    unit = registry().metrics[metric].unit
    if form == "now":
        return _NOW.get(unit, "short")
    return _A_SECOND.get(unit) or f"suffix: {_plural(unit.strip('{}'))}/s"


def _plural(thing: str) -> str:
    if thing.endswith("y"):
        return f"{thing[:-1]}ies"
    return f"{thing}es" if thing.endswith("ss") else f"{thing}s"

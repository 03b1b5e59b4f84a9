"""Durations, sizes and counts as a person reads them."""

from __future__ import annotations

_TIMES = (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000))
_SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def duration(ns: float) -> str:
    """Three digits and a unit: ``12.3 ms``."""
    return _shown(ns, _TIMES, "ns")


def size(nbytes: float) -> str:
    """Three digits and a unit: ``12.3 GiB``."""
    return _shown(nbytes, _SIZES, "B")


def plural(count: int, word: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _shown(value: float, units: tuple[tuple[str, int], ...], least: str) -> str:
    for unit, factor in units:
        if value >= factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{value:.0f} {least}"


def _digits(value: float) -> str:
    # A thousand KiB are no MiB yet, and there is nothing above seconds.
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"

"""Two runs side by side: what each came to per request, per pass or per call, and what changed most.

Runs of different lengths compare by rates: tokens as shares of the prompt tokens, bytes and stalls per request, misses as shares of
the lookups, callbacks as the mean of a call and calls per pass. A change weighs by how large it is in proportion, and by how much of
its kind the thing makes up: a callback that takes a thousandth of the time may double without being what matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Literal

import msgspec

from tracekv.journal.vocabulary import Direction
from tracekv.views.summary import GroupSummary, Summary

#: What an engine calls once: it differs from start to start, and matters for no request.
_ONCE = frozenset(
    f"{side}.{name}"
    for side in ("scheduler", "worker")
    for name in (
        "__init__", "shutdown", "wait_for_initialization", "register_kv_caches", "register_kv_cache_layout",
        "register_forward_pass_callable",
    )
)  # fmt: skip
_OF_ONCE = 0.01

Unit = Literal["share", "bytes", "ns", "count"]


class Change(msgspec.Struct):
    """One number of both runs.

    Attributes:
        kind: ``tokens``, ``bytes``, ``misses``, ``stalls``, ``callbacks``, ``calls``, ``drops`` or ``store``.
        a, b: Per what ``per`` says; None where the run has nothing to count by.
        weight: Its part of its kind, at most 1.
    """

    kind: str
    name: str
    unit: Unit
    per: str
    a: float | None
    b: float | None
    weight: float

    @property
    def proportion(self) -> float:
        """How large the change is beside the larger number: 0 for none or where a run doesn't tell, 1 where one run has none of it."""
        if (self.a is None or self.b is None) and self.kind != "callbacks":
            return 0.0
        a, b = self.a or 0.0, self.b or 0.0
        return min(1.0, abs(b - a) / max(abs(a), abs(b))) if a != b else 0.0

    @property
    def score(self) -> float:
        """What changes are ordered by, 0 to 1."""
        return self.proportion * sqrt(min(1.0, abs(self.weight)))

    @property
    def factor(self) -> float | None:
        """How many times as much as in A; None where A has nothing."""
        return self.b / self.a if self.a and self.b is not None else None


def changes(a: Summary, b: Summary) -> list[Change]:
    """Every number of two runs, what changed most first."""
    found = [
        *_tokens(a, b), *_bytes(a, b), *_stalls(a, b), *_callbacks(a, b),
        *_shares("misses", "lookup", a.misses, b.misses, a.lookups, b.lookups),
        *_per("drops", "pass", a.drops, b.drops, a.steps, b.steps),
        *_per("store", "pass", a.store_outcomes, b.store_outcomes, a.steps, b.steps),
        *_per("store", "hit", _asked(a), _asked(b), a.hits, b.hits),
    ]  # fmt: skip
    return sorted(found, key=lambda change: (-change.score, change.kind, change.name))


def _asked(summary: Summary) -> dict[str, int]:
    return {f"{name} requests": count for name, count in summary.store_requests.items()}


def _rate(value: float | None, by: float) -> float | None:
    return value / by if by and value is not None else None


def _honoured(run: Summary) -> int | None:
    """None where the runtime never told what it took."""
    return None if run.untold_allocations and not run.honoured_tokens else run.honoured_tokens


def _computed(run: Summary) -> int | None:
    honoured = _honoured(run)
    return None if honoured is None else max(0, run.prompt_tokens - run.computed_tokens - honoured)


def _tokens(a: Summary, b: Summary) -> Iterator[Change]:
    def share(name: str, of_a: int | None, of_b: int | None) -> Change:
        in_a, in_b = _rate(of_a, a.prompt_tokens), _rate(of_b, b.prompt_tokens)
        return Change("tokens", name, "share", "prompt token", in_a, in_b, max(abs(in_a or 0.0), abs(in_b or 0.0)))

    yield share("on the device", a.computed_tokens, b.computed_tokens)
    yield share("offered", a.offered_tokens, b.offered_tokens)
    yield share("honoured", _honoured(a), _honoured(b))
    yield share("computed", _computed(a), _computed(b))
    yield Change(
        "tokens",
        "prompt",
        "count",
        "request",
        _rate(a.prompt_tokens, a.queries),
        _rate(b.prompt_tokens, b.queries),
        1.0,
    )


def _bytes(a: Summary, b: Summary) -> Iterator[Change]:
    for way in Direction:
        totals = [_total(run, way) for run in (a, b)]
        for group in sorted(a.layer_groups.keys() | b.layer_groups.keys()):
            moved = [run.layer_groups.get(group, GroupSummary(group)).nbytes(way) for run in (a, b)]
            if any(moved):
                name = f"{way.value}, layer group {group}"
                yield Change(
                    "bytes",
                    name,
                    "bytes",
                    "request",
                    _rate(moved[0], a.queries),
                    _rate(moved[1], b.queries),
                    _part(moved, totals),
                )


def _total(run: Summary, way: Direction) -> int:
    return run.loaded_bytes if way is Direction.LOAD else run.saved_bytes


def _stalls(a: Summary, b: Summary) -> Iterator[Change]:
    every = [sum(g.stall_ns(Direction.LOAD) for g in run.layer_groups.values()) for run in (a, b)]
    for group in sorted(a.layer_groups.keys() | b.layer_groups.keys()):
        stalls = [run.layer_groups.get(group, GroupSummary(group)).stall_ns(Direction.LOAD) for run in (a, b)]
        if any(stalls):
            rates = _rate(stalls[0], a.queries), _rate(stalls[1], b.queries)
            yield Change("stalls", f"layer group {group}", "ns", "request", *rates, _part(stalls, every))


def _callbacks(a: Summary, b: Summary) -> Iterator[Change]:
    every = [sum(each.durations.total_ns for each in run.callbacks.values()) for run in (a, b)]
    for name in sorted(a.callbacks.keys() | b.callbacks.keys()):
        of = [run.callbacks.get(name) for run in (a, b)]
        totals = [each.durations.total_ns if each else 0 for each in of]
        calls = [each.durations.calls if each else 0 for each in of]
        weight = _part(totals, every) * (_OF_ONCE if name in _ONCE else 1.0)
        yield Change("callbacks", name, "ns", "call", _rate(totals[0], calls[0]), _rate(totals[1], calls[1]), weight)
        yield Change("calls", name, "count", "pass", _rate(calls[0], a.steps), _rate(calls[1], b.steps), weight)


def _shares(kind: str, per: str, a: Mapping[str, int], b: Mapping[str, int], by_a: int, by_b: int) -> Iterator[Change]:
    for name in sorted(a.keys() | b.keys()):
        rates = _rate(a.get(name, 0), by_a), _rate(b.get(name, 0), by_b)
        yield Change(kind, name, "share", per, *rates, max(rate or 0.0 for rate in rates))


def _per(kind: str, per: str, a: Mapping[str, int], b: Mapping[str, int], by_a: int, by_b: int) -> Iterator[Change]:
    for name in sorted(a.keys() | b.keys()):
        counts = [a.get(name, 0), b.get(name, 0)]
        weight = _part(counts, [sum(a.values()), sum(b.values())])
        yield Change(kind, name, "count", per, _rate(counts[0], by_a), _rate(counts[1], by_b), weight)


def _part(values: list[int], totals: list[int]) -> float:
    return max(value / total if total else 0.0 for value, total in zip(values, totals, strict=True))

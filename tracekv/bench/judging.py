"""What the rules cost the agent: time per record, by how many requests decode at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import thread_time_ns

import msgspec

from tracekv.bench import page
from tracekv.bench.rounds import Spread, interleave
from tracekv.bench.traffic import busy
from tracekv.rules import RULES, Checker
from tracekv.testing.corpus.tape import Tape

#: Requests that decode at once.
DECODING = (1, 16, 64, 256)
#: More passes than the longest request of :func:`~tracekv.bench.traffic.busy` takes, so that requests come and go.
PASSES = 600


class Row(msgspec.Struct):
    """Processor time with so many decoding requests; medians, and ``spread`` as ``[low, high]``."""

    decoding: int
    records: int
    us_per_record: float
    records_per_s: float
    spread: list[float]


class JudgingCost(msgspec.Struct):
    """Interleaved rounds, in each of which every journal was judged once, by all rules."""

    rules: int
    passes: int
    rounds: int
    rows: list[Row]


def measure(rounds: int = 9, passes: int = PASSES) -> JudgingCost:
    """Judge journals of busy engines in which nothing is wrong.

    Raises:
        RuntimeError: Something was found, or a rule failed: then something else was measured.
    """
    tapes = {str(decoding): busy(passes, decoding=decoding) for decoding in DECODING}
    # The records' own memory is the benchmark's: in an agent they are gone once they are judged.
    gc.collect()
    gc.freeze()
    try:
        results = interleave({name: _judged(tape) for name, tape in tapes.items()}, rounds)
    finally:
        gc.unfreeze()
    rows = []
    for name, tape in tapes.items():
        spread = Spread.of(results[name])
        rows.append(Row(int(name), len(tape.records), spread.median, 1e6 / spread.median, [spread.low, spread.high]))
    return JudgingCost(len(RULES), passes, rounds, rows)


def _judged(tape: Tape) -> Callable[[], float]:
    def judge() -> float:
        checker = Checker()
        feed = checker.feed
        gc.collect()
        started = thread_time_ns()
        for source, record in tape.records:
            feed(source, record)
        took = thread_time_ns() - started
        if checker.findings or checker.removed:
            raise RuntimeError(f"tracekv: the rules found or lost something: {[*checker.counts, *checker.removed]}")
        return took / 1000 / len(tape.records)

    return judge


def body(cost: JudgingCost) -> str:
    """The part of the page."""
    rows = [
        (
            row.decoding,
            f"{row.us_per_record:.2f}",
            f"[{row.spread[0]:.2f}, {row.spread[1]:.2f}]",
            "<= 5",
            f"{row.records_per_s:,.0f}",
            f"{row.records / cost.passes:.1f}",
        )
        for row in cost.rows
    ]
    headings = (
        "decoding requests",
        "µs of processor per record",
        "range",
        "goal",
        "records per second",
        "records a pass",
    )
    what = (
        f"{cost.rounds} rounds. All {cost.rules} rules over {cost.passes} passes of 61 layers with hooks; prompts of 2048 tokens come "
        "in two chunks, are loaded and saved, generate 200 tokens and go. Decoding the records is not in it."
    )
    return f"{page.machine('msgspec')}. {what}\n\n{page.table(headings, rows)}"

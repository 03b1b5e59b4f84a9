"""A corpus of broken connectors, each with the rule that has to name it, and clean runs of which nothing may be named.

``run_corpus()`` plays all of it and says what the rules found, missed and named falsely.
"""

from __future__ import annotations

from typing import Any

from tracekv.journal.records import Record
from tracekv.rules import Checker, Finding, Limits
from tracekv.testing.corpus import clean, metadata, offers, pages, pairing, sharing, two_ranks
from tracekv.testing.corpus.stage import record
from tracekv.testing.corpus.table import CLEAN, FAULTS, Fault, Play

__all__ = ["CLEAN", "FAULTS", "LIMITS", "Fault", "judge", "play", "record", "run_corpus", "verdict"]

#: All plays are entered by their modules.
_MODULES = (clean, metadata, offers, pages, pairing, sharing, two_ranks)
#: Wide budgets of time, so that a busy machine is not taken for a fault: the plays about time overrun these too.
LIMITS = Limits(
    query_ns=1_000_000_000,
    get_finished_ns=1_000_000_000,
    noticed_ns=1_000_000_000,
    io_in_query_ns=50_000_000,
    recompute_floor_ns=1_000_000_000,
    skew_ns=1_000_000_000,
)


def judge(records: list[tuple[str, Record]]) -> list[Finding]:
    """What the rules find in these records, in order."""
    checker = Checker(limits=LIMITS)
    for source, each in records:
        checker.feed(source, each)
    checker.close()
    assert not checker.removed, f"a rule failed: {checker.removed}"
    return checker.findings


def verdict(fault: Fault, findings: list[Finding]) -> tuple[bool, list[str]]:
    """Whether the first finding names the fault, and the rules that were named falsely: not it, and not because of it."""
    own = {found.id for found in findings if found.rule == fault.rule}
    follows = {found.id: found.caused_by for found in findings}
    false = []
    for found in findings:
        cause: str | None = found.id
        while cause is not None and cause not in own:
            cause = follows.get(cause)
        if cause is None:
            false.append(found.rule)
    return bool(findings) and findings[0].rule == fault.rule, false


def play(what: Play) -> list[Finding]:
    """Play it and judge what was recorded."""
    return judge(record(what))


def run_corpus() -> dict[str, Any]:
    """Play every fault and every clean run.

    The process must trace nothing else meanwhile.

    Returns:
        ``faults`` how many; ``missed`` the ids of faults whose rule isn't named first; ``false`` ``id:rule`` for everything
        that is named and neither the fault nor its consequence, clean runs included.
    """
    missed: list[str] = []
    false: list[str] = []
    for fault in FAULTS.values():
        is_found, wrong = verdict(fault, play(fault.play))
        missed += [] if is_found else [fault.id]
        false += [f"{fault.id}:{rule}" for rule in wrong]
    for name, run in CLEAN.items():
        false += [f"{name}:{found.rule}" for found in play(run)]
    return {"faults": len(FAULTS), "missed": missed, "false": false}

"""Feeds records to the rules: keeps what they share, makes events of records, and findings of what they yield."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tracekv.journal.records import Record
from tracekv.journal.vocabulary import Callback
from tracekv.rules.catalogue import RULES
from tracekv.rules.model import Evidence, Finding, Hit, Limits, Rule
from tracekv.rules.plain import spared
from tracekv.rules.state import Recent, Run, Source
from tracekv.rules.tracker import Tracker

_log = logging.getLogger("tracekv")

#: Findings that are kept, and as a default those of one rule in one run; more are counted.
MOST_FINDINGS = 10_000
MOST_OF_A_RULE = 100


class Checker:
    """Judges the records of one or several processes. One thread at a time; never raises.

    After a gap nothing is concluded from what came before it. A rule that fails is removed, and that is said once.

    Args:
        limits: Where too much begins.
        on_finding: Called with each finding as it is made; what it raises is logged once.
        rules: Which rules; all by default.
        most_of_a_rule: Findings of one rule in one run that are made; further ones are only counted.
        again_after_ns: So long after the first of them, as many are made again; never by default. On the clock of the records.

    Attributes:
        findings: In order; the oldest go when there are too many.
        counts: ``rule id -> how often``, findings that were not kept included.
        removed: Ids of rules that failed, with the error.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        on_finding: Callable[[Finding], object] | None = None,
        rules: Iterable[type[Rule]] = RULES,
        most_of_a_rule: int = MOST_OF_A_RULE,
        again_after_ns: int | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._most_of_a_rule = most_of_a_rule
        self._again_after_ns = again_after_ns
        self._rules = [rule(self._limits) for rule in rules]
        self._found: deque[Finding] = deque(maxlen=MOST_FINDINGS)
        self._on_finding = on_finding
        self.counts: Counter[str] = Counter()
        self.removed: dict[str, str] = {}
        self._listeners: dict[str, list[tuple[Rule, Callable[[Any], Iterable[Hit]]]]] = {}
        for rule in self._rules:
            for name in dir(rule):
                if name.startswith("on_"):
                    self._listeners.setdefault(name[3:], []).append((rule, getattr(rule, name)))
        heard = {event: [rule.id for rule, _ in told] for event, told in self._listeners.items()}
        self._tracker = Tracker(self._limits, self._tell, spared(heard))
        self._takers = self._tracker.takers
        self._numbers: Counter[str] = Counter()
        #: By run and rule: how many there were, and when the first was.
        self._in_run: Recent[tuple[bytes, str], tuple[int, int]] = Recent(4096)
        self._about: Recent[tuple[bytes, int], list[Finding]] = Recent(4096)
        self._of_step: Recent[tuple[bytes, int], list[Finding]] = Recent(256)
        self._sequences: dict[str, int] = {}

    @property
    def findings(self) -> list[Finding]:
        """What was found, in order."""
        return list(self._found)

    def feed(self, source: str, record: Record, sequence: int | None = None) -> None:
        """Take a record.

        Args:
            source: Names the process; any text that is its own.
            record: Records of one process come in order.
            sequence: The record's number in its journal: then gaps are seen here, where they are. Without it, say
                :meth:`lost` before the first record after a gap.
        """
        if sequence is not None:
            expected = self._sequences.get(source, 0)
            self._sequences[source] = sequence + 1
            if sequence > expected:
                self.lost(source, sequence - expected)
        taker = self._takers.get(type(record))
        if taker is None:
            return
        try:
            taker(self._tracker.source(source), record)
        except Exception as error:
            self._fault(f"records of kind {type(record).__name__}", error)

    def lost(self, source: str, count: int) -> None:
        """``count`` records of a process were lost before the next one."""
        if count:
            self._tracker.lost(source)

    def tick(self, now_ns: int) -> None:
        """Time goes by without records; ``now_ns`` on the clock of the leaders' records."""
        try:
            self._tracker.tick(now_ns)
        except Exception as error:
            self._fault("time", error)

    def close(self) -> None:
        """There are no more records: judge what was waiting for some."""
        try:
            self._tracker.close()
        except Exception as error:
            self._fault("the end", error)

    # -- from events to findings ----------------------------------------------------------------------------------------

    def _tell(self, name: str, event: Any) -> None:
        removed = self.removed
        for rule, method in self._listeners.get(name, ()):
            if removed and rule.id in removed:
                continue
            try:
                for hit in method(event):
                    self._take(rule, event.run, event.source, hit)
            except Exception as error:
                self.removed[rule.id] = f"{type(error).__name__}: {error}"
                _log.warning(
                    "tracekv: the rule %s failed (%s) and is removed", rule.id, type(error).__name__, exc_info=error
                )

    def _take(self, rule: Rule, run: Run, source: Source, hit: Hit) -> None:
        known = self._about.get((run.key, hit.request)) if hit.request is not None else None
        if known and any(found.rule == rule.id for found in known):
            return
        at_ns = _began(hit.record)
        seen, since_ns = self._in_run.get((run.key, rule.id), (0, at_ns))
        if rule.once and seen:
            return
        if (
            seen >= self._most_of_a_rule
            and self._again_after_ns is not None
            and at_ns - since_ns >= self._again_after_ns
        ):
            seen, since_ns = 0, at_ns
        self._in_run[run.key, rule.id] = (seen + 1, since_ns)
        self.counts[rule.id] += 1
        if seen >= self._most_of_a_rule:
            return
        found = self._finding(rule, run, source, hit)
        if hit.request is not None:
            self._about[run.key, hit.request] = [*(known or ()), found]
        if found.step:
            self._of_step[run.key, found.step] = [*self._of_step.get((run.key, found.step), ()), found]
        self._found.append(found)
        if self._on_finding is not None:
            try:
                self._on_finding(found)
            except Exception as error:
                self._fault("what listens to findings", error)
                self._on_finding = None

    def _finding(self, rule: Rule, run: Run, source: Source, hit: Hit) -> Finding:
        self._numbers[rule.id] += 1
        parts = rule.parts()
        record = hit.record
        return Finding(
            id=f"{rule.id}#{self._numbers[rule.id]}",
            rule=rule.id,
            severity=rule.severity,
            by=rule.by,
            title=parts["Title"],
            fix=parts.get("Fix", ""),
            source=source.name,
            rank=source.rank,
            step=getattr(record, "step", 0),
            request=hit.request,
            callback=Callback(hit.callback).method if hit.callback in _CALLBACKS else "",
            at_ns=_began(record),
            numbers=hit.numbers,
            evidence=[Evidence(source.name, each) for each in hit.evidence],
            caused_by=self._cause(rule, run, hit),
        )

    def _cause(self, rule: Rule, run: Run, hit: Hit) -> str | None:
        candidates: Sequence[Finding] = [
            *(self._about.get((run.key, hit.request), ()) if hit.request is not None else ()),
            *self._of_step.get((run.key, getattr(hit.record, "step", 0)), ()),
        ]
        return next((found.id for found in candidates if found.rule in rule.follows), None)

    def _fault(self, what: str, error: Exception) -> None:
        if what not in self.removed:
            self.removed[what] = f"{type(error).__name__}: {error}"
            _log.warning("tracekv: the rules failed on %s (%s) and go on", what, type(error).__name__, exc_info=error)


def _began(record: Record) -> int:
    for name in ("started_ns", "first_started_ns", "at_ns"):
        value = getattr(record, name, None)
        if isinstance(value, int):
            return value
    return 0


_CALLBACKS = frozenset(int(callback) for callback in Callback)


class RuleView(Checker):
    """The checker as a view of the agent: the same methods, under the name that views go by."""

"""The contract's rules over the journals of a node: findings become records, which go the way of any record."""

from __future__ import annotations

from collections import defaultdict

from tracekv.journal import records
from tracekv.journal.records import Record
from tracekv.rules import Finding, RuleView

#: Of one process, not yet taken.
_MOST_WAITING = 256


class Rules:
    """One for all journals that are read together, since some rules compare ranks. One thread.

    Args, everywhere: ``source`` names a process, the same name for all of its records.
    """

    def __init__(self) -> None:
        self._found: defaultdict[str, list[records.Finding]] = defaultdict(list)
        self._view = RuleView(on_finding=self._keep)

    def feed(self, source: str, record: Record) -> list[records.Finding]:
        """Take a record; what is found about its process by now, each once."""
        self._view.feed(source, record)
        return self._found.pop(source, []) if self._found else []

    def lost(self, source: str, count: int) -> None:
        """``count`` records are missing before the next one: rules know nothing of them and stay silent."""
        self._view.lost(source, count)

    def tick(self, now_ns: int) -> None:
        """Time has passed: what waits too long is found."""
        self._view.tick(now_ns)

    def close(self) -> list[records.Finding]:
        """No more records come; what is left to be found, of every process."""
        self._view.close()
        left = [found for of_one in self._found.values() for found in of_one]
        self._found.clear()
        return left

    def _keep(self, finding: Finding) -> None:
        waiting = self._found[finding.source]
        if len(waiting) < _MOST_WAITING:
            waiting.append(as_record(finding))


def as_record(finding: Finding) -> records.Finding:
    """A finding as the record that views take."""
    return records.Finding(
        finding.at_ns,
        finding.rule,
        finding.severity.value,
        finding.callback or finding.by.value,
        finding.title,
        finding.request,
        finding.step,
        finding.caused_by.partition("#")[0] if finding.caused_by else None,
    )

"""The contract's rules over the journals of a node: findings become records, which go the way of any record."""

from __future__ import annotations

from tracekv.journal import records
from tracekv.journal.records import Record
from tracekv.rules import Finding, RuleView

#: Of one process, not yet taken.
_MOST_WAITING = 256
#: A rule that is broken on and on is told of a hundred times, and after so long again: an alert looks back for ten minutes.
_AGAIN_AFTER_NS = 300 * 1_000_000_000


class Rules:
    """One for all journals that are read together, since some rules compare ranks. One thread.

    Args, everywhere: ``source`` names a process, the same name for all of its records.
    """

    def __init__(self) -> None:
        #: By process, of those that are read: what its next record brings with it.
        self._found: dict[str, list[records.Finding]] = {}
        self._view = RuleView(on_finding=self._keep, again_after_ns=_AGAIN_AFTER_NS)

    def begins(self, source: str) -> None:
        """The process's records will come."""
        self._found[source] = []

    def ended(self, source: str) -> None:
        """No more of them will: what is found about it later is told to nobody."""
        self._found.pop(source, None)

    def feed(self, source: str, record: Record) -> list[records.Finding]:
        """Take a record; what is found about its process by now, each once."""
        self._view.feed(source, record)
        found = self._found[source]
        if found:
            self._found[source] = []
        return found

    def lost(self, source: str, count: int) -> None:
        """``count`` records are missing before the next one: rules know nothing of them and stay silent."""
        self._view.lost(source, count)

    def tick(self, now_ns: int) -> None:
        """Time has passed: what waits too long is found."""
        self._view.tick(now_ns)

    def _keep(self, finding: Finding) -> None:
        waiting = self._found.get(finding.source)
        if waiting is not None and len(waiting) < _MOST_WAITING:
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

"""What was found wrong, and what the watch of copies can't vouch for."""

from __future__ import annotations

from tracekv.journal.records.base import Record
from tracekv.journal.vocabulary import WatchGap


class Finding(Record, tag=50):
    """A rule was broken. Those about the engine's arguments and the connector's code (L2-L8) are written at bring-up; those of the
    contract are made by whoever reads, and go the way of any record through the views.

    Attributes:
        rule: Stable id of the rule.
        severity: ``violation`` or ``suspect``; at bring-up ``problem``, ``advice`` or ``note``.
        subject: The callback, argument or place that it is about.
        caused_by: Rule of the finding that it follows from.
    """

    at_ns: int
    rule: str
    severity: str
    subject: str
    what: str
    request_id: int | None = None
    step: int = 0
    caused_by: str | None = None


class WatchGapSeen(Record):
    """A way by which bytes may move unseen: how often it was taken, and the line (``file.py:12``) that took it first."""

    reason: WatchGap
    count: int
    where: str


class WatchReport(Record, tag=60):
    """How far the ``observed`` transfers of this process can be trusted from here on: at each step that moves bytes, at each new gap.

    Attributes:
        is_complete: No gap so far: every byte that moved was seen.
        gaps: Since the caches were registered. A gap stays: an address that was taken may be used at any time.
        last_slots: ``(layer group, page slot, times)``: the pool was indexed with a negative number, which gives this page.
            An index of -1 is a block without a page, read as another request's.
    """

    at_ns: int
    step: int
    is_complete: bool
    gaps: list[WatchGapSeen]
    last_slots: list[tuple[int, int, int]]

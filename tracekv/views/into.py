"""Where a report has the records of a process go: into its sums, and into its picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tracekv.journal.records import LayerHooks, Record
from tracekv.views.picture import Picture
from tracekv.views.runs import Segment
from tracekv.views.summary import SummaryView
from tracekv.views.timeline import Bar, Timeline


class Into(NamedTuple):
    """Where a process's records go.

    Attributes:
        begin, end: What lies outside is counted, and not drawn.
    """

    view: SummaryView
    timeline: Timeline
    picture: Picture
    begin: int
    end: int

    def take(self, bars: Iterable[Bar]) -> None:
        """Draw what lies within."""
        for bar in bars:
            if bar.end_ns >= self.begin and bar.start_ns <= self.end:
                self.picture.add(bar)

    def take_singly(self, record: Record) -> None:
        """Count a record, and draw its bars."""
        self.view.feed(record)
        self.take(self.timeline.feed(record))


def take_each(segment: Segment, into: Into) -> None:
    """All records of a process one by one; hooks together once they are too short to be seen."""
    view, timeline, picture = into.view, into.timeline, into.picture
    for record in segment.select():
        if type(record) is LayerHooks and picture.width_ns:
            blocks = timeline.hook_blocks(record)
            if all(block.last_ns - block.first_ns < picture.width_ns for block in blocks):
                view.feed(record)
                for block in blocks:
                    if block.last_ns >= into.begin and block.first_ns <= into.end:
                        picture.add_block(block)
                continue
        into.take_singly(record)

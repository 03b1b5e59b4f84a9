"""A process's part of a large run in bulk: the same numbers and the same bars' sums, without an object for each of its bars.

Once many bars lie within what is drawn as one, nobody looks at them one by one. So records are taken by lane and name: the times of
those that begin within one width go into one bar, and their durations straight into the summary's histograms. What is longer than a
width, what raised, and what is told otherwise than by a start and an end is taken one by one, as always.

Needs numpy, whose import takes longer than a small report: it is imported when a large one is made.
"""

from __future__ import annotations

from tracekv.views.bulk.calls import take_calls
from tracekv.views.bulk.hooks import take_hooks
from tracekv.views.bulk.moves import take_moves
from tracekv.views.bulk.requests import take_requests
from tracekv.views.into import Into
from tracekv.views.runs import Segment

__all__ = ["take_in_bulk"]


def take_in_bulk(segment: Segment, into: Into) -> None:
    """All records of a process; the requests that are still open at its end are not drawn."""
    take_calls(segment, into)
    take_hooks(segment, into)
    take_moves(segment, into)
    take_requests(segment, into)

"""What a large run tells of its requests, in order for their sake; what there is much of is drawn in bulk."""

from __future__ import annotations

from collections import defaultdict

from tracekv.journal.naming import KINDS
from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    FinishCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    QueryCall,
    Record,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import MissReason
from tracekv.views.bulk.drawing import take_alike
from tracekv.views.into import Into
from tracekv.views.runs import Segment
from tracekv.views.timeline import lane_of, lane_of_lookup

#: Kinds that :mod:`calls`, :mod:`hooks` and :mod:`moves` take.
_ELSEWHERE = (Call, BindCall, IdlePolls, LayerHooks, Transfer, StoreOperation)
_KINDS = tuple(kind for kind in KINDS if kind not in _ELSEWHERE)
#: Calls that are for requests, and frequent.
_CALLS = frozenset((BuildCall, QueryCall, AllocCall, FinishCall))


def take_requests(segment: Segment, into: Into) -> None:
    """The requests of a process, and all that isn't taken elsewhere."""
    view, timeline = into.view, into.timeline
    for records in segment.lists(*_KINDS, *((Transfer,) if timeline.facts.has_scheduler else ())):
        into.take(timeline.requests(records))
        calls: defaultdict[int, list[Record]] = defaultdict(list)
        lookups: defaultdict[MissReason | None, list[Record]] = defaultdict(list)
        for record in records:
            kind = type(record)
            if kind in _CALLS and record.error is None:
                calls[record.callback].append(record)
            elif kind is Lookup:
                lookups[record.reason].append(record)
            elif kind is not Transfer:
                view.feed(record)
                into.take(timeline.bars(record))
        for of_kind, lane in ((calls, lane_of), (lookups, lane_of_lookup)):
            for what, alike in of_kind.items():
                take_alike(*lane(what), alike, into)

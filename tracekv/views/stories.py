"""The stories of all requests of one journal, as the root spans tell them, without making spans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    CancelLoadCall,
    Drop,
    Enqueued,
    Finding,
    FinishCall,
    FinishedCall,
    Lookup,
    Prefetch,
    QueryCall,
    Record,
    RequestResetCall,
    Transfer,
)
from tracekv.views.story import Story


class _Open:
    __slots__ = ("lookups", "query_ended_ns", "story")

    def __init__(self, story: Story) -> None:
        self.story = story
        #: Lookups whose query isn't told yet: it is written when it returns.
        self.lookups: list[Lookup] = []
        self.query_ended_ns: int | None = None

    def take_lookups(self) -> None:
        for record in self.lookups:
            self.story.looked_up(record)
        self.lookups = []


class Stories:
    """Consumes the records of the process that has the scheduler; a story is given once it has ended.

    A story ends at ``request_finished``; where pages are kept, when ``get_finished`` gives them back; else at the close, or when
    too many are open, as abandoned. A request that goes on after its end has a further story.

    Args:
        max_open: Requests kept open; beyond it the one that was quiet for longest is ended.
    """

    def __init__(self, max_open: int = 4096) -> None:
        self._max_open = max_open
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._ended: OrderedDict[int, None] = OrderedDict()

    def feed(self, record: Record) -> list[Story]:
        """Take one record; the stories that it ends."""
        take = _TAKES.get(type(record))
        return take(self, record) if take is not None else []

    def feed_all(self, records: Iterable[Record]) -> list[Story]:
        """Take records in their order; the stories that they end."""
        ended: list[Story] = []
        passes: list[BuildCall] = []
        for record in records:
            if type(record) is BuildCall:
                # A run's passes are mostly of the same requests as the one before.
                if passes and not _are_alike(passes[0], record):
                    self._scheduled(passes)
                    passes = []
                passes.append(record)
                continue
            take = _TAKES.get(type(record))
            if take is not None:
                self._scheduled(passes)
                passes = []
                ended += take(self, record)
        self._scheduled(passes)
        return ended

    def lost(self, count: int) -> None:
        """``count`` records were overwritten unread."""
        for known in self._open.values():
            known.story.records_lost += count

    def close(self) -> list[Story]:
        """No more records come: the stories that are still open, as abandoned."""
        return [self._end(request_id, "abandoned", 0) for request_id in list(self._open)]

    def _queried(self, record: QueryCall) -> list[Story]:
        ended, known = self._of(record.request_id, record.started_ns)
        known.story.queried(record)
        known.query_ended_ns = record.ended_ns
        known.take_lookups()
        return ended

    def _allocated(self, record: AllocCall) -> list[Story]:
        ended, known = self._of(record.request_id, record.started_ns)
        known.story.allocated(record)
        return ended

    def _reset(self, record: RequestResetCall) -> list[Story]:
        ended, known = self._of(record.request_id, record.started_ns)
        known.story.reset(record)
        return ended

    def _cancelled(self, record: CancelLoadCall) -> list[Story]:
        return self._of(record.request_id, record.started_ns)[0]

    def _finished(self, record: FinishCall) -> list[Story]:
        request_id = record.request_id
        if request_id in self._ended and request_id not in self._open:
            return []  # announced twice (contract-v2.md section 4): the story has been told
        ended, known = self._of(request_id, record.started_ns)
        known.story.finished(record)
        if known.story.held_since_ns is None:
            ended.append(self._end(request_id, "finished", record.ended_ns))
        return ended

    def _looked_up(self, record: Lookup) -> list[Story]:
        ended: list[Story] = []
        known = self._open.get(record.request_id)
        if known is None:
            ended, known = self._of(record.request_id, record.started_ns)
        if known.query_ended_ns is None or record.ended_ns > known.query_ended_ns:
            known.take_lookups()
            known.lookups.append(record)
        else:
            known.lookups.append(record)
            known.take_lookups()
        return ended

    def _enqueued(self, record: Enqueued) -> list[Story]:
        ended, known = self._of(record.request_id, record.at_ns)
        known.story.enqueued(record)
        return ended

    def _moved(self, record: Transfer) -> list[Story]:
        known = self._open.get(record.request_id)
        if known is not None:
            known.story.transferred(record)
        return []

    def _built(self, record: BuildCall) -> list[Story]:
        self._scheduled([record])
        return []

    def _scheduled(self, passes: Sequence[BuildCall]) -> None:
        """Take passes that are alike."""
        if not passes:
            return
        opened = self._open
        tokens = (
            map(sum, zip(*[each.scheduled_tokens for each in passes], strict=True))
            if len(passes) > 1
            else passes[0].scheduled_tokens
        )
        for request_id, scheduled in zip(passes[0].request_ids, tokens, strict=False):
            known = opened.get(request_id)
            if known is not None:
                known.story.scheduled(passes, scheduled)
                opened.move_to_end(request_id)

    def _moment(self, record: Drop | Prefetch | Finding) -> list[Story]:
        known = None if record.request_id is None else self._open.get(record.request_id)
        if known is not None:
            match record:
                case Drop():
                    known.story.dropped(record)
                case Prefetch():
                    known.story.prefetched(record)
                case Finding():
                    known.story.found(record)
        return []

    def _polled(self, record: FinishedCall) -> list[Story]:
        ended = []
        for request_id in record.saving_returned:
            known = self._open.get(request_id)
            if known is not None and known.story.held_since_ns is not None:
                known.story.released(record.ended_ns)
                ended.append(self._end(request_id, "finished", record.ended_ns))
        return ended

    def _of(self, request_id: int, at_ns: int) -> tuple[list[Story], _Open]:
        known = self._open.get(request_id)
        if known is not None:
            self._open.move_to_end(request_id)
            return [], known
        ended = []
        while len(self._open) >= self._max_open:
            ended.append(self._end(next(iter(self._open)), "abandoned", 0))
        known = self._open[request_id] = _Open(Story(request_id, at_ns, at_ns))
        return ended, known

    def _end(self, request_id: int, outcome: str, at_ns: int) -> Story:
        known = self._open.pop(request_id)
        self._ended[request_id] = None
        self._ended.move_to_end(request_id)
        while len(self._ended) > self._max_open:
            self._ended.popitem(last=False)
        known.take_lookups()
        story = known.story
        story.outcome = outcome
        story.ended_ns = max(story.last_ns, at_ns)
        return story


def _are_alike(one: BuildCall, other: BuildCall) -> bool:
    return one.request_ids == other.request_ids and len(one.scheduled_tokens) == len(other.scheduled_tokens)


_TAKES: dict[type[Record], Callable[[Stories, Any], list[Story]]] = {
    QueryCall: Stories._queried,
    AllocCall: Stories._allocated,
    FinishCall: Stories._finished,
    RequestResetCall: Stories._reset,
    CancelLoadCall: Stories._cancelled,
    Transfer: Stories._moved,
    BuildCall: Stories._built,
    FinishedCall: Stories._polled,
    Lookup: Stories._looked_up,
    Enqueued: Stories._enqueued,
    **dict.fromkeys((Drop, Prefetch, Finding), Stories._moment),
}
#: What :class:`Stories` has to be fed of a journal.
KINDS = tuple(_TAKES)

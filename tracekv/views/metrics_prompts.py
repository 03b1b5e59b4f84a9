"""Prompts, counted when they are settled, so that a hit and what it is divided by move together; and how long they took."""

from __future__ import annotations

from collections import OrderedDict

from tracekv.journal.records import AllocCall, BuildCall, QueryCall, Transfer
from tracekv.journal.vocabulary import Direction
from tracekv.views import names
from tracekv.views.metrics_model import Key, Totals

#: Prompts that are remembered; beyond it the oldest is settled as it is.
MAX_PROMPTS = 4096

_PROMPTS: Key = (names.METRIC_PROMPTS,)
_QUERIED: Key = (names.METRIC_PROMPT_TOKENS_QUERIED,)
_COMPUTED: Key = (names.METRIC_PROMPT_TOKENS_COMPUTED,)
_OFFERED: Key = (names.METRIC_PROMPT_TOKENS_OFFERED,)
_HONOURED: Key = (names.METRIC_PROMPT_TOKENS_HONOURED,)
_MOVED: dict[Direction, Key] = {
    Direction.LOAD: (names.METRIC_PROMPT_TOKENS_LOADED,),
    Direction.SAVE: (names.METRIC_PROMPT_TOKENS_SAVED,),
}


class _Prompt:
    __slots__ = ("asked_ns", "counted", "has_pages", "honoured", "is_settled", "moved", "query")

    def __init__(self, query: QueryCall, asked_ns: int) -> None:
        self.query = query
        #: When the connector was first asked about it.
        self.asked_ns = asked_ns
        self.has_pages = False
        self.honoured = 0
        self.is_settled = False
        #: Tokens by direction and layer group, and what of them has been counted.
        self.moved: dict[Direction, dict[int, int]] = {}
        self.counted: dict[Direction, int] = {}


class PromptTokens:
    """The prompts of one scheduler process.

    A prompt is settled when the first pass beyond it is planned (all of it is computed or loaded, and in the usual case saved), when
    the request has ended, when it is queried again after it had got pages (a replay), or when it is the oldest of too many. A request
    that is asked about again without having got pages was blocked: its last query counts, once.

    Args:
        totals: Where tokens and times are added up.
    """

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._counts = totals.counts
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        #: Requests that have pages and aren't settled.
        self._computing: set[int] = set()

    def queried(self, record: QueryCall) -> None:
        """The connector was asked about a request."""
        asked_ns = record.started_ns
        before = self._prompts.pop(record.request_id, None)
        if before is not None and before.has_pages:
            self._settle(record.request_id, before)
        elif before is not None and not before.is_settled:
            asked_ns = before.asked_ns  # it was blocked, and waits since then
        elif len(self._prompts) >= MAX_PROMPTS:
            self._settle(*self._prompts.popitem(last=False))
        self._prompts[record.request_id] = _Prompt(record, asked_ns)

    def allocated(self, record: AllocCall) -> None:
        """A request got pages, and perhaps tells what was honoured."""
        prompt = self._prompts.get(record.request_id)
        if prompt is None or prompt.is_settled:
            return
        if not prompt.has_pages:
            self._totals.histogram(names.METRIC_PROMPT_WAIT).add(record.started_ns - prompt.asked_ns)
        prompt.has_pages = True
        prompt.honoured = prompt.query.offered_tokens if record.honoured_tokens is None else record.honoured_tokens
        self._computing.add(record.request_id)

    def scheduled(self, record: BuildCall) -> None:
        """A pass was planned."""
        if not self._computing:
            return
        for request_id in self._computing.intersection(record.request_ids):
            position = record.request_ids.index(request_id)
            if position < record.new_requests or position >= len(record.computed_positions):
                continue
            prompt = self._prompts[request_id]
            if record.computed_positions[position] >= (prompt.query.prompt_tokens or 0):
                self._settle(request_id, prompt, record.started_ns)

    def transferred(self, record: Transfer) -> None:
        """KV of a request moved, as its connector reported."""
        prompt = self._prompts.get(record.request_id)
        if prompt is None:
            return
        by_group = prompt.moved.setdefault(record.direction, {})
        by_group[record.layer_group] = by_group.get(record.layer_group, 0) + record.tokens
        if prompt.is_settled:
            self._count_moved(prompt)

    def finished(self, request_id: int, at_ns: int | None = None) -> None:
        """A request has ended, or is going to be replayed: then there is no time at which its prompt was done."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            self._settle(request_id, prompt, at_ns)

    def _settle(self, request_id: int, prompt: _Prompt, at_ns: int | None = None) -> None:
        self._computing.discard(request_id)
        if prompt.is_settled:
            return
        prompt.is_settled = True
        counts, query = self._counts, prompt.query
        counts[_PROMPTS] += 1
        # A connector may answer anything; a counter never falls.
        counts[_QUERIED] += max(0, query.prompt_tokens or 0)
        counts[_COMPUTED] += max(0, query.computed_tokens)
        counts[_OFFERED] += max(0, query.offered_tokens)
        counts[_HONOURED] += max(0, prompt.honoured)
        for key in _MOVED.values():
            counts[key] += 0
        self._count_moved(prompt)
        if at_ns is not None and prompt.has_pages:
            hit = "hit" if prompt.honoured > 0 else "miss"
            self._totals.histogram(names.METRIC_PROMPT_DURATION, hit).add(at_ns - prompt.asked_ns)

    def _count_moved(self, prompt: _Prompt) -> None:
        for direction, by_group in prompt.moved.items():
            # Each layer group holds its part of every token; what is saved of an answer is no prompt.
            tokens = max(by_group.values())
            if prompt.query.prompt_tokens is not None:
                tokens = min(tokens, prompt.query.prompt_tokens)
            fresh = tokens - prompt.counted.get(direction, 0)
            if fresh > 0:
                self._counts[_MOVED[direction]] += fresh
                prompt.counted[direction] = tokens

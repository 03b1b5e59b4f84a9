"""What a query may answer, and how often it is asked."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.rules.events import Alloc, Build, Query
from tracekv.rules.model import By, Hit, Rule, Severity


def _has_partial_blocks(event: Query) -> bool:
    return event.request.lookup is not None and event.request.lookup.has_partial_blocks


class OfferIsNoIntAndBool(Rule):
    """An offer is a tuple ``(int, bool)``.

    Contract: ``get_num_new_matched_tokens`` answers (tokens, is_async) (contract.md 1.2, 10 S1).
    Runtime: nothing is checked: None dies in the build with a TypeError, a float leaks into ``computed_position``, any truthy
        second value parks the request.
    Fix: answer ``int(tokens), bool(is_async)``; ``(0, False)`` for nothing.
    """

    id = "S1"
    follows = frozenset({"W10"})

    def on_query(self, event: Query) -> Iterator[Hit]:
        """One query."""
        if event.record.answer is not None:
            yield self.finding(event.record, types=event.record.answer)


class OfferIsNegative(Rule):
    """An offer is not negative.

    Contract: the number of further matched tokens (contract.md 10 S1).
    Runtime: V2 honours nothing; V1 takes it as it is and moves the position back; ``(-5, True)`` parks the request.
    Fix: answer ``max(0, end - num_computed_tokens)``: the device may hold more than you do.
    """

    id = "S1b"

    def on_query(self, event: Query) -> Iterator[Hit]:
        """One query."""
        if event.record.offered_tokens < 0:
            yield self.finding(event.record, offered=event.record.offered_tokens)


class OfferOfNothingIsAsync(Rule):
    """An offer of no tokens is not asynchronous.

    Contract: ``(0, True)`` is forbidden (contract.md 1.4 step 1).
    Runtime: RuntimeError on every rank; the server goes.
    Fix: answer ``tokens > 0 and is_async`` as the second value.
    """

    id = "S1c"

    def on_query(self, event: Query) -> Iterator[Hit]:
        """One query."""
        record = event.record
        if record.is_async and record.offered_tokens == 0 and record.answer is None:
            yield self.finding(record, offered=0)


class OfferPastPrompt(Rule):
    """An offer leaves at least one prompt token to compute.

    Contract: computed + offered <= prompt - 1 (contract.md 1.4 step 1; contract-v2.md 1.3).
    Runtime: V1 aborts; V2 clamps the offer, and what is loaded past it is lost.
    Fix: stop the lookup at ``(prompt_len - 1) // tokens_per_block`` blocks.
    """

    id = "S2"

    def on_query(self, event: Query) -> Iterator[Hit]:
        """One query."""
        record = event.record
        if record.prompt_tokens is not None and record.offered_tokens > 0:
            most = record.prompt_tokens - 1 - record.computed_tokens
            if record.offered_tokens > most:
                yield self.finding(record, offered=record.offered_tokens, most=most)


class OfferOfPartOfABlock(Rule):
    """An offer is whole blocks.

    Contract: not demanded; every connector read aligns down (contract.md 1.7, 10 S3). Silent where the connector reports that it
        has parts of blocks.
    Runtime: the offer is honoured unaligned: the last block is loaded in part and computed in part.
    Fix: round the offer down to ``tokens_per_block``; or, if you load parts of blocks on purpose, report
        ``tracekv.lookup(has_partial_blocks=True)`` in the query.
    """

    id = "S3"
    severity = Severity.SUSPECT
    follows = frozenset({"S1b", "S2"})

    def on_query(self, event: Query) -> Iterator[Hit]:
        """One query."""
        record, block = event.record, event.run.block
        if not block or record.offered_tokens <= 0 or _has_partial_blocks(event):
            return
        if record.offered_tokens % block and not record.computed_tokens % block:
            yield self.finding(record, offered=record.offered_tokens, tokens_per_block=block)


class OfferBehindPartOfABlock(Rule):
    """Where the device holds part of a block, nothing is offered.

    Contract: partial reuse on the device gives a ``num_computed_tokens`` inside a block (contract.md 1.7, 10 S3; V2 only). Silent
        where the connector reports that it has parts of blocks.
    Runtime: the load begins in the middle of a page that the request has a private copy of.
    Fix: answer ``(0, False)`` unless ``num_computed_tokens`` is a multiple of the block, or set ``enable_partial_reuse: false``;
        or, if you write that page on purpose, report ``tracekv.lookup(has_partial_blocks=True)`` in the query.
    """

    id = "S3b"
    severity = Severity.SUSPECT
    follows = frozenset({"S1b", "S2"})

    def on_query(self, event: Query) -> Iterator[Hit]:
        """One query."""
        record, block = event.record, event.run.block
        if block and record.offered_tokens > 0 and record.computed_tokens % block and not _has_partial_blocks(event):
            yield self.finding(record, computed=record.computed_tokens, tokens_per_block=block)


class AskedTwice(Rule):
    """A request is asked about once per allocation.

    Contract: the query comes once for each allocation of a request's pages; a replay, whose pages are gone, is asked again
        (the connector document; contract.md 10 S4).
    Runtime: it broke this itself: what the first answer pinned or started is promised twice.
    Fix: key what a query starts by the request's id and let a second query replace it; tell the runtime's authors.
    """

    id = "S4"
    by = By.RUNTIME

    def on_alloc(self, event: Alloc) -> Iterator[Hit]:
        """Pages were told after several queries."""
        request = event.request
        if request is not None and request.queries > 1:
            yield self.finding(event.record, request.query, queries=request.queries)

    def on_build(self, event: Build) -> Iterator[Hit]:
        """A request goes on with the pages it had, after another query."""
        for request in event.asked_again:
            yield self.finding(event.record, request.query, request=request.request_id, queries=2)

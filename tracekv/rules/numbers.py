"""Numbers of one connector that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.rules.events import Loaded, Moved, Query
from tracekv.rules.model import Hit, Rule, Severity
from tracekv.rules.promise import loaded_ranks

_ODD_OFFERS = frozenset({"S1", "S1b", "S1c", "S2", "S3", "S3b"})


class HitWithoutBytes(Rule):
    """A hit moves bytes.

    Contract: honoured tokens count as computed, whether or not they were loaded (contract.md 1.5, 9 item 10).
    Runtime: none; the model attends to whatever the pages held before, and the metrics say hit.
    Fix: never take a failed load for a finished one; verify the bytes before the offer. (Judged where a connector reports
        transfers: it has to report all of them.)
    """

    id = "N1"
    follows = frozenset({"W10", "S7", "S7d", "W2c", "W3", "L1b", "S8", "S2"})

    def on_loaded(self, event: Loaded) -> Iterator[Hit]:
        """A request's loads are told."""
        request, wanted = event.request, event.promised
        if wanted and any(wanted.values()) and not loaded_ranks(request) and request.alloc is not None:
            yield self.finding(
                request.alloc,
                request.query,
                request.first_build,
                honoured=request.honoured,
                pages={group: len(pages) for group, pages in wanted.items()},
            )


class NeverAHit(Rule):
    """What is saved is hit some time.

    Contract: a block counts only where every layer group has it (contract.md 8; anchors: "one layer group that bounds every hit
        to zero").
    Runtime: none; writing costs, and nothing comes of it.
    Fix: look at the layer group that is named: it isn't saved, or not under the key that is looked up; under a window its pages
        leave before a deferred save.
    """

    id = "N2"
    severity = Severity.SUSPECT
    once = True

    def on_lookup(self, event: Query) -> Iterator[Hit]:
        """A query with its lookup."""
        lookup, run = event.request.lookup, event.run
        if lookup is None or lookup.offered_tokens > 0 or lookup.bounding_layer_group is None:
            return
        if len(run.bounded) < self.limits.bounded_lookups or not run.saved_bytes:
            return
        yield self.finding(
            event.record, *list(run.bounded)[:4], request=event.request.request_id, layer_group=lookup.bounding_layer_group,
            lookups=len(run.bounded), saved_bytes=run.saved_bytes,
        )  # fmt: skip
        run.bounded.clear()


class AnswerIsNotTheLookup(Rule):
    """The answer is what the lookup reported.

    Contract: ``tracekv.lookup`` tells what is offered, the query answers it.
    Runtime: none; one of the two numbers in the metrics is wrong.
    Fix: report the number that is returned.
    """

    id = "N3"
    severity = Severity.SUSPECT
    follows = _ODD_OFFERS

    def on_lookup(self, event: Query) -> Iterator[Hit]:
        """A query with its lookup."""
        lookup, record = event.request.lookup, event.record
        if lookup is not None and record.answer is None and lookup.offered_tokens != record.offered_tokens:
            yield self.finding(record, lookup, answered=record.offered_tokens, reported=lookup.offered_tokens)


class OfferOfNothingStored(Rule):
    """An offer ends where the store does.

    Contract: what is offered and honoured counts as computed (contract.md 1.5).
    Runtime: none; there is nothing to load for the rest.
    Fix: offer the longest prefix that every layer group and rank holds.
    """

    id = "N4"
    follows = _ODD_OFFERS | {"N3"}

    def on_lookup(self, event: Query) -> Iterator[Hit]:
        """A query with its lookup."""
        lookup, record = event.request.lookup, event.record
        if lookup is None or record.answer is not None or record.offered_tokens <= 0:
            return
        if record.computed_tokens + record.offered_tokens > lookup.stored_tokens:
            yield self.finding(
                record,
                lookup,
                offered_end=record.computed_tokens + record.offered_tokens,
                stored_end=lookup.stored_tokens,
            )


class LoadedUnhonoured(Rule):
    """Nothing is loaded past what was honoured.

    Contract: the runtime may honour less than offered; the rest is computed (contract.md 1.7; contract-v2.md 1.3).
    Runtime: none; bytes are moved for nothing, and race the computing where the load isn't ordered before it.
    Fix: read ``py_num_connector_matched_tokens`` in the alloc callback, and load so much.
    """

    id = "N5"
    severity = Severity.SUSPECT
    follows = _ODD_OFFERS | {"S8"}

    def on_load(self, event: Moved) -> Iterator[Hit]:
        """A load."""
        record, request, block = event.record, event.request, event.run.block
        if request is None or not request.is_whole or not block:
            return
        if request.honoured is None or request.honoured < 0 or request.is_async:
            return
        slots = request.pages[record.layer_group] if record.layer_group < len(request.pages) else []
        begin, end = request.computed // block, event.run.blocks(request.computed + request.honoured)
        if slots[begin:end] == record.pages:  # the rule, and cheap
            return
        beyond = [page for page in {*slots[end:]}.intersection(record.pages) if page >= 0]
        if beyond:
            yield self.finding(
                record, request.alloc, pages=len(beyond), honoured=request.honoured, offered=request.offered
            )

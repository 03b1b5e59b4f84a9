"""Time that a connector takes from the engine. All of these are limits, so all of them are suspects."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.rules.events import Idled, Loaded, Moved, Polled, Query, Returned, Start
from tracekv.rules.model import Hit, Rule, Severity

#: The share of a query that its store operations take at least.
_FILLS = 0.8


class IoInQuery(Rule):
    """A query does no I/O.

    Contract: it is asked in the scheduling path; on V1 the radix tree's lock is held meanwhile (contract.md 1.4, 8).
    Runtime: every request of the pass waits for the store.
    Fix: look in memory; read ahead, and offer what is there when the request is asked about.
    """

    id = "P1"
    severity = Severity.SUSPECT

    def on_slow_query(self, event: Query) -> Iterator[Hit]:
        """A query, and the store operations that lie within it."""
        record = event.record
        took = record.ended_ns - record.started_ns
        if took < self.limits.io_in_query_ns:
            return
        inside = [
            each
            for each in event.source.operations
            if each.started_ns >= record.started_ns
            and each.ended_ns <= record.ended_ns
            and each.request_id in (None, record.request_id)
        ]
        # A background thread's operation may lie within by chance, but not fill it.
        io_ns = sum(each.ended_ns - each.started_ns for each in inside)
        if io_ns > took * _FILLS:
            yield self.finding(record, *inside[:8], took_ns=took, io_ns=io_ns, operations=len(inside))


class SlowQuery(Rule):
    """A query is short.

    Contract: as for I/O in the query (contract.md 10 S5).
    Runtime: every request of the pass waits.
    Fix: do less: digests of the whole prompt once, a lookup in a dictionary, no lock that a copy holds.
    """

    id = "S5"
    severity = Severity.SUSPECT
    follows = frozenset({"P1"})

    def on_slow_query(self, event: Query) -> Iterator[Hit]:
        """A query."""
        took = event.record.ended_ns - event.record.started_ns
        if took > self.limits.query_ns:
            yield self.finding(event.record, took_ns=took, limit_ns=self.limits.query_ns)


class SlowPoll(Rule):
    """``get_finished`` is short.

    Contract: it comes in every pass, and every rank's answer is gathered (contract.md 1.4 step 10, 10 W5).
    Runtime: every rank waits for the slowest; after 300 s the hang detector ends the job.
    Fix: look at what is done, never wait for it.
    """

    id = "W5"
    severity = Severity.SUSPECT

    def on_polled(self, event: Polled) -> Iterator[Hit]:
        """A poll with ids."""
        record = event.record
        took = record.ended_ns - record.started_ns
        if took > self.limits.get_finished_ns:
            named = [*record.saving_given, *record.loading_given, *record.saving_returned, *record.loading_returned]
            request = named[0] if len(set(named)) == 1 else None
            yield self.finding(record, request=request, took_ns=took, limit_ns=self.limits.get_finished_ns)

    def on_idled(self, event: Idled) -> Iterator[Hit]:
        """Polls without any: a connector that waits in them holds the other ranks up all the same."""
        record = event.record
        yield self.finding(
            record,
            callback=Callback.GET_FINISHED,
            took_ns=record.max_ns,
            polls=record.count,
            limit_ns=self.limits.get_finished_ns,
        )


class QueuedLoad(Rule):
    """Loads don't wait for one another.

    Contract: none; a request's first token waits for its load (anchors: "loads queued behind each other").
    Runtime: every request of the pass waits for the last load.
    Fix: load requests side by side, and what is needed first, first.
    """

    id = "P2"
    severity = Severity.SUSPECT

    def on_load(self, event: Moved) -> Iterator[Hit]:
        """A load."""
        record = event.record
        if record.queued_ns <= self.limits.queued_ns:
            return
        work = max(
            record.ended_ns - record.started_ns - record.queued_ns, record.read_ns + record.verify_ns + record.copy_ns
        )
        if record.queued_ns > work:
            yield self.finding(record, queued_ns=record.queued_ns, work_ns=work)


class NoticedLate(Rule):
    """A load that is done is named in the next poll.

    Contract: ``get_finished`` is the only way to tell (contract.md 1.6).
    Runtime: the request stays parked until it is told.
    Fix: look at completed transfers in each poll, not on a timer or in another callback.
    """

    id = "P3"
    severity = Severity.SUSPECT
    follows = frozenset({"W4", "W6", "W5"})

    def on_returned(self, event: Returned) -> Iterator[Hit]:
        """A load's id."""
        request = event.request
        if request is None or event.kind != "loading" or event.fate != "ok" or not request.is_whole:
            return
        loads: list[Transfer] = [
            each for teller, each in request.transfers if teller is event.source and each.direction is Direction.LOAD
        ]
        if not loads:
            return
        late_ns = event.record.started_ns - max(each.ended_ns for each in loads)
        if late_ns > self.limits.noticed_ns:
            yield self.finding(event.record, loads[-1], request=event.request_id, late_ns=late_ns)


class SlowerThanComputing(Rule):
    """A load takes no longer than computing the same tokens.

    Contract: none; this engine's own prefill passes say what computing costs.
    Runtime: requests are answered later than without a connector.
    Fix: offer less where the store is slow: what is in memory, or nothing.
    """

    id = "P4"
    severity = Severity.SUSPECT
    follows = frozenset({"P2", "P3", "W4", "W6", "W6b", "W10", "S5", "P1"})

    def on_start(self, event: Start) -> Iterator[Hit]:
        """The loads of a pass."""
        record, tokens = event.record, event.loaded_tokens
        waited = record.ended_ns - record.started_ns
        if tokens and self._is_slow(event.run.prefill_ns_per_token, waited, tokens):
            computing = round(event.run.prefill_ns_per_token * tokens)
            yield self.finding(record, waited_ns=waited, tokens=tokens, computing_ns=computing)

    def on_loaded(self, event: Loaded) -> Iterator[Hit]:
        """A request that was parked."""
        request = event.request
        tokens = request.honoured or 0
        waited = request.returned_ns - request.parked_ns
        if not request.is_async or not request.returned_ns or tokens <= 0 or request.alloc is None:
            return
        if self._is_slow(event.run.prefill_ns_per_token, waited, tokens):
            yield self.finding(
                request.alloc, request.query, waited_ns=waited, tokens=tokens,
                computing_ns=round(event.run.prefill_ns_per_token * tokens),
            )  # fmt: skip

    def _is_slow(self, ns_per_token: float, waited_ns: int, tokens: int) -> bool:
        computing = ns_per_token * tokens
        return bool(computing) and waited_ns > max(
            computing * self.limits.recompute_factor, self.limits.recompute_floor_ns
        )

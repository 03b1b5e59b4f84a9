"""Whether what is promised at a request's end, or when it is parked, is told in the end, once, by every rank."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.journal.records import Record
from tracekv.journal.vocabulary import Direction
from tracekv.rules.events import Finish, Polled, Returned, Settled, Time
from tracekv.rules.model import By, Hit, Rule, Severity


def _record(value: object) -> Record | None:
    return value if isinstance(value, Record) else None


class SwappedLists(Rule):
    """``get_finished`` returns (finished saving, finished loading), in that order.

    Contract: the order of its arguments (contract.md 1.1, 10 W3).
    Runtime: KeyError outside of any handler: the event loop dies.
    Fix: return ``(saved, loaded)``.
    """

    id = "W3c"
    follows = frozenset({"W3d"})

    def on_returned(self, event: Returned) -> Iterator[Hit]:
        """An id."""
        if event.fate == "swapped":
            yield self.finding(event.record, _record(event.before), request=event.request_id, returned_as=event.kind)


class ReturnedTwice(Rule):
    """An id is returned once.

    Contract: an id that was returned is no longer pending, whether or not other ranks have returned it (contract.md 1.5, 10 W3;
        contract-v2.md 11, 8).
    Runtime: KeyError outside of any handler: the event loop dies, and ids before it in the list are lost.
    Fix: forget an id when it is returned.
    """

    id = "W3b"
    follows = frozenset({"S13c"})

    def on_returned(self, event: Returned) -> Iterator[Hit]:
        """An id."""
        if event.fate == "twice":
            yield self.finding(event.record, _record(event.before), request=event.request_id, returned_as=event.kind)


class ReturnedUnasked(Rule):
    """Only ids that were given are returned.

    Contract: ids come as arguments of ``get_finished`` and go back once (contract.md 1.5, 10 W3).
    Runtime: KeyError outside of any handler: the event loop dies. A late completion of an aborted request ends here too.
    Fix: keep the ids that were given, and return from among them only.
    """

    id = "W3"
    follows = frozenset({"W3c", "S13"})

    def on_returned(self, event: Returned) -> Iterator[Hit]:
        """An id."""
        if event.fate == "unknown" and not _was_refused(event):
            yield self.finding(event.record, request=event.request_id, returned_as=event.kind)


def _was_refused(event: Returned) -> bool:
    request = event.request
    return (
        event.kind == "saving" and request is not None and request.finish is not None and not request.finish.keeps_pages
    )


class ReturnedThoughLeft(Rule):
    """A request whose end was answered with False is not returned.

    Contract: False frees the pages at once; only True asks for the id later (contract.md 10 S13).
    Runtime: KeyError outside of any handler: the event loop dies.
    Fix: answer True where a save is still to be told.
    """

    id = "S13"
    follows = frozenset({"S13d"})

    def on_returned(self, event: Returned) -> Iterator[Hit]:
        """An id."""
        if event.fate == "unknown" and _was_refused(event) and event.request is not None:
            yield self.finding(event.record, event.request.finish, request=event.request_id)


class OddPoll(Rule):
    """``get_finished`` returns two lists of ints.

    Contract: ``tuple[list[int], list[int]]`` (contract.md 1.1, 10 W3).
    Runtime: takes sets and tuples too.
    Fix: return lists.
    """

    id = "W3d"
    severity = Severity.SUSPECT
    once = True

    def on_polled(self, event: Polled) -> Iterator[Hit]:
        """A poll."""
        if event.record.answer is not None and event.record.answer.startswith("("):
            yield self.finding(event.record, types=event.record.answer)


class PollOfNoPair(Rule):
    """``get_finished`` returns a pair.

    Contract: ``tuple[list[int], list[int]]`` (contract.md 1.1, 10 W3).
    Runtime: TypeError or ValueError outside of any handler: the event loop dies.
    Fix: return ``([], [])`` for nothing.
    """

    id = "W3e"

    def on_polled(self, event: Polled) -> Iterator[Hit]:
        """A poll."""
        if event.record.answer is not None and not event.record.answer.startswith("("):
            yield self.finding(event.record, types=event.record.answer)


class KeptForNothing(Rule):
    """Pages are kept where there is something left to save.

    Contract: ``request_finished`` answers True to keep the pages until ``get_finished`` returns the id (contract.md 1.4 step 9,
        10 S13).
    Runtime: pages stay taken for a pass or more.
    Fix: answer False where nothing is under way.
    """

    id = "S13b"
    severity = Severity.SUSPECT
    follows = frozenset({"W3", "W3b", "W3c", "W4", "S13c", "S13e", "W10"})

    def on_left(self, event: Settled) -> Iterator[Hit]:
        """A request has gone."""
        request = event.request
        finish = request.finish
        if finish is None or not finish.keeps_pages or not event.run.tells_moves or not request.is_whole:
            return
        is_saved = any(
            each.direction is Direction.SAVE and each.ended_ns + teller.shift_ns >= finish.started_ns
            for teller, each in request.transfers
        )
        if not is_saved and request.request_id not in event.run.dropped:
            yield self.finding(finish)


class KeptTwice(Rule):
    """A request that is announced again is not kept.

    Contract: expect a second ``request_finished``, with empty lists (contract.md 1.8, 10 S13; contract-v2.md 4).
    Runtime: the overlap loop announces a request once more when a stop is seen late; True makes it wait for the id again.
    Fix: answer False for a request that you have forgotten, or that has no pages.
    """

    id = "S13c"

    def on_finish(self, event: Finish) -> Iterator[Hit]:
        """The end of a request."""
        if event.first is not None and event.record.keeps_pages and not any(event.record.pages):
            yield self.finding(event.record, event.first)


class OddEnd(Rule):
    """``request_finished`` returns a bool.

    Contract: ``-> bool`` (contract.md 1.2, 10 S13).
    Runtime: goes by truth: None frees the pages, an empty list too (contract-v2.md 11, 15).
    Fix: return True or False on every path.
    """

    id = "S13d"
    severity = Severity.SUSPECT
    once = True

    def on_finish(self, event: Finish) -> Iterator[Hit]:
        """The end of a request."""
        if event.record.answer is not None:
            yield self.finding(event.record, types=event.record.answer)


class RankLags(Rule):
    """Every rank returns an id at about the same time.

    Contract: an id completes when all ranks have returned it (contract.md 1.4 step 10, 10 W4).
    Runtime: no log, no time-out: the request is parked, or its pages are kept, for ever.
    Fix: look at the rank that is named: its transfer failed, was never started, or its id was lost with an exception.
    """

    id = "W4"
    severity = Severity.SUSPECT
    follows = frozenset({"W3", "W3b", "W3c", "W10", "S7c", "S7d"})

    def on_time(self, event: Time) -> Iterator[Hit]:
        """About once a second."""
        run = event.run
        for (kind, request_id), by_rank in run.completions.items():
            first, record = min(by_rank.values(), key=lambda each: each[0])
            if event.now_ns - first <= self.limits.skew_ns:
                continue
            lagging = [
                source.rank
                for source in run.sources
                if (source.rank or 0) not in by_rank and source.now_ns + source.shift_ns - first > self.limits.skew_ns
            ]
            if lagging:
                yield self.finding(record, request=request_id, kind=kind, returned_by=sorted(by_rank), missing=lagging)


class NeverReturned(Rule):
    """Pages that were kept are given back.

    Contract: True promises that ``get_finished`` returns the id (contract.md 10 S13).
    Runtime: no log, no time-out: the pages are pinned for ever.
    Fix: return the id when a save fails, too; put a time-out on every save.
    """

    id = "S13e"
    severity = Severity.SUSPECT
    follows = frozenset({"W4", "W3", "W3b", "W3c", "W10", "S13c"})

    def on_time(self, event: Time) -> Iterator[Hit]:
        """About once a second."""
        source = event.source
        for request_id, (given_ns, record) in source.saving.items():
            kept_ns = event.now_ns - given_ns - source.shift_ns
            if kept_ns > self.limits.kept_ns:
                request = event.run.requests.get(request_id)
                finish = request.finish if request is not None else None
                yield self.finding(record, finish, request=request_id, kept_ns=kept_ns)


class Starving(Rule):
    """A parked load moves on while nothing but ``get_finished`` is called.

    Contract: with parked requests only there is no batch, so no build, no bind and no ``start_load_kv`` (contract.md 1.6, 10 W6).
    Runtime: polls ``get_finished`` and waits, for ever.
    Fix: drive transfers from ``get_finished`` or from a thread.
    """

    id = "W6"
    severity = Severity.SUSPECT
    follows = frozenset({"W4", "W3", "W3c", "W10", "N1"})

    def on_time(self, event: Time) -> Iterator[Hit]:
        """About once a second."""
        run = event.run
        if not run.waiting or run.last_build is None or run.leader is None:
            return
        for request in run.waiting.values():
            since = max(request.parked_ns, run.last_build.ended_ns)
            # The leader's own records count, not the clock: what hangs doesn't starve.
            if run.leader.now_ns - since > self.limits.starved_ns:
                yield self.finding(
                    run.last_build, request.query, request.alloc, request=request.request_id,
                    starved_ns=run.leader.now_ns - since,
                )  # fmt: skip


class ParkedTooLong(Rule):
    """A parked request goes on before long.

    Contract: an asynchronous load ends, and its id is returned (contract.md 1.6, 9 item 4).
    Runtime: no log, no time-out outside of attention data parallelism.
    Fix: put a time-out on every load; when it is over, return the id only if the pages are filled, else raise.
    """

    id = "W6b"
    severity = Severity.SUSPECT
    follows = frozenset({"W4", "W6", "W3", "W3b", "W3c", "W10"})

    def on_time(self, event: Time) -> Iterator[Hit]:
        """About once a second."""
        for request in event.run.waiting.values():
            parked_ns = event.now_ns - request.parked_ns
            if parked_ns > self.limits.parked_ns and request.alloc is not None:
                yield self.finding(request.alloc, request.query, parked_ns=parked_ns)


class NeverAnnounced(Rule):
    """A request that was asked about ends with ``request_finished``.

    Contract: requests that are cancelled, or fail, are in general never announced (contract.md 1.8, 10 S14).
    Runtime: that is how it is.
    Fix: drop what you keep of a request that has been in no scheduler output for a while.
    """

    id = "S14"
    severity = Severity.SUSPECT
    by = By.RUNTIME
    follows = frozenset({"W10", "W4", "W6", "W6b"})

    def on_time(self, event: Time) -> Iterator[Hit]:
        """About once a second."""
        for request in list(event.run.requests.values()):
            silent_ns = event.now_ns - request.seen_ns
            if (
                silent_ns > self.limits.silent_ns
                and request.is_whole
                and not request.finishes
                and not request.is_parked
            ):
                if request.query is not None:
                    yield self.finding(request.query, silent_ns=silent_ns)
                event.run.drop(request.request_id)

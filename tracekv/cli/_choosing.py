"""Finds the request that somebody asks for, or chooses some."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tracekv.agent.paths import NoJournals
from tracekv.journal.records import AllocCall, Enqueued, FinishCall, FinishedCall, Lookup, QueryCall, Transfer
from tracekv.journal.scan import Scan
from tracekv.views import requests as rows
from tracekv.views.requests import RequestRow
from tracekv.views.runs import Run, runs_of

_NEAREST = 5
_LISTS = ("loading_given", "saving_given", "loading_returned", "saving_returned")


class Chosen(NamedTuple):
    """A request of a run, with its row where it was chosen by one. ``request_id`` None: the run itself, which broke a rule."""

    run: Run
    request_id: int | None
    row: RequestRow | None = None


class Chooser:
    """Finds requests in what was scanned.

    Args:
        scan: The journals.
        hashed: Name requests by their digests.

    Attributes:
        hashed: As given; True once a request was asked for by its digest.
        notes: What the person has to know of the journals themselves.
    """

    def __init__(self, scan: Scan, *, hashed: bool) -> None:
        self.scan = scan
        self.hashed = hashed
        self.notes = scan.notes

    def runs(self, label: str | None) -> list[Run]:
        """The runs of a label, or all; in the order of their starts.

        Raises:
            NoJournals: There is no such run.
        """
        found = runs_of(self.scan.processes)
        wanted = [run for run in found if label is None or run.label.startswith(label)]
        if not wanted:
            raise NoJournals(
                f"tracekv: there is no run {label}. Runs here: {', '.join(run.label for run in found[-8:])}"
            )
        return wanted

    def find(self, request: str, runs: Sequence[Run]) -> Chosen:
        """The request of a number or digest, in the last run that has it.

        Raises:
            NoJournals: There is none; the nearest are named.
        """
        found = [(run, request_id) for run in runs if (request_id := self._id_in(run, request)) is not None]
        if not found and request.isdecimal() and int(request) < 1 << 64:
            # Without a beginning or an end, it may be named by what is in between.
            found = [(run, int(request)) for run in runs if any(each.of_request(int(request)) for each in run.segments)]
        if not found:
            raise NoJournals(self._unknown(request, runs))
        if len(found) > 1:
            others = ", ".join(run.label for run, _ in found[:-1][-3:])
            self.notes.append(
                f"tracekv: {len(found)} runs have a request {request}, this is the last one's; --run names another: {others}"
            )
        return Chosen(*found[-1])

    def _id_in(self, run: Run, request: str) -> int | None:
        """The id of a request that begins or ends in a run, by its number or digest."""
        if request.isdecimal() and int(request) < 1 << 64:
            return (
                int(request)
                if any(each.names(int(request), QueryCall, Enqueued, FinishCall) for each in run.segments)
                else None
            )
        if len(request) == 16:
            for known in _known(run):
                if run.request_label(known, hashed=True) == request:
                    self.hashed = True  # asked for by its digest: named by it
                    return known
        return None

    def _unknown(self, request: str, runs: Sequence[Run]) -> str:
        known = {request_id for run in runs for request_id in _known(run)}
        if not known:
            return f"tracekv: there is no request {request}, nor any other: the records name none"
        if self.hashed:
            labels = [run.request_label(request_id, hashed=True) for run in runs for request_id in _known(run)]
            near = difflib.get_close_matches(request, labels, _NEAREST, 0.0)
        elif request.isdecimal():
            near = [str(each) for each in sorted(known, key=lambda each: (abs(each - int(request)), each))[:_NEAREST]]
        else:
            near = [str(each) for each in sorted(known)[-_NEAREST:]]
        lost = f"; {self.scan.lost:,} records were overwritten" if self.scan.lost else ""
        return (
            f"tracekv: there is no request {request} among the {len(known):,} here{lost}. The nearest: {', '.join(near)}. "
            "`tracekv explain --slowest 10` lists some"
        )

    def slowest(self, runs: Sequence[Run], most: int) -> list[Chosen]:
        """Those that waited longest for their KV."""
        return self._best(runs, lambda found: rows.slowest(found, most), lambda row: row.kv_ns, most)

    def missed(self, runs: Sequence[Run], most: int) -> list[Chosen]:
        """Those that computed most for want of a hit."""
        return self._best(runs, lambda found: rows.missed(found, most), lambda row: row.missed_tokens, most)

    def _best(
        self,
        runs: Sequence[Run],
        choose: Callable[[list[RequestRow]], list[RequestRow]],
        weight: Callable[[RequestRow], int],
        most: int,
    ) -> list[Chosen]:
        found = [(weight(row), run, row) for run in runs for row in choose(rows.rows_of(run))]
        found.sort(key=lambda each: -each[0])
        return [Chosen(run, row.request_id, row) for _, run, row in found[:most]]


def _known(run: Run) -> list[int]:
    """The requests that a run's records name, in the order in which they do first."""
    known: dict[int, None] = {}
    for segment in run.segments:
        for record in segment.select(Enqueued, QueryCall, AllocCall, Lookup, FinishCall, FinishedCall, Transfer):
            if isinstance(record, FinishedCall):
                known.update(dict.fromkeys(request_id for name in _LISTS for request_id in getattr(record, name)))
            else:
                known[record.request_id] = None  # type: ignore[attr-defined]  # each of these kinds has one
    return list(known)

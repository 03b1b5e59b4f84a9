"""Finds and chooses the requests that ``tracekv explain`` tells of, and tells of each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tracekv.agent.paths import NoJournals
from tracekv.cli._explain_screen import as_data, show
from tracekv.cli._judging import about, find_all, find_around, is_of_run, untold, violations
from tracekv.cli._opening import progress_bar
from tracekv.journal.records import AllocCall, Enqueued, FinishCall, FinishedCall, Lookup, QueryCall, Transfer
from tracekv.journal.scan import Scan
from tracekv.rules import Checker, Finding
from tracekv.views import requests as rows
from tracekv.views.amounts import duration, plural
from tracekv.views.explain import Broken, Explanation, explain
from tracekv.views.requests import RequestRow
from tracekv.views.runs import Run, runs_of
from tracekv.views.verdict import named, plain, root_cause

_NEAREST = 5
#: What tables show of a run's label; `--run` takes any beginning of it.
_SHORT = 8
_LISTS = ("loading_given", "saving_given", "loading_returned", "saving_returned")


class Chosen(NamedTuple):
    """A request of a run, with its row where it was chosen by one. ``request_id`` None: the run itself, which broke a rule."""

    run: Run
    request_id: int | None
    row: RequestRow | None = None


class Teller:
    """Answers about what was scanned.

    Args:
        scan: The journals.
        hashed: Name requests by their digests.
        trace_url: Where a trace is shown, with ``{trace_id}`` in it.

    Attributes:
        notes: What the person has to know of the journals themselves.
    """

    def __init__(self, scan: Scan, *, hashed: bool, trace_url: str) -> None:
        self._scan = scan
        self._hashed = hashed
        self._trace_url = trace_url
        self._checker: Checker | None = None
        self.notes = scan.notes

    def runs(self, label: str | None) -> list[Run]:
        """The runs of a label, or all; in the order of their starts.

        Raises:
            NoJournals: There is no such run.
        """
        found = runs_of(self._scan.processes)
        wanted = [run for run in found if label is None or run.label.startswith(label)]
        if not wanted:
            raise NoJournals(
                f"tracekv: there is no run {label}. Runs here: {', '.join(run.label for run in found[-8:])}"
            )
        return wanted

    # -- choosing -----------------------------------------------------------------------------------------------------

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
                    self._hashed = True  # asked for by its digest: named by it
                    return known
        return None

    def _unknown(self, request: str, runs: Sequence[Run]) -> str:
        known = {request_id for run in runs for request_id in _known(run)}
        if not known:
            return f"tracekv: there is no request {request}, nor any other: the records name none"
        if self._hashed:
            labels = [run.request_label(request_id, hashed=True) for run in runs for request_id in _known(run)]
            near = difflib.get_close_matches(request, labels, _NEAREST, 0.0)
        elif request.isdecimal():
            near = [str(each) for each in sorted(known, key=lambda each: (abs(each - int(request)), each))[:_NEAREST]]
        else:
            near = [str(each) for each in sorted(known)[-_NEAREST:]]
        lost = f"; {self._scan.lost:,} records were overwritten" if self._scan.lost else ""
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

    def violating(self, runs: Sequence[Run]) -> list[Chosen]:
        """Those that broke a rule, in the order of the findings; a run, where a finding is about no request."""
        found: dict[tuple[bytes, int | None], Chosen] = {}
        for each in self._all_findings():
            for run in runs:
                if is_of_run(each, run):
                    found.setdefault((run.key, each.request), Chosen(run, each.request))
        return list(found.values())

    def _all_findings(self) -> list[Finding]:
        if self._checker is None:
            total = self._scan.records
            with progress_bar("judging") as tell:
                checker = self._checker = find_all(self._scan.processes, progress=lambda done: tell(done, total))
            self.notes += [f"tracekv: the rule {rule} failed: {error}" for rule, error in checker.removed.items()]
            more = ", ".join(f"{count:,} of {rule}" for rule, count in untold(checker).items())
            if more:
                self.notes.append(f"tracekv: counted and not listed: {more}; `tracekv explain REQUEST` tells them too")
        return self._checker.findings

    # -- telling ------------------------------------------------------------------------------------------------------

    def tell(self, chosen: Chosen) -> Explanation:
        """One request."""
        run, request_id, _ = chosen
        assert request_id is not None
        told = explain(run, request_id, hashed=self._hashed)
        assert told is not None, "a request is chosen from records that name it"
        judged = self._checker
        findings = find_around(self._scan.processes, run, request_id) if judged is None else judged.findings
        told.broken = about(findings, run, told, hashed=self._hashed)
        if told.records_lost:
            told.notes.append(
                f"{told.records_lost:,} records of this run were overwritten: what they told is missing here"
            )
        return told

    def data(self, chosen: Chosen) -> dict[str, Any]:
        """As JSON holds it."""
        if chosen.request_id is None:
            return {
                "request": None,
                "run": chosen.run.label,
                "rules": [msgspec.to_builtins(each) for each in self._of_run(chosen.run)],
            }
        told = self.tell(chosen)
        return as_data(told, trace_url=self._url(told))

    def screen(self, console: Console, chosen: Chosen) -> None:
        """Print its screen."""
        if chosen.request_id is None:
            for each in self._of_run(chosen.run):
                console.print(
                    Text(named(each), "bold red" if each.severity == "violation" else "bold yellow"), soft_wrap=True
                )
                console.print(Text(f"-> {plain(each.fix)}"), soft_wrap=True)
        else:
            told = self.tell(chosen)
            show(console, told, trace_url=self._url(told))
        console.print()

    def _url(self, told: Explanation) -> str:
        return self._trace_url.replace("{trace_id}", told.trace_id)

    def _of_run(self, run: Run) -> list[Broken]:
        return about([each for each in self._all_findings() if each.request is None], run, None, hashed=self._hashed)

    def table(self, console: Console, chosen: Sequence[Chosen]) -> None:
        """Print a line each."""
        if self._checker is not None:
            self._rule_table(console, chosen)
            return
        if not chosen:
            console.print("no request is of that kind", markup=False)
            return
        several = len({each.run.key for each in chosen}) > 1
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for name in (
            "request",
            *(["run"] if several else []),
            "prompt",
            "device",
            "served",
            "KV time",
            "stall",
            "why not more",
        ):
            left = name in ("request", "run", "why not more")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for run, request_id, row in chosen:
            assert row is not None
            assert request_id is not None
            table.add_row(
                run.request_label(request_id, hashed=self._hashed), *([run.label[:_SHORT]] if several else []),
                "" if row.prompt_tokens is None else f"{row.prompt_tokens:,}", f"{row.computed_tokens:,}", f"{row.served_tokens:,}",
                duration(row.kv_ns), duration(row.stall_ns), row.miss_reason.value if row.miss_reason else "",
            )  # fmt: skip
        console.print(table)

    def _rule_table(self, console: Console, chosen: Sequence[Chosen]) -> None:
        assert self._checker is not None
        told = sum(each.request_id is not None for each in chosen)
        broken = {each: self._broken(each) for each in chosen}
        if not chosen:
            console.print(f"no rule was broken in {self._scan.records:,} records", markup=False)
            return
        first = root_cause([each for found in broken.values() for each in found])
        assert first is not None
        style = "bold red" if first.severity == "violation" else "bold yellow"
        console.print(Text(named(first), style), soft_wrap=True)
        proved = violations(self._checker)
        suspects = self._checker.counts.total() - proved
        console.print(
            f"{plural(proved, 'violation')} and {plural(suspects, 'suspect')}; {plural(told, 'request')} listed",
            markup=False,
        )
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        several = len({each.run.key for each in chosen}) > 1
        for name in ("request", *(["run"] if several else []), "rule", "sure", "what must hold"):
            table.add_column(name, no_wrap=name != "what must hold")
        for each, found in broken.items():
            label = "-" if each.request_id is None else each.run.request_label(each.request_id, hashed=self._hashed)
            for one in {(one.rule, one.severity, one.what): one for one in found}.values():
                cause = f" (from {one.caused_by})" if one.caused_by else ""
                table.add_row(
                    label,
                    *([each.run.label[:_SHORT]] if several else []),
                    one.rule,
                    one.severity,
                    plain(one.what) + cause,
                )
        console.print(table)

    def _broken(self, chosen: Chosen) -> list[Broken]:
        mine = [each for each in self._all_findings() if each.request == chosen.request_id]
        return about(
            mine, chosen.run, None, hashed=self._hashed, rules={each.id: each.rule for each in self._all_findings()}
        )


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

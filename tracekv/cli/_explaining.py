"""Tells of the requests that ``tracekv explain`` was asked for, and judges them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tracekv.cli._choosing import Chooser, Chosen
from tracekv.cli._explain_screen import as_data, show
from tracekv.cli._judging import about, find_all, find_around, is_of_run, untold, violations
from tracekv.cli._opening import progress_bar
from tracekv.journal.scan import Scan
from tracekv.rules import Checker, Finding
from tracekv.views.amounts import duration, plural
from tracekv.views.explain import Broken, Explanation, explain
from tracekv.views.runs import Run
from tracekv.views.verdict import named, plain, root_cause

#: What tables show of a run's label; `--run` takes any beginning of it.
_SHORT = 8


class Teller(Chooser):
    """Tells of requests in what was scanned, and which rules they broke.

    Args:
        scan, hashed: As of a chooser.
        trace_url: Where a trace is shown, with ``{trace_id}`` in it.
    """

    def __init__(self, scan: Scan, *, hashed: bool, trace_url: str) -> None:
        super().__init__(scan, hashed=hashed)
        self._trace_url = trace_url
        self._checker: Checker | None = None

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
            total = self.scan.records
            with progress_bar("judging") as tell:
                checker = self._checker = find_all(self.scan.processes, progress=lambda done: tell(done, total))
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
        told = explain(run, request_id, hashed=self.hashed)
        assert told is not None, "a request is chosen from records that name it"
        judged = self._checker
        findings = find_around(self.scan.processes, run, request_id) if judged is None else judged.findings
        told.broken = about(findings, run, told, hashed=self.hashed)
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
        return about([each for each in self._all_findings() if each.request is None], run, None, hashed=self.hashed)

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
                run.request_label(request_id, hashed=self.hashed), *([run.label[:_SHORT]] if several else []),
                "" if row.prompt_tokens is None else f"{row.prompt_tokens:,}", f"{row.computed_tokens:,}", f"{row.served_tokens:,}",
                duration(row.kv_ns), duration(row.stall_ns), row.miss_reason.value if row.miss_reason else "",
            )  # fmt: skip
        console.print(table)

    def _rule_table(self, console: Console, chosen: Sequence[Chosen]) -> None:
        assert self._checker is not None
        told = sum(each.request_id is not None for each in chosen)
        broken = {each: self._broken(each) for each in chosen}
        if not chosen:
            console.print(f"no rule was broken in {self.scan.records:,} records", markup=False)
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
            label = "-" if each.request_id is None else each.run.request_label(each.request_id, hashed=self.hashed)
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
            mine, chosen.run, None, hashed=self.hashed, rules={each.id: each.rule for each in self._all_findings()}
        )

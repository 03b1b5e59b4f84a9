"""What a traced connector recorded, for assertions in its author's tests.

.. code-block:: python

   with recorded() as run:
       executor = Executor(model, tracekv.trace(MyScheduler), tracekv.trace(MyWorker))
       ...
   assert run.nbytes(Direction.LOAD) == 4096
   run.assert_clean()
"""

from __future__ import annotations

import heapq
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tracekv import capture
from tracekv.journal.opening import open_journals
from tracekv.journal.records import Call, IdlePolls, Record, Transfer, WatchReport
from tracekv.journal.vocabulary import Callback, Direction, Source
from tracekv.rules import Checker, Finding, Limits, Severity
from tracekv.rules.offline import time_of

Kind = TypeVar("Kind", bound=Record)

#: Wide budgets of time, so that a busy machine is not taken for a fault.
PATIENT = Limits(query_ns=1_000_000_000, get_finished_ns=1_000_000_000, recompute_floor_ns=1_000_000_000)


@dataclass
class Recorded:
    """The records of one or several processes.

    Attributes:
        records: ``(source, record)``; those of one source are in order.
        lost: Records that were overwritten unread.
    """

    records: list[tuple[str, Record]] = field(default_factory=list)
    lost: int = 0

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The records of a kind."""
        return [record for _, record in self.records if isinstance(record, kind)]

    def calls(self) -> Counter[str]:
        """``"scheduler.NAME"`` / ``"worker.NAME"`` -> calls. Per-layer hooks are counted by pass, not here."""
        found: Counter[str] = Counter()
        for call in self.of(Call):
            callback = Callback(call.callback)
            found[f"{callback.side.value}.{callback.method}"] += 1
        found["worker.get_finished"] += sum(idle.count for idle in self.of(IdlePolls))
        return found

    def transfers(self, direction: Direction, source: Source | None = None) -> list[Transfer]:
        """What moved, and didn't fail; of one source of the number, or all."""
        return [
            moved
            for moved in self.of(Transfer)
            if moved.direction is direction and moved.error is None and source in (None, moved.source)
        ]

    def nbytes(self, direction: Direction, source: Source = Source.REPORTED) -> int:
        """Bytes that moved."""
        return sum(moved.nbytes for moved in self.transfers(direction, source))

    @property
    def is_watch_complete(self) -> bool:
        """The watch was on, and no byte can have moved unseen."""
        reports = self.of(WatchReport)
        return bool(reports) and all(report.is_complete for report in reports)

    def findings(self, limits: Limits = PATIENT) -> list[Finding]:
        """What the rules of the contract find in it."""
        checker = Checker(limits=limits)
        for source, record in self.records:
            checker.feed(source, record)
        checker.close()
        return checker.findings

    def assert_clean(self, *, suspects: bool = False) -> None:
        """No rule is broken; with ``suspects``, none is suspected to be either.

        Raises:
            AssertionError: It names each rule, where it was broken, and what to do. Or no callback was recorded, so that nothing
                can be said.
        """
        if not self.of(Call):
            raise AssertionError(
                "tracekv: no callback was recorded. Construct the traced classes (tracekv.trace) inside of recorded(), and give "
                "journal_of() the folder that TRACEKV_JOURNAL_DIR named."
            )
        found = [f for f in self.findings() if suspects or f.severity is Severity.VIOLATION]
        if found:
            raise AssertionError("\n".join(described(each) for each in found))


def described(finding: Finding) -> str:
    """A finding in one line."""
    where = f" at {finding.callback}" if finding.callback else ""
    whose = f" for request {finding.request}" if finding.request is not None else ""
    numbers = ", ".join(f"{name}={value}" for name, value in finding.numbers.items())
    cause = f" (caused by {finding.caused_by})" if finding.caused_by else ""
    return (
        f"{finding.rule} {finding.severity.value}{where}{whose}: {finding.title} [{numbers}]{cause} Fix: {finding.fix}"
    )


def journal_of(path: str | Path) -> Recorded:
    """What a ring file, an archive, or a directory of them holds: processes of one machine, told in the order of their clock.

    Raises:
        JournalFormatError: It holds something else.
        OSError: It can't be read.
    """
    found = Recorded()
    streams = []
    for number, reader in enumerate(open_journals(Path(path), patience_ns=0)):
        stream: list[tuple[int, int, str, Record]] = []
        streams.append(stream)
        now = cursor = 0
        while True:
            records, cursor, lost = reader.read(cursor)
            found.lost += lost
            if not records and not lost:
                break
            for record in records:
                now = max(now, time_of(record))
                stream.append((now, number, reader.path.name, record))
        reader.close()
    found.records = [(source, record) for _, _, source, record in heapq.merge(*streams, key=lambda each: each[:2])]
    return found


@contextmanager
def environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the time of a block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def recorded(**settings: str) -> Iterator[Recorded]:
    """Record what is traced inside the block; it is there when the block is left.

    The process traces nothing else meanwhile: its session ends before and after. ``settings`` are further ``TRACEKV_*``
    variables by their whole name.
    """
    found = Recorded()
    with tempfile.TemporaryDirectory(prefix="tracekv-recorded-") as folder:
        ours = {
            "TRACEKV_AGENT": "off",
            "TRACEKV_DETAIL": "full",
            "TRACEKV_BUDGET_PCT": "100",
            "TRACEKV_JOURNAL_DIR": folder,
            **settings,
        }
        with environ(ours):
            capture.shutdown()
            try:
                yield found
            finally:
                capture.shutdown()
                if Path(ours["TRACEKV_JOURNAL_DIR"]).is_dir():  # else nothing was traced
                    read = journal_of(ours["TRACEKV_JOURNAL_DIR"])
                    found.records, found.lost = read.records, read.lost

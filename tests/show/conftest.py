from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest

from tests.views.sample_run import EPOCH, the_run
from tracekv.journal.directory import SUFFIX
from tracekv.journal.process import describe_self
from tracekv.journal.records import ProcessStarted, Record
from tracekv.journal.ring import RingJournal

#: Writes the records of one process into a ring file below a folder; answers the folder.
Write = Callable[..., Path]


def write_journal(
    folder: Path,
    records: Iterable[Record],
    file_bytes: int = 1 << 20,
    *,
    process: str = "one",
    is_clock_set: bool = False,
) -> Path:
    """Write the records of one process into a ring file in a folder; answers the folder.

    Args:
        is_clock_set: The wall clock is set before the end, to now.
    """
    folder.mkdir(exist_ok=True)
    facts = msgspec.structs.replace(describe_self(), monotonic_ns=0, wall_ns=EPOCH, host="node-1", pid=4711)
    ring = RingJournal.create(folder / f"{process}{SUFFIX}", file_bytes, facts)
    for record in records:
        if not isinstance(record, ProcessStarted):
            ring.write(record)
    if is_clock_set:
        ring.at_step(1 << 62)
    ring.close()
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_one(records: Iterable[Record], name: str = "journals", *, process: str = "one") -> Path:
        return write_journal(tmp_path / name, records, process=process)

    return write_one


@pytest.fixture
def journals(write: Write) -> Path:
    """A folder with the sample run."""
    return write(the_run())


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "nowhere"))

"""Drive another connector, or another version of one, with recorded callbacks, without a model or a GPU, and compare.

Record with ``TRACEKV_RECORD=replay`` (:mod:`tracekv.capture.replay` says what is kept, and that no token is). A replay expands the
kept digests to pseudo tokens that keep the equalities, builds caches of the recorded geometry in host memory, and calls back in the
recorded order with the recorded pages; what was answered, reported and moved is read from the records of both sides.

What it can't tell: whether the KV is right (there is none), what a forward costs, and what the runtime would have done
differently after another answer (it keeps the recorded schedule).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tracekv import capture
from tracekv.connectors import Connector
from tracekv.contract import Runtime, UnknownRuntime, current_runtime, use_runtime
from tracekv.journal.current import current
from tracekv.journal.records import Record
from tracekv.testing import replay_compare as compare
from tracekv.testing.replay_caches import MOST_BYTES
from tracekv.testing.replay_driver import Driver, ReplayError
from tracekv.testing.replay_recording import NoRecording, read_recording
from tracekv.testing.replay_tokens import PseudoTokens

__all__ = ["NoRecording", "Replay", "replay"]

#: The replay's own session: nothing leaves the process, every byte is watched, nothing is left out.
_SETTINGS: Mapping[str, str] = {
    "TRACEKV_AGENT": "off",
    "TRACEKV_DETAIL": "economy",
    "TRACEKV_WATCH": "1",
    "TRACEKV_RECORD": "",
    "TRACEKV_BUDGET_PCT": "100",
    "TRACEKV_ENQUEUE_HOOK": "0",
}


class Replay(msgspec.Struct, kw_only=True):
    """What came of a replay.

    Attributes:
        recorded: Class name of the recorded scheduler, by life.
        seed: Of the pseudo tokens; the same seed gives the same tokens.
        lost: Records that are missing in the recording.
        has_shared_rows: The recorded caches were too large for this machine, so all page slots shared one row.
        differences: A sentence each; none of them is an error.
    """

    recorded: list[str]
    replayed: str
    seed: str
    lost: int
    has_shared_rows: bool
    requests: list[compare.RequestPair]
    callbacks: list[compare.CallbackPair]
    moved: list[compare.BytesPair]
    differences: list[str]
    errors: list[ReplayError]


def replay(
    paths: Iterable[Path], connector: Connector, *, seed: str | None = None, most_bytes: int = MOST_BYTES
) -> Replay:
    """Replay what journals hold against ``connector``; lives one after the other, each with a new pair.

    The process's own session of tracekv ends, and the next traced instance begins one anew.

    Args:
        paths: Journals or archives, or folders of them.
        seed: By default a new one, so that nothing is found that an earlier replay has stored.
        most_bytes: What the caches may take; larger ones share a row.

    Raises:
        NoRecording: The journals hold nothing to replay.
        JournalFormatError, OSError: A file is no journal, or can't be read.
    """
    recording = read_recording(paths)
    seed = os.urandom(8).hex() if seed is None else seed
    tokens = PseudoTokens(seed)
    for life in recording.lives:
        for prompt, end in life.look_ahead().prompts:
            tokens.learn(prompt, end)
    result = Replay(
        recorded=[life.connector for life in recording.lives],
        replayed=f"{connector.scheduler.__module__}.{connector.scheduler.__qualname__}",
        seed=seed,
        lost=recording.lost,
        has_shared_rows=False,
        requests=[],
        callbacks=[],
        moved=[],
        differences=[],
        errors=[],
    )
    theirs: list[Record] = []
    ours: list[Record] = []
    for number, life in enumerate(recording.lives, 1):
        driver = Driver(life, number, tokens, most_bytes)
        replayed = _drive(connector, driver)
        requests = compare.requests_of(number, life.records, replayed)
        moved = compare.bytes_of(life.records, replayed)
        result.requests += requests
        result.errors += driver.errors
        result.has_shared_rows |= driver.has_shared_rows
        result.differences += compare.differences_of(
            requests, moved, compare.kept_pages(life.records), compare.kept_pages(replayed)
        )
        theirs += life.records
        ours += replayed
    result.callbacks = compare.callbacks_of(theirs, ours)
    result.moved = compare.bytes_of(theirs, ours)
    return result


def _drive(connector: Connector, driver: Driver) -> list[Record]:
    records: list[Record] = []
    cursor = 0

    def read() -> None:
        nonlocal cursor
        while current.journal is not None:
            some, cursor, _ = current.journal.read(cursor)
            if not some:
                return
            records.extend(some)

    with _own_session(), _one_rank():
        driver.drive(connector, read)
        read()
    return records


@contextmanager
def _own_session() -> Iterator[None]:
    capture.shutdown()
    before = {name: os.environ.get(name) for name in (*_SETTINGS, "TRACEKV_JOURNAL_DIR", "TRACEKV_TRACE_FILE")}
    with tempfile.TemporaryDirectory(prefix="tracekv-replay-") as folder:
        os.environ.update(_SETTINGS)
        os.environ["TRACEKV_JOURNAL_DIR"] = folder
        os.environ.pop("TRACEKV_TRACE_FILE", None)
        try:
            yield
        finally:
            capture.shutdown()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def _one_rank() -> Iterator[None]:
    try:
        before: Runtime | None = current_runtime()
    except UnknownRuntime:
        before = None
    use_runtime(Runtime())
    try:
        yield
    finally:
        use_runtime(before)

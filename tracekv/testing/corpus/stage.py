"""Where faults are played: an engine on a small model, traced into a journal of the play's own."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import tracekv
from tracekv import capture
from tracekv.contract import use_runtime
from tracekv.journal.opening import open_journals
from tracekv.journal.records import Record
from tracekv.testing.corpus.correct import Follower, KeepingLeader, Leader
from tracekv.testing.corpus.tape import BLOCK, Tape

#: Three whole blocks and a rest.
PROMPT_TOKENS = 3 * BLOCK + 4
#: A fault that keeps a request for ever must not keep the play for ever.
_MOST_PASSES = 60
_ENVIRON = {"TRACEKV_AGENT": "off", "TRACEKV_DETAIL": "full", "TRACEKV_BUDGET_PCT": "100"}


class Stage:
    """Runs pairs, or takes records; what was recorded is in :attr:`records` when the play is over.

    Attributes:
        records: ``(source, record)``.
        errors: What came out of engines: the runtime would have ended there.
        store: The dictionary that the pairs of this play share.
    """

    def __init__(self) -> None:
        self.records: list[tuple[str, Record]] = []
        self.errors: list[Exception] = []
        self.store: dict[tuple[bytes, int], Any] = {}

    def prompt(self, seed: int = 0, count: int = PROMPT_TOKENS) -> list[int]:
        """Tokens."""
        return random.Random(seed).choices(range(2048), k=count)  # noqa: S311  # no secret

    def engine(self, leader: type = Leader, worker: type = Follower, **options: Any) -> Any:
        """An executor over a traced pair (and an empty device)."""
        from tracekv.harness import Executor

        preset: Literal["llama", "gemma3"] = options.pop("preset", "llama")
        return Executor(_model(preset), *self.traced(leader, worker), **{"num_blocks": 48, **options})

    def traced(self, leader: type, worker: type) -> tuple[Any, Any]:
        """The traced classes, over this play's dictionary."""
        bound = [
            type(cls.__name__, (cls,), {"store": self.store, "__module__": cls.__module__}) for cls in (leader, worker)
        ]
        return tracekv.trace(bound[0]), tracekv.trace(bound[1])

    def serve(self, engine: Any, *prompts: Sequence[int], new: int = 3, **more: Any) -> None:
        """Serve prompts together, for as many passes as a run may take."""
        try:
            for prompt in prompts:
                engine.submit(prompt, new, **more)
            for _ in range(_MOST_PASSES):
                if not engine.has_work:
                    break
                engine.step()
        except Exception as error:  # what the runtime would die of is what the play is about
            self.errors.append(error)

    def twice(self, leader: type = Leader, worker: type = Follower, **options: Any) -> None:
        """A prompt on one engine, then again on a second whose device is empty: there it comes from the dictionary."""
        for _ in range(2):
            self.serve(self.engine(leader, worker, **options), self.prompt())

    def play(self, tape: Tape) -> None:
        """Take records that were written by hand."""
        self.records += tape.records


@functools.cache
def _model(preset: Literal["llama", "gemma3"]) -> Any:
    from tracekv.harness import build_model

    return build_model(preset)


def record(play: Callable[[Stage], None]) -> list[tuple[str, Record]]:
    """Play, and return everything that was recorded, by source.

    The process must not trace anything meanwhile: its session is ended before and after.
    """
    with tempfile.TemporaryDirectory(prefix="tracekv-corpus-") as folder, _session(folder):
        stage = Stage()
        KeepingLeader.handed.clear()
        play(stage)
        capture.shutdown()
        found = list(stage.records)
        for reader in open_journals(Path(folder), patience_ns=0):
            cursor = 0
            while True:
                records, cursor, lost = reader.read(cursor)
                assert lost == 0, "a play is short"
                if not records:
                    break
                found += [(reader.path.name, each) for each in records]
            reader.close()
        return found


@contextmanager
def _session(folder: str) -> Iterator[None]:
    ours = {**_ENVIRON, "TRACEKV_JOURNAL_DIR": folder}
    before = {name: value for name, value in os.environ.items() if name.startswith("TRACEKV_")}
    for name in before:
        del os.environ[name]
    os.environ.update(ours)
    capture.shutdown()
    try:
        yield
    finally:
        capture.shutdown()
        use_runtime(None)
        for name in ours:
            os.environ.pop(name, None)
        os.environ.update(before)

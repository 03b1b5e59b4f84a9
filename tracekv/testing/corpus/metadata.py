"""Broken metadata."""

from __future__ import annotations

import threading
from typing import Any

from tracekv.testing.corpus.correct import Leader
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import fault
from tracekv.testing.corpus.tape import Tape


@fault("S7")
def sends_what_cannot_be_pickled(stage: Stage) -> None:
    """The metadata holds a lock: it works with one rank and ends the server with two."""

    class Locking(Leader):
        def build_connector_meta(self, scheduler_output: Any) -> object:
            return {"lock": threading.Lock(), **self.plan(scheduler_output)}

        def plan(self, scheduler_output: Any) -> Any:
            return super().build_connector_meta(scheduler_output)

    stage.twice(Locking)


@fault("S7b")
def sends_the_bytes_themselves(stage: Stage) -> None:
    """Five MB of payload travel in the metadata of each pass, through a broadcast that every rank waits for."""

    class Heavy(Leader):
        def build_connector_meta(self, scheduler_output: Any) -> object:
            plan: Any = super().build_connector_meta(scheduler_output)
            return {"payload": bytes(5 << 20), **plan}

    stage.serve(stage.engine(Heavy), stage.prompt())


@fault("S7c", "records")
def binds_different_metadata_on_two_ranks(stage: Stage) -> None:
    """Rank 1 binds other bytes than rank 0 in the same pass."""
    tape = Tape(ranks=2)
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 3, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4]])])
    tape.bind(0, digest=b"one")
    tape.bind(1, digest=b"two")
    stage.play(tape)


@fault("S7d", "records")
def binds_nothing_on_the_second_rank(stage: Stage) -> None:
    """Rank 1 binds empty bytes where the leader's metadata has content."""
    tape = Tape(ranks=2)
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 3, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4]])])
    tape.bind(0, digest=b"one")
    tape.bind(1, digest=b"none", nbytes=5)
    stage.play(tape)

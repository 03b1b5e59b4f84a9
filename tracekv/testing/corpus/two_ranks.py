"""Faults of one rank among two, played on two ranks: processes of their own, which all plays share."""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar

import tracekv
from tracekv.contract import current_runtime
from tracekv.journal.vocabulary import Operation, Outcome
from tracekv.testing.cells import VOCABULARY
from tracekv.testing.corpus import correct
from tracekv.testing.corpus.correct import Move
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import clean, fault
from tracekv.testing.journals import journal_of
from tracekv.testing.playing import model_options

_numbers = itertools.count()
#: Names the dictionary of a play, in the ranks' processes; it outlives an engine.
_VARIABLE = "CORPUS_STORE"
_STORES: dict[str, dict[tuple[bytes, int], Any]] = {}
#: Passes, and the pause between them: together more than the limit of what a rank may lag, on both ranks alike.
_PASSES, _PAUSE_S = 50, 0.05


@functools.cache
def _ranks() -> Any:
    from tracekv.harness.ranks import Ranks

    ranks = Ranks(2)
    atexit.register(ranks.close)
    return ranks


class _Sharing:
    """Both halves of a rank find the same dictionary: each rank has one of its own, as it has pages of its own."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        vars(self)["store"] = _STORES.setdefault(os.environ[_VARIABLE], {})


class Leader(_Sharing, correct.Leader):
    """Correct."""


class Follower(_Sharing, correct.Follower):
    """Correct."""


class ParkingLeader(_Sharing, correct.ParkingLeader):
    """Correct."""


class ParkingFollower(_Sharing, correct.ParkingFollower):
    """Correct."""


def _twice(
    stage: Stage,
    scheduler: type = Leader,
    worker: type = Follower,
    *,
    prompts: Sequence[Sequence[int]] = (),
    drive: Any = None,
    **options: Any,
) -> None:
    """Prompts on one engine, then again on a second whose device is empty; ``drive`` is told of the second one's requests."""
    from tracekv.harness.jobs import Prompt, RankJob

    prompts = prompts or [stage.prompt()]
    asked = [Prompt([token % VOCABULARY for token in prompt], 3) for prompt in prompts]
    number = next(_numbers)
    for driven in (None, drive):
        with tempfile.TemporaryDirectory(prefix="tracekv-corpus-ranks-") as folder:
            job = RankJob(
                rounds=[asked],
                model_options=model_options("llama"),
                executor_options={"num_blocks": 48, **options},
                scheduler=_named(scheduler),
                worker=_named(worker),
                traced=True,
                environ={
                    "TRACEKV_AGENT": "off",
                    "TRACEKV_DETAIL": "full",
                    "TRACEKV_BUDGET_PCT": "100",
                    "TRACEKV_JOURNAL_DIR": folder,
                    _VARIABLE: f"corpus-{number}",
                },
                drive=driven and _named(driven),
            )
            _ranks().run(job)
            found = journal_of(Path(folder))
            assert found.lost == 0, "a play is short"
            stage.records += found.records


def _named(what: Any) -> str:
    return f"{what.__module__}:{what.__qualname__}"


def _is_second() -> bool:
    return current_runtime().rank == 1


class Forgetful(Follower):
    """Rank 1 loads all but the last block."""

    def load(self, moves: Sequence[Move]) -> None:
        """One less, there."""
        super().load(moves[:-1] if _is_second() else moves)


class Late(Follower):
    """Rank 1 loads after its forward."""

    def start_load_kv(self, stream: Any) -> None:
        """Nothing, there."""
        if not _is_second():
            super().start_load_kv(stream)

    def wait_for_save(self, stream: Any) -> None:
        """What should have come before."""
        if _is_second():
            self.load(self.plan("loads"))
        super().wait_for_save(stream)


class Lagging(ParkingFollower):
    """Rank 1 keeps the ids of its loads to itself, until it is told."""

    is_told: ClassVar[bool] = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.kept: list[int] = []
        type(self).is_told = False

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[Any, Any]:
        """Rank 0's at once."""
        self.kept += started_loading_req_ids
        if _is_second() and not Lagging.is_told:
            return [], []
        kept, self.kept = self.kept, []
        return [], kept


def wait_and_tell(executor: Any, _requests: Sequence[Any]) -> None:
    """Let time go by, in the same passes on both ranks; without the end a runtime would wait for ever."""
    for _ in range(_PASSES):
        executor.step()
        time.sleep(_PAUSE_S)
    Lagging.is_told = True


class OneName(Follower):
    """Writes every block to an object whose name doesn't hold the rank."""

    def save(self, moves: Sequence[Move]) -> None:
        """As ever; and to a store, it says."""
        super().save(moves)
        for move in moves:
            tracekv.store_operation(
                Operation.PUT, Outcome.OK, "local", started_ns=perf_counter_ns(), nbytes=1, blocks=1,
                key=hashlib.sha256(move.key).digest()[:16], request_id=move.request_id, layer_group=move.layer_group,
                rank=current_runtime().rank,
            )  # fmt: skip


@fault("W2", "ranks")
def loads_all_but_the_last_block_on_one_rank(stage: Stage) -> None:
    """Rank 1 leaves out a block of its shard: half of the heads attend to whatever its page held."""
    _twice(stage, worker=Forgetful)


@fault("W2b", "ranks")
def loads_after_the_forward_on_one_rank(stage: Stage) -> None:
    """Rank 1 loads in wait_for_save: half of the heads have computed without it."""
    _twice(stage, worker=Late)


@fault("W4", "ranks")
def returns_an_id_on_one_rank_only(stage: Stage) -> None:
    """Rank 0 returns a load, rank 1 does not: the request stays parked, with no log."""
    _twice(stage, ParkingLeader, Lagging, drive=wait_and_tell)


@fault("S12b", "ranks")
def shares_between_ranks(stage: Stage) -> None:
    """Two ranks, each with its own heads, write to one object."""
    _twice(stage, worker=OneName)


@clean
def two_ranks(stage: Stage) -> None:
    """Two ranks, several prompts, pages handed on."""
    _twice(stage, prompts=[stage.prompt(seed, 32 * seed + 5) for seed in range(1, 8)], num_blocks=24, chunk_tokens=64)


@clean
def two_ranks_parked(stage: Stage) -> None:
    """The same with asynchronous loads."""
    _twice(
        stage, ParkingLeader, ParkingFollower,
        prompts=[stage.prompt(seed, 32 * seed + 5) for seed in range(1, 8)],
    )  # fmt: skip

"""Runs in which nothing is wrong: no rule may name anything."""

from __future__ import annotations

from typing import Any

from tracekv.testing.corpus.correct import (
    Follower,
    KeepingFollower,
    KeepingLeader,
    Leader,
    ParkingFollower,
    ParkingLeader,
)
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import clean
from tracekv.testing.corpus.tape import BLOCK


def _traffic(stage: Stage, leader: type = Leader, worker: type = Follower, **options: Any) -> None:
    """Cold, warm on an empty device, device reuse, a prompt of whole blocks, one below a block, several at once."""
    for _ in range(2):
        engine = stage.engine(leader, worker, **options)
        prompt = stage.prompt(1, 5 * BLOCK + 7)
        stage.serve(engine, prompt)
        stage.serve(engine, prompt, stage.prompt(2, 4 * BLOCK), stage.prompt(3, 9))
        stage.serve(engine, prompt[: 3 * BLOCK + 5] + stage.prompt(4, 40), new=BLOCK + 3)
        stage.serve(engine, prompt, cache_salt="tenant")
        stage.serve(engine, prompt, lora_task_id=7)
        engine.shutdown()
    if stage.errors:  # an engine that died early has nothing to be named
        raise stage.errors[0]


@clean
def flat_v1(stage: Stage) -> None:
    """One list of pages."""
    _traffic(stage, mode="v1")


@clean
def flat_v1_chunked(stage: Stage) -> None:
    """One list of pages, prompts in chunks."""
    _traffic(stage, mode="v1", chunk_tokens=64)


@clean
def one_group(stage: Stage) -> None:
    """One layer group."""
    _traffic(stage)


@clean
def one_group_chunked(stage: Stage) -> None:
    """One layer group, prompts in chunks."""
    _traffic(stage, chunk_tokens=64)


@clean
def two_groups(stage: Stage) -> None:
    """A sliding and a full layer group; the windows pass blocks while decoding."""
    _traffic(stage, preset="gemma3")


@clean
def two_groups_chunked(stage: Stage) -> None:
    """The same in chunks."""
    _traffic(stage, preset="gemma3", chunk_tokens=64)


@clean
def partial_reuse(stage: Stage) -> None:
    """The device supplies parts of blocks."""
    _traffic(stage, partial_reuse=True)


@clean
def few_pages(stage: Stage) -> None:
    """Pages change hands often."""
    _traffic(stage, num_blocks=16)


@clean
def kept_pages(stage: Stage) -> None:
    """Saves outlive their requests."""
    _traffic(stage, KeepingLeader, KeepingFollower)


@clean
def kept_pages_v1(stage: Stage) -> None:
    """The same on V1."""
    _traffic(stage, KeepingLeader, KeepingFollower, mode="v1")


@clean
def parked_loads(stage: Stage) -> None:
    """Asynchronous loads."""
    _traffic(stage, ParkingLeader, ParkingFollower)


@clean
def parked_loads_v1(stage: Stage) -> None:
    """The same on V1, in chunks."""
    _traffic(stage, ParkingLeader, ParkingFollower, mode="v1", chunk_tokens=64)


@clean
def dummies(stage: Stage) -> None:
    """What the runtime pads with, beside real requests: pages are told without a query."""
    for _ in range(2):
        engine = stage.engine()
        for number in range(8):
            stage.serve(engine, stage.prompt(number, 2 * BLOCK + 3))
            stage.serve(engine, stage.prompt(number + 10, BLOCK + 3), is_dummy=True)
        engine.shutdown()
    if stage.errors:
        raise stage.errors[0]


@clean
def silent(stage: Stage) -> None:
    """A connector that reports nothing: what can't be known is left alone."""

    class Quiet(Follower):
        def tell(self, *_: Any, **__: Any) -> None:
            pass

    _traffic(stage, worker=Quiet)

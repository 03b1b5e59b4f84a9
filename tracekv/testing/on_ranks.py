"""Plays the story of a cell on two ranks, processes of their own that live from cell to cell."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tracekv.contract import current_runtime
from tracekv.harness.jobs import RankJob, RanksFailed
from tracekv.harness.ranks import Ranks
from tracekv.testing import behind_fake, fake_trtllm
from tracekv.testing.cells import Cancel, Cell, Destroy, Move, NewEngine, Step, Submit
from tracekv.testing.journals import Recorded, journal_of
from tracekv.testing.playing import Answer, Played, llm_args_of, model_options, options_of
from tracekv.testing.tenants import of_its_tenant


class RanksBroke(RuntimeError):
    """A rank raised, died, or waits for another that doesn't come."""


class OnRanks:
    """Two ranks, started when they are first needed."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._refused: dict[tuple[object, ...], str] = {}

    def play(
        self,
        cell: Cell,
        pair: tuple[type, type],
        block: int,
        settings: Mapping[str, str],
        patience_s: float,
    ) -> tuple[Played, Recorded]:
        """The story, an engine after another; the tokens are those of rank 0, which all ranks have to agree on.

        Raises:
            NotImplementedError: The connector, or the cache, refuses to work with this cache or with two ranks.
            RanksBroke: A rank failed.
        """
        names = [_importable(cls) for cls in pair]
        cache = (*pair, cell.mode, cell.groups, cell.is_dealt_out)
        if cache in self._refused:  # to ask again costs two processes
            raise NotImplementedError(self._refused[cache])
        played, found = Played(), Recorded()
        for moves in _engines(cell):
            with tempfile.TemporaryDirectory(prefix="tracekv-ranks-") as folder:
                tracing = {
                    "TRACEKV_AGENT": "off",
                    "TRACEKV_DETAIL": "full",
                    "TRACEKV_BUDGET_PCT": "100",
                    "TRACEKV_JOURNAL_DIR": folder,
                }
                job = RankJob(
                    rounds=[[]],
                    preset=cell.preset,
                    model_options=model_options(cell.preset),
                    executor_options={**options_of(cell, block), "llm_args": llm_args_of(cell, block)},
                    scheduler=names[0],
                    worker=names[1],
                    traced=True,
                    environ={**settings, **tracing},
                    drive=f"{__name__}:{play_moves.__name__}",
                    script=(cell.name, moves, len(played.answers)),
                )
                try:
                    self._play_engine(cell, job, moves, played, patience_s)
                except NotImplementedError as refusal:
                    self._refused[cache] = str(refusal)
                    raise
                part = journal_of(folder)
                found.records += part.records
                found.lost += part.lost
        return played, found

    def close(self) -> None:
        """End them."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _play_engine(self, cell: Cell, job: RankJob, moves: list[Move], played: Played, patience_s: float) -> None:
        if self._ranks is None:
            self._ranks = Ranks(2)
        try:
            results = self._ranks.run(job, timeout_s=60 + patience_s)
        except RanksFailed as failed:
            self._ranks = None  # all of them were ended
            for failure in failed.failures.values():
                kind, _, what = failure.what.partition(": ")
                if failure.kind == "raised" and kind in ("NotImplementedError", "ConnectorError"):
                    raise NotImplementedError(what) from None
            raise RanksBroke(str(failed)) from None
        cancelled = {move.which for move in moves if isinstance(move, Cancel)}
        asks = [move.ask for move in moves if isinstance(move, Submit)]
        if cell.is_dealt_out:
            by_ask = [[results[number % 2].requests[number // 2]] for number in range(len(asks))]
        else:
            by_ask = [list(served) for served in zip(*(result.requests for result in results), strict=True)]
        for ask, served in zip(asks, by_ask, strict=True):
            first = served[0]
            error = next((each.error for each in served if each.error is not None), None)
            if error is None and any(each.tokens != first.tokens for each in served):
                error = "the ranks generated different tokens"
            played.answers.append(
                Answer(
                    ask,
                    first.request_id,
                    first.tokens,
                    first.first_logits,
                    first.device_tokens,
                    first.honoured_tokens,
                    first.passes,
                    error,
                    len(played.answers) in cancelled,
                )
            )
        for result in results:
            played.calls += Counter(result.calls)


def play_moves(executor: Any, _submitted: Sequence[Any], script: tuple[str, list[Move], int]) -> list[Any]:
    """In a rank: the moves of one engine, in lock step with the other rank, which has the same ones.

    With attention data parallelism each rank submits its own, in turn, and cancels those; none is destroyed there.
    """
    name, moves, first = script
    is_dealt_out = bool(executor.attention_dp)
    requests: list[Any] = []
    asked = 0
    for move in moves:
        if isinstance(move, Submit):
            if not is_dealt_out or asked % 2 == current_runtime().rank:
                ask = move.ask
                requests.append(of_its_tenant(executor.submit(ask.tokens(name), ask.new, **ask.options())))
            asked += 1
        elif isinstance(move, Step):
            for _ in range(move.passes):
                executor.step()
        elif isinstance(move, Cancel):
            which = move.which - first
            if not is_dealt_out:
                executor.cancel(requests[which])
            elif which % 2 == current_runtime().rank:
                executor.cancel(requests[which // 2])
        elif isinstance(move, Destroy):
            executor.destroy(requests[move.which - first], forget=move.forget)
        else:
            executor.run()
    return requests


def _engines(cell: Cell) -> list[list[Move]]:
    """The moves by engine."""
    engines: list[list[Move]] = [[]]
    for move in cell.moves:
        if isinstance(move, NewEngine):
            engines.append([])
        else:
            engines[-1].append(move)
    return engines


def _importable(cls: type) -> str:
    if "<" in cls.__qualname__:
        raise NotImplementedError(f"{cls.__qualname__} is local to a function: the ranks' processes can't import it")
    name = f"{cls.__module__}:{cls.__qualname__}"
    return f"{behind_fake.__name__}:{name}" if fake_trtllm.is_installed() else name

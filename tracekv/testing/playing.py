"""Plays the story of a cell in one process: with a connector pair, or without one for what the tokens have to be."""

from __future__ import annotations

import atexit
import functools
import inspect
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekv.testing.cells import VOCABULARY, Ask, Cancel, Cell, Destroy, Move, NewEngine, Step, Submit
from tracekv.testing.tenants import of_its_tenant

if TYPE_CHECKING:
    import torch

#: Small enough for a pass in a few milliseconds; wrong pages still show in the logits.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {"sliding_window": 64},
}
_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
}
NUM_BLOCKS = 48
_PAUSE_S = 0.0002


class NotIdle(RuntimeError):
    """Requests are left, and nothing happens any more."""


@dataclass
class Answer:
    """What became of a request.

    Attributes:
        request_id: In its engine.
        first_logits: ``[vocabulary]`` float32, or None where it had no first token.
        device_tokens: Supplied by device reuse.
        honoured_tokens: Supplied by the connector.
        error: ``Type: message`` of a forward, a per-layer hook or ``wait_for_save`` that raised.
    """

    ask: Ask
    request_id: int
    tokens: list[int] = field(default_factory=list)
    first_logits: torch.Tensor | None = None
    device_tokens: int = 0
    honoured_tokens: int = 0
    passes: list[tuple[int, int]] = field(default_factory=list)
    error: str | None = None
    is_cancelled: bool = False


@dataclass
class Played:
    """What a story came to.

    Attributes:
        calls: ``"scheduler.NAME"`` / ``"worker.NAME"`` -> calls, of all engines (and ranks).
        error: What ended it early: the runtime would have died of it.
    """

    answers: list[Answer] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    error: BaseException | None = None


@functools.cache
def model_of(preset: str) -> Any:
    """The kit's model of a preset; built once in a process."""
    from tracekv.harness import build_model

    return build_model(preset, **model_options(preset))


def model_options(preset: str) -> dict[str, Any]:
    """What :func:`tracekv.harness.build_model` is told."""
    return {**_SMALL, **MODEL_OPTIONS[preset]}


@functools.cache
def _executor_has(name: str) -> bool:
    from tracekv.harness import Executor

    return name in inspect.signature(Executor.__init__).parameters or hasattr(Executor, name)


def lacking(cell: Cell) -> list[str]:
    """What the executor lacks for a cell."""
    return [name for name in cell.needs if not _executor_has(name)]


def options_of(cell: Cell, block: int) -> dict[str, Any]:
    """Arguments of the executor."""
    return {"mode": cell.mode, "tokens_per_block": block, "num_blocks": NUM_BLOCKS, **cell.options}


def llm_args_of(cell: Cell, block: int) -> Any:
    """The engine's arguments; beside what the executor reads, ``model`` is a folder with the model's ``config.json``."""
    from tracekv.harness import bringup

    cache = bringup.KvCacheConfig(
        tokens_per_block=block,
        enable_partial_reuse=cell.options.get("partial_reuse", False),
        use_kv_cache_manager_v2=cell.mode == "v2",
    )
    arguments: Any = bringup.LlmArgs(
        cache,
        enable_attention_dp=cell.is_dealt_out,
        tensor_parallel_size=cell.ranks,
        scheduler_config=bringup.SchedulerConfig(cell.options.get("policy", "GUARANTEED_NO_EVICT")),
    )
    arguments.model = str(_folder_of(cell.preset))
    return arguments


@functools.cache
def _folder_of(preset: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tracekv-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model_of(preset).config.save_pretrained(folder)
    return folder


class Engines:
    """One engine after another, for the moves of a story.

    Args:
        cell: Where.
        pair: The connector's classes, or none.
        block: Tokens per block.
        patience_s: Most seconds without a scheduled pass while requests are left.
    """

    def __init__(self, cell: Cell, pair: tuple[Any, Any] | tuple[()], block: int, patience_s: float) -> None:
        self._cell = cell
        self._pair = pair
        self._block = block
        self._patience_s = patience_s
        self._requests: list[tuple[Answer, Any]] = []
        self._first_here = 0
        self._engine: Any = None
        self.played = Played()

    @property
    def engine(self) -> Any:
        """The engine of now; started by the first move that wants one."""
        if self._engine is None:
            from tracekv.harness import Executor

            options = {**options_of(self._cell, self._block), "llm_args": llm_args_of(self._cell, self._block)}
            self._engine = Executor(model_of(self._cell.preset), *self._pair, **options)
        return self._engine

    def submit(self, move: Submit) -> None:
        """Queue a request."""
        ask = move.ask
        request = of_its_tenant(self.engine.submit(ask.tokens(self._cell.name), ask.new, **ask.options()))
        answer = Answer(ask, request.request_id)
        self.played.answers.append(answer)
        self._requests.append((answer, request))

    def run(self) -> None:
        """Until nothing is left to do.

        Raises:
            NotIdle: Nothing was scheduled for too long.
        """
        since = time.monotonic()
        while self.engine.has_work:
            if self.engine.step():
                since = time.monotonic()
            elif time.monotonic() - since > self._patience_s:
                raise NotIdle(self._left())
            else:
                time.sleep(_PAUSE_S)

    def step(self, move: Step) -> None:
        """Some passes."""
        for _ in range(move.passes):
            self.engine.step()

    def cancel(self, move: Cancel) -> None:
        """Cancel a request."""
        answer, request = self._requests[move.which]
        answer.is_cancelled = True
        self.engine.cancel(request)

    def new_engine(self) -> None:
        """End this one."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self.played.calls += engine.calls
            self._collect()
            self._first_here = len(self._requests)
            engine.shutdown()

    def answered(self) -> list[Answer]:
        """The requests that have ended by themselves so far."""
        self._collect()
        return [
            answer
            for answer, request in self._requests
            if request.is_finished and not answer.is_cancelled and request.error is None
        ]

    @property
    def has_requests(self) -> bool:
        """This engine was asked for something."""
        return len(self._requests) > self._first_here

    @property
    def unfinished(self) -> list[int]:
        """Requests of this engine that have not ended, numbered as moves number them."""
        return [i for i in range(self._first_here, len(self._requests)) if not self._requests[i][1].is_finished]

    @property
    def destroyable(self) -> list[int]:
        """Of these, the ones whose pages can be taken: they hold some, and aren't parked."""
        if self._engine is None or self._cell.mode == "v1":
            return []
        return [
            i
            for i in self.unfinished
            if self._engine.cache.holds(self._requests[i][1])
            and not self._requests[i][1].state.value.startswith("DISAGG")
        ]

    def died(self, error: Exception) -> None:
        """The engine ended with an error: keep what there is."""
        self.played.error = error
        self._collect()
        if self._engine is not None:
            self.played.calls += self._engine.calls

    def move(self, move: Move) -> None:
        """Any move."""
        if isinstance(move, Submit):
            self.submit(move)
        elif isinstance(move, Step):
            self.step(move)
        elif isinstance(move, Cancel):
            self.cancel(move)
        elif isinstance(move, Destroy):
            self.engine.destroy(self._requests[move.which][1], forget=move.forget)
        elif isinstance(move, NewEngine):
            self.new_engine()
        else:
            self.run()

    def play(self) -> Played:
        """The whole story; what the engine dies of is in :attr:`Played.error`, but for refusals at its start.

        Raises:
            NotImplementedError: The connector can't work with this cache, or the cache with it.
        """
        starting = True
        try:
            for move in self._cell.moves:
                if self._engine is None:
                    starting = True
                    _ = self.engine
                starting = False
                self.move(move)
            self.new_engine()
        except Exception as error:
            if starting:
                raise
            self.died(error)
        return self.played

    def _collect(self) -> None:
        for answer, request in self._requests:
            answer.tokens = request.output_tokens
            answer.first_logits = request.first_logits
            answer.device_tokens, answer.honoured_tokens = request.device_tokens, request.honoured_tokens
            answer.passes = request.passes
            if request.error is not None:
                answer.error = f"{type(request.error).__name__}: {request.error}"

    def _left(self) -> str:
        waiting = [
            f"request {request.request_id} ({request.state.value})"
            for answer, request in self._requests
            if len(request.output_tokens) < answer.ask.new or request.state.value.startswith("DISAGG")
        ]
        return f"for {self._patience_s:g} s nothing was scheduled, and these are left: {', '.join(waiting) or 'none'}"


class References:
    """What requests come to without a connector, each alone on an engine of its own; kept by model and prompt."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Answer] = {}
        self._engines: dict[tuple[str, str, int], Any] = {}

    def of(self, cell: Cell, ask: Ask, block: int) -> Answer:
        """The answer to compare with."""
        key = (cell.preset, cell.mode, block, cell.name, replace(ask, serving="any", is_dummy=False))
        if key not in self._known:
            self._known[key] = self._compute(cell, ask, block)
        return self._known[key]

    def _compute(self, cell: Cell, ask: Ask, block: int) -> Answer:
        from tracekv.harness import Executor

        engine = self._engines.get((cell.preset, cell.mode, block))
        if engine is None:
            engine = Executor(model_of(cell.preset), mode=cell.mode, tokens_per_block=block, num_blocks=NUM_BLOCKS)
            self._engines[cell.preset, cell.mode, block] = engine
        request = of_its_tenant(engine.submit(ask.tokens(cell.name), ask.new, **ask.options()))
        engine.run()
        return Answer(ask, request.request_id, request.output_tokens, request.first_logits)

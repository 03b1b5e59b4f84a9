"""What the ranks of an engine are asked to do, and what becomes of it. All of it can be pickled."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """A request to submit; ``options`` are further arguments of :meth:`Executor.submit`."""

    tokens: Sequence[int]
    max_new_tokens: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """An engine and its requests: the same on every rank; with attention data parallelism, which is an option of the executor,
    each rank has its share of every round's prompts, dealt out in turn.

    Attributes:
        rounds: The prompts of a round are submitted together; a round begins when the one before it is done.
        preset, seed, model_options: Arguments of :func:`build_model`.
        checkpoint: A local checkpoint to load in place of a preset.
        executor_options: Arguments of :class:`Executor`.
        scheduler, worker: The connector's classes, ``package.module:Class``; both None: no connector.
        traced: Trace them with :func:`tracekv.trace`; the session ends with the job.
        environ: Variables that are set while the job runs.
        drive: ``package.module:function``, called with the executor and a round's requests once they are submitted: it may run
            passes, cancel and destroy, and submit more requests, which it returns; what it leaves is run to its end.
        script: A third argument for ``drive``, unless None.
        observe: ``package.module:function``, called with the executor when all is done; its answer (picklable) is
            :attr:`RankResult.observed`.
    """

    rounds: Sequence[Sequence[Prompt]]
    preset: str = "llama"
    seed: int = 0
    model_options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    executor_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    worker: str | None = None
    traced: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    drive: str | None = None
    script: Any = None
    observe: str | None = None


@dataclass(frozen=True)
class Served:
    """What became of a request on one rank; ``error`` is ``Type: message`` where it failed. See :class:`Request`."""

    request_id: int
    tokens: list[int]
    first_logits: torch.Tensor | None
    device_tokens: int
    honoured_tokens: int
    passes: list[tuple[int, int]]
    error: str | None


@dataclass(frozen=True)
class RankResult:
    """What one rank tells: its requests in the order of the job, and the calls made to its half of the connector."""

    rank: int
    requests: list[Served]
    calls: dict[str, int]
    observed: Any = None


@dataclass(frozen=True)
class RankFailure:
    """Why a rank has no result.

    Attributes:
        kind: ``raised`` (``what``: type and message), ``died`` (its exit), ``blocked`` (the collective in which it waited for
            a rank that doesn't come) or ``unfinished`` (where it was when the time was over).
        trace: The traceback, where it raised.
    """

    rank: int
    kind: Literal["raised", "died", "blocked", "unfinished"]
    what: str
    trace: str = ""

    def __str__(self) -> str:
        verb = {"raised": "raised", "died": "ended with", "blocked": "waits in", "unfinished": "isn't done: it is"}
        return f"rank {self.rank} {verb[self.kind]} {self.what}"


@dataclass(frozen=True)
class Remark:
    """An error that a rank logged and went on from, such as a forward that failed."""

    rank: int
    what: str


class RanksFailed(RuntimeError):
    """At least one rank failed, and all were ended.

    Attributes:
        failures: By rank, those that have no result.
        remarks: What ranks logged before.
    """

    def __init__(self, failures: Mapping[int, RankFailure], remarks: Sequence[Remark] = ()) -> None:
        self.failures = dict(failures)
        self.remarks = list(remarks)
        order = ("died", "raised", "unfinished", "blocked")
        told = sorted(self.failures.values(), key=lambda failure: (order.index(failure.kind), failure.rank))
        before = "".join(f" Before, on rank {remark.rank}: {remark.what}." for remark in remarks)
        super().__init__(f"tracekv: {'; '.join(map(str, told))}. All ranks were ended.{before}")
        for failure in told:
            if failure.trace:
                self.add_note(f"rank {failure.rank}:\n{failure.trace}")


def exit_of(code: int | None) -> str:
    """A process's exit code in words."""
    if code is not None and code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"

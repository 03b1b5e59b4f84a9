"""Which rank this process is, of how many, and how the ranks agree on something."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Variables by which launchers tell a process how many ranks there are. Without MPI they only say "not one".
_WORLD_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE")


class UnknownRuntime(RuntimeError):
    """The rank or the number of ranks can't be told, and a guess could serve another rank's KV."""


def _alone(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class Runtime:
    """The ranks of one engine.

    Attributes:
        rank: This process's rank in ``[0, world)``.
        world: Number of ranks that hold a part of the KV.
        host: Name of this node.
        allgather: Collective: takes a picklable value, returns the list of every rank's, by rank. Blocks.
    """

    rank: int = 0
    world: int = 1
    host: str = field(default_factory=socket.gethostname)
    allgather: Callable[[Any], list[Any]] = field(default=_alone, compare=False)


_current: Runtime | None = None


def use_runtime(runtime: Runtime | None) -> None:
    """Say which rank this process is. For harnesses and other hosts; None forgets it."""
    global _current
    _current = runtime


def current_runtime() -> Runtime:
    """The runtime that was set, else TensorRT-LLM's MPI world, else one rank.

    Raises:
        UnknownRuntime: A launcher says that there are several ranks, but nothing says which one this is.

    Source: DESIGN.md "contract/"; TensorRT-LLM's own ``mpi_rank`` (contract.md section 7, stub list).
    """
    if _current is not None:
        return _current
    if "tensorrt_llm" in sys.modules:
        return _from_tensorrt_llm()
    for name in _WORLD_SIZE_VARIABLES:
        if os.environ.get(name, "1") not in ("", "1"):
            raise UnknownRuntime(
                f"tracekv: {name}={os.environ[name]} says that this is one of several ranks, but neither "
                "TensorRT-LLM's MPI nor tracekv.contract.use_runtime(Runtime(rank=..., world=...)) says which one."
            )
    return Runtime()


def _from_tensorrt_llm() -> Runtime:
    try:
        from tensorrt_llm._utils import mpi_allgather, mpi_rank, mpi_world_size
    except ImportError as error:
        raise UnknownRuntime(
            f"tracekv: tensorrt_llm is loaded but gives no rank ({error}). "
            "Call tracekv.contract.use_runtime(Runtime(rank=..., world=...)) before the engine starts."
        ) from error
    return Runtime(rank=int(mpi_rank()), world=int(mpi_world_size()), allgather=mpi_allgather)

"""Work on several cores that needs no thread to be safe: forked children do a share of it and send back what came of it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def in_processes(tasks: Sequence[Callable[[], T]], weights: Sequence[int], *, workers: int | None = None) -> list[T]:
    """What each task returns, in their order; the first share is done by the caller itself.

    A child sees everything that its parent had when it was forked, and what it changes is its own: a task has to return what
    matters, and that has to be picklable. To be called while no other thread runs.

    Args:
        tasks: What to do; an exception of one is raised here.
        weights: How much each is, for equal shares.
        workers: Processes, the caller included; as many as there are cores by default.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), len(tasks))
    shares = _shares(weights, max(1, workers))
    children = [_start([tasks[index] for index in share]) for share in shares[1:]]
    results: dict[int, T] = {}
    try:
        for index in shares[0] if shares else ():
            results[index] = tasks[index]()
    finally:
        answers = [_answer(*child) for child in children]
    for share, answer in zip(shares[1:], answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        results.update(zip(share, answer, strict=True))
    return [results[index] for index in range(len(tasks))]


def _shares(weights: Sequence[int], workers: int) -> list[list[int]]:
    """Indexes by worker: the largest first, each to who has least."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += weights[index]
    return shares


def _start(tasks: Sequence[Callable[[], Any]]) -> tuple[int, int]:
    """A child that does ``tasks`` one after the other: its pid, and where its answer comes."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sending)
        return pid, receiving
    try:
        os.close(receiving)
        with os.fdopen(sending, "wb") as pipe:
            pickle.dump(_done(tasks), pipe, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        # Nothing of the parent's is flushed, closed or run at exit by the child.
        os._exit(0)


def _done(tasks: Sequence[Callable[[], Any]]) -> list[Any] | Exception:
    try:
        return [task() for task in tasks]
    except Exception as error:  # raised by the parent
        return error


def _answer(pid: int, receiving: int) -> Any:
    with os.fdopen(receiving, "rb") as pipe:
        try:
            answer = pickle.load(pipe)  # noqa: S301  # of a child of this process
        except (EOFError, pickle.UnpicklingError):
            answer = ChildProcessError("tracekv: a process that read journals ended early; try again with more memory")
    os.waitpid(pid, 0)
    return answer

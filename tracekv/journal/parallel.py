"""Work on several cores that needs no thread to be safe: forked children do a part of it and send back what came of it."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_INDEX = struct.Struct("I")


def in_processes(tasks: Sequence[Callable[[], T]], weights: Sequence[int], *, workers: int | None = None) -> list[T]:
    """What each task returns, in their order. The caller does the heaviest one, and then, as all others do, the next that is left.

    A child sees everything that its parent had when it was forked, and what it changes is its own: a task has to return what
    matters, and that has to be picklable. To be called while no other thread runs.

    Args:
        tasks: What to do; an exception of one is raised here.
        weights: How much each is: the heaviest are begun first.
        workers: Processes, the caller included; as many as there are cores by default.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), len(tasks))
    if workers < 2:
        return [task() for task in tasks]
    order = sorted(range(len(tasks)), key=lambda index: -weights[index])
    with tempfile.TemporaryFile(buffering=0) as queue:
        for index in order[workers:]:
            queue.write(_INDEX.pack(index))
        queue.seek(0)
        children = [_start(tasks, _taken(first, queue.fileno())) for first in order[1:workers]]
        results: dict[int, T] = {}
        try:
            for index in _taken(order[0], queue.fileno()):
                results[index] = tasks[index]()
        finally:
            answers = [_answer(*child) for child in children]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        results.update(answer)
    return [results[index] for index in range(len(tasks))]


def _taken(first: int, queue: int) -> Iterator[int]:
    """The tasks of one worker: those of the queue go to whoever reads them, since all that were forked share its offset."""
    yield first
    while packed := os.read(queue, _INDEX.size):
        (index,) = _INDEX.unpack(packed)
        yield index


def _start(tasks: Sequence[Callable[[], Any]], taken: Iterator[int]) -> tuple[int, int]:
    """A child that does the tasks that it takes: its pid, and where its answer comes."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sending)
        return pid, receiving
    try:
        os.close(receiving)
        with os.fdopen(sending, "wb") as pipe:
            pickle.dump(_done(tasks, taken), pipe, protocol=pickle.HIGHEST_PROTOCOL)
    finally:
        # Nothing of the parent's is flushed, closed or run at exit by the child.
        os._exit(0)


def _done(tasks: Sequence[Callable[[], Any]], taken: Iterator[int]) -> dict[int, Any] | Exception:
    try:
        return {index: tasks[index]() for index in taken}
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

"""A pass's loads layer by layer, beside the forward that reads them.

They are issued in rising order of layers, by a thread where pages are in host memory, on a stream of their own on a GPU. Whoever
waits for a layer waits for all layers up to it, and for nothing behind it. Both kinds answer alike (:class:`Loading`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from tracekv_fsspec.moving import Mover, Moves, Piece
from tracekv_fsspec.plan import Copy


@dataclass
class Job:
    """One copy of a pass's plan, and what became of it.

    Attributes:
        started_ns: When it was issued.
        copy_ns: The copying itself.
        stall_ns: How long the forward pass waited for it. A wait is shared among a pass's jobs by their bytes.
    """

    copy: Copy
    moves: Moves
    nbytes: int
    started_ns: int = 0
    ended_ns: int = 0
    copy_ns: int = 0
    stall_ns: int = 0

    def run(self, move: Callable[[Moves, Sequence[Piece]], None], pieces: Sequence[Piece]) -> None:
        """Move some pieces, and count the time."""
        started = perf_counter_ns()
        move(self.moves, pieces)
        self.ended_ns = perf_counter_ns()
        self.started_ns = self.started_ns or started
        self.copy_ns += self.ended_ns - started


#: By layer group, its pieces by layer.
PiecesByLayer = Mapping[int, Mapping[int, Sequence[Piece]]]


class Loading(Protocol):
    """The loads of one pass, on their way.

    Attributes:
        unasked: Layers with loads that nobody has waited for yet.
    """

    jobs: Sequence[Job]
    unasked: set[int]

    def wait(self, layer: int, stream: Any) -> None:
        """Let ``stream`` (on the host: the caller) go on only when this layer's loads are over."""

    def join(self, stream: Any) -> None:
        """:meth:`wait` for all layers. Raises what a copy raised."""

    def settle(self) -> None:
        """Fill in the jobs' times, when everything is over."""


class HostLoading:
    """Pages in host memory: a thread copies.

    Args:
        thread: Runs one pass's loads at a time.
    """

    def __init__(self, mover: Mover, jobs: Sequence[Job], pieces: PiecesByLayer, thread: ThreadPoolExecutor) -> None:
        self.jobs = jobs
        self._mover = mover
        self._parts = _parts(jobs, pieces)
        self._layers = [layer for layer, _ in self._parts]
        self.unasked = set(self._layers)
        self._changed = threading.Condition()
        self._finished = 0
        self._error: BaseException | None = None
        self._waited_ns = 0
        issued = perf_counter_ns()  # a later layer group's copies may begin when the first layers have run
        for job in jobs:
            job.started_ns = issued
        thread.submit(self._copy)

    def wait(self, layer: int, stream: Any) -> None:
        """As :meth:`Loading.wait`."""
        self.unasked.discard(layer)
        self._wait(bisect_right(self._layers, layer))

    def join(self, stream: Any) -> None:
        """As :meth:`Loading.join`."""
        self._wait(len(self._layers))

    def settle(self) -> None:
        """As :meth:`Loading.settle`."""
        share_stall(self.jobs, self._waited_ns)

    def _wait(self, parts: int) -> None:
        if self._finished >= parts:
            return
        started = perf_counter_ns()
        with self._changed:
            while self._finished < parts and self._error is None:
                self._changed.wait()
        self._waited_ns += perf_counter_ns() - started
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        try:
            for _, part in self._parts:
                for job, pieces in part:
                    job.run(self._mover.load, pieces)
                with self._changed:
                    self._finished += 1
                    self._changed.notify_all()
        except BaseException as error:  # raised to whoever waits
            with self._changed:
                self._error = error
                self._changed.notify_all()


class StreamLoading:
    """Pages on a GPU: copies are issued at once, on ``side``, with an event after each layer."""

    def __init__(self, mover: Mover, jobs: Sequence[Job], pieces: PiecesByLayer, side: Any, stream: Any) -> None:
        self.jobs = jobs
        parts = _parts(jobs, pieces)
        self._layers = [layer for layer, _ in parts]
        self.unasked = set(self._layers)
        self._waits: list[tuple[Any, Any]] = []
        # What was issued on the pages before, reads of their former content included, comes first.
        side.wait_stream(stream)
        self._began = _timed_event(side)
        self._events = []
        with torch.cuda.stream(side):
            for _, part in parts:
                for job, pieces_of_layer in part:
                    job.run(mover.load, pieces_of_layer)
                self._events.append(_timed_event(side))

    def wait(self, layer: int, stream: Any) -> None:
        """As :meth:`Loading.wait`."""
        self.unasked.discard(layer)
        self._wait(bisect_right(self._layers, layer), stream)

    def join(self, stream: Any) -> None:
        """As :meth:`Loading.join`."""
        self._wait(len(self._events), stream)

    def settle(self) -> None:
        """As :meth:`Loading.settle`; the events of the copies and of the waits have to be over."""
        share_copy(self.jobs, _ns_between(self._began, self._events[-1]))
        share_stall(self.jobs, sum(_ns_between(before, after) for before, after in self._waits))

    def _wait(self, parts: int, stream: Any) -> None:
        event = self._events[parts - 1] if parts else None
        if event is None or event.query():
            return
        before = _timed_event(stream)
        stream.wait_event(event)
        self._waits.append((before, _timed_event(stream)))


class StreamCopies:
    """Copies that were issued on a GPU's stream at once, between two events: how long the stream took is known later."""

    def __init__(self, jobs: Sequence[Job], began: Any, ended: Any) -> None:
        self._jobs = jobs
        self._began = began
        self._ended = ended

    @classmethod
    def issue(
        cls,
        move: Callable[[Moves, Sequence[Piece]], None],
        jobs: Sequence[Job],
        pieces: Mapping[int, Sequence[Piece]],
        stream: Any,
    ) -> StreamCopies:
        """Issue every job on ``stream``; whatever follows there follows the copies."""
        began = _timed_event(stream)
        with torch.cuda.stream(stream):
            for job in jobs:
                job.run(move, pieces[job.copy.layer_group])
        return cls(jobs, began, _timed_event(stream))

    def settle(self) -> None:
        """Fill in the jobs' times, when the events are over: what follows on the stream has waited for all of it."""
        took = _ns_between(self._began, self._ended)
        share_copy(self._jobs, took)
        share_stall(self._jobs, took)


def share_copy(jobs: Sequence[Job], took_ns: int) -> None:
    """Give each job its part of what the device took, by bytes; it ended just now."""
    total = sum(job.nbytes for job in jobs) or 1
    now = perf_counter_ns()
    for job in jobs:
        job.copy_ns = took_ns * job.nbytes // total
        job.ended_ns = now


def share_stall(jobs: Sequence[Job], waited_ns: int) -> None:
    """Give each job its part of a wait, by bytes."""
    total = sum(job.nbytes for job in jobs) or 1
    for job in jobs:
        job.stall_ns = waited_ns * job.nbytes // total


def _parts(jobs: Sequence[Job], pieces: PiecesByLayer) -> list[tuple[int, list[tuple[Job, Sequence[Piece]]]]]:
    by_layer: dict[int, list[tuple[Job, Sequence[Piece]]]] = {}
    for job in jobs:
        for layer, of_layer in pieces[job.copy.layer_group].items():
            by_layer.setdefault(layer, []).append((job, of_layer))
    return sorted(by_layer.items(), key=lambda part: part[0])


def _timed_event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _ns_between(before: Any, after: Any) -> int:
    return int(before.elapsed_time(after) * 1e6)

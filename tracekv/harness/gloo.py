"""The ranks' collectives between processes: torch.distributed over gloo, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator, MutableSequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

#: What a rank can be waiting in, by the number that it writes down.
COLLECTIVES = ("", "broadcast", "allgather", "all_reduce", "allgather of the connector")


def meeting_point(port: int = 0) -> Any:
    """The store at which the ranks find each other: joined at ``port``, or opened (0) on one that the system chooses."""
    is_new = port == 0
    return dist.TCPStore("127.0.0.1", port, is_master=is_new, wait_for_workers=False)  # type: ignore[attr-defined]


class PeerLost(RuntimeError):
    """Another rank has gone, or didn't come to a collective in time."""

    def __init__(self, rank: int, collective: str) -> None:
        super().__init__(f"tracekv: rank {rank} waited in {collective} for a rank that is gone or doesn't come")
        self.collective = collective


class GlooRanks:
    """A rank's collectives. The model's sums and the connector's own allgather have groups of their own.

    Args:
        rank: This process's rank.
        world: Number of ranks.
        port: Where the launcher's store listens, on the loopback interface.
        whereabouts: Shared with the launcher: entry ``rank`` is 0 outside of a collective, else ``8 * n + its number`` in
            :data:`COLLECTIVES`, where n counts the collectives entered.
        timeout_s: Longest wait in a collective.
    """

    def __init__(self, rank: int, world: int, port: int, whereabouts: MutableSequence[int], timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self._whereabouts = whereabouts
        self._entered = 0
        # By default gloo takes the interface that the host's name resolves to, which may lead anywhere.
        if loopback := next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None):
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
        timeout = timedelta(seconds=timeout_s)
        store = meeting_point(port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        self._model_group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._connector_group: Any = dist.new_group(backend="gloo", timeout=timeout)

    def broadcast(self, value: Any) -> Any:
        """The leader's value; it is pickled before any byte moves, and even the leader gets a copy.

        Raises:
            PeerLost: Another rank doesn't come.
            Exception: What pickling the leader's value raises, on the leader; the others go on waiting, as with MPI.

        Source: contract-v2.md section 11, point 9.
        """
        payload: list[Any] = [pickle.dumps(value) if self.rank == 0 else None]
        with self._waiting_in("broadcast"):
            dist.broadcast_object_list(payload, src=0)
        return pickle.loads(payload[0])  # noqa: S301  # from our own leader

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; PeerLost where another rank doesn't come."""
        return self._gather("allgather", value, None)

    def connector_allgather(self, value: Any) -> list[Any]:
        """As :meth:`allgather`, for ``Runtime.allgather``: never mixed up with the executor's own."""
        return self._gather("allgather of the connector", value, self._connector_group)

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks, in place; the same bits on every rank."""
        with self._waiting_in("all_reduce"):
            dist.all_reduce(partial, group=self._model_group)
        return partial

    def leave(self) -> None:
        """End the groups; every rank is expected to."""
        dist.destroy_process_group()

    def _gather(self, name: str, value: Any, group: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        with self._waiting_in(name):
            dist.all_gather_object(values, value, group=group)
        return values

    @contextlib.contextmanager
    def _waiting_in(self, collective: str) -> Iterator[None]:
        self._entered += 1
        self._whereabouts[self.rank] = 8 * self._entered + COLLECTIVES.index(collective)
        try:
            yield
        except RuntimeError as error:  # gloo's own: a connection that broke, or a time that ran out
            raise PeerLost(self.rank, collective) from error
        finally:
            self._whereabouts[self.rank] = 0

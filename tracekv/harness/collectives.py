"""How the ranks of an engine talk to each other; with one rank, not at all."""

from __future__ import annotations

import pickle
from typing import Any, Protocol


class Collectives(Protocol):
    """The two collectives that the runtime uses for a connector. Every rank enters each call.

    Source: contract.md section 1.4.
    """

    rank: int
    world: int

    def broadcast(self, value: Any) -> Any:
        """The leader's value. With more than one rank it is pickled, and even the leader gets a copy."""
        ...

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        ...


class OneRank:
    """A world of one: nothing is pickled, the very object comes back (contract-v2.md section 11, 9).

    Args:
        pickled: Pickle what is broadcast all the same, so that a connector whose metadata would not survive a second rank
            is found out with one.
    """

    rank = 0
    world = 1

    def __init__(self, *, pickled: bool = False) -> None:
        self._pickled = pickled

    def broadcast(self, value: Any) -> Any:
        """The value, or its copy."""
        return pickle.loads(pickle.dumps(value)) if self._pickled else value  # noqa: S301  # our own bytes

    def allgather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]

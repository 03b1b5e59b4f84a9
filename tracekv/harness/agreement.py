"""What the ranks of an engine have to agree on in a pass, and those that need no agreement because all do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tracekv.harness.ending import Requests
from tracekv.harness.requests import Batch, Request


class Agreement(Protocol):
    """The places of a pass at which a rank may depend on what the others have."""

    def anyone(self, has: bool) -> bool:
        """Whether any rank has it."""
        ...

    def may_run(self, batch: Batch, *, waits: bool) -> bool:
        """Whether the ranks run a pass, of which ``batch`` is this rank's part; ``waits``: something may give it a page."""
        ...

    def start(self, batch: Batch, parked: list[Request], load: Callable[[], None], report: Callable[[], None]) -> None:
        """Start the loads of a batch; ``parked`` is what was taken out of it, ``report`` hands the connector what it is now."""
        ...

    def poll(self) -> None:
        """``get_finished``, at the end of every pass."""
        ...


class LockStep:
    """Ranks with the same requests, or one rank: each knows what the others do, and nothing of this is talked about."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def anyone(self, has: bool) -> bool:
        """All have it, or none."""
        return has

    def may_run(self, batch: Batch, *, waits: bool) -> bool:
        """There is something to compute."""
        return bool(batch)

    def start(self, batch: Batch, parked: list[Request], load: Callable[[], None], report: Callable[[], None]) -> None:
        """Loads are started once, whatever parking has left; nobody waits for them."""
        load()

    def poll(self) -> None:
        """The manager itself has the ranks agree on what is done."""
        self._requests.poll()

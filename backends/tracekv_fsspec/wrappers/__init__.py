"""What holds for every engine, each in a wrapper of the seam that knows nothing of the others."""

from __future__ import annotations

from tracekv_fsspec.store import Deadlines, Store
from tracekv_fsspec.wrappers.breaker import Breaker
from tracekv_fsspec.wrappers.guard import OwnProcess
from tracekv_fsspec.wrappers.pacing import Paced
from tracekv_fsspec.wrappers.retry import Retrying


def guarded(engine: Store, deadlines: Deadlines) -> Store:
    """An engine with everything around it: own process only, breaker, retries, pacing; outermost first."""
    return OwnProcess(Breaker(Retrying(Paced(engine), deadlines)))

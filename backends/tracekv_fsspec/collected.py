"""Ends what an engine left running when its half of the connector is garbage and nobody has shut it down.

The garbage collector runs finalizers on any thread, between any two of its bytecodes, also while it holds one of our locks. So the
finalizer here takes none and starts nothing: it leaves a note to a thread that waits for it (``SimpleQueue.put`` may be called so).
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable

_log = logging.getLogger("tracekv.fsspec")


class WhenCollected:
    """Calls ``end`` on a thread of its own, once ``owner`` is garbage. At the interpreter's exit it doesn't.

    Args:
        end: Must not hold the owner, or the owner never becomes garbage.
    """

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        notes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._notes = notes
        self._finalizer = weakref.finalize(owner, notes.put, True)
        self._finalizer.atexit = False
        threading.Thread(target=_wait, args=(notes, end), name="tracekv-collected", daemon=True).start()

    def is_done(self) -> None:
        """The owner was shut down: there is nothing to wait for any more. May be called again."""
        if self._finalizer.detach():
            self._notes.put(False)


def _wait(notes: queue.SimpleQueue[bool], end: Callable[[], None]) -> None:
    if not notes.get():
        return
    try:
        end()
    except Exception:
        _log.exception("tracekv: what an engine left running when it was dropped couldn't be ended; call shutdown()")

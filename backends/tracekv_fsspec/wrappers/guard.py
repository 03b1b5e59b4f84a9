"""A store belongs to the process that opened it, and to nobody once it is closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from tracekv.journal.vocabulary import Operation, Outcome
from tracekv_fsspec.store import Store, StoreError
from tracekv_fsspec.wrappers.base import Wrapper

T = TypeVar("T")


class OwnProcess(Wrapper):
    """Refuses calls in a forked child, where connections would hang without an error (storage.md section 6, traps 1, 2)."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._pid = os.getpid()
        self._is_closed = False

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Refuse, or go on."""
        if os.getpid() != self._pid:
            raise StoreError(
                Outcome.ERROR,
                f"the store {self.url} was opened by process {self._pid} and this is a fork of it, where its connections "
                "hang. Open it in the child, or start the child with spawn.",
            )
        if self._is_closed:
            raise StoreError(Outcome.ERROR, f"the store {self.url} is closed")
        return call()

    def close(self) -> None:
        """Close what is inside, once; a child has nothing to close."""
        if not self._is_closed and os.getpid() == self._pid:
            self._is_closed = True
            self.inner.close()

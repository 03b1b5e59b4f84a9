"""A store around a store: everything passes through one method, which a wrapper overrides."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import TypeVar

from tracekv.journal.vocabulary import Operation
from tracekv_fsspec.store import Data, Entry, Range, Store

T = TypeVar("T")


class Wrapper:
    """Hands every call on to ``inner``; :meth:`around` is where a wrapper does its part."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.engine = inner.engine
        self.tier = inner.tier
        self.bucket = inner.bucket
        self.url = inner.url
        self.is_create_atomic = inner.is_create_atomic
        self.lists_after = inner.lists_after

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Make one call, or several, or none."""
        return call()

    def put(self, path: str, *parts: Data, create_only: bool) -> None:
        """As the seam says."""
        self.around(Operation.PUT, lambda: self.inner.put(path, *parts, create_only=create_only))

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """As the seam says."""
        self.around(Operation.READ, lambda: self.inner.read(path, ranges, into))

    def sizes(self, paths: Sequence[str]) -> builtins.list[int | None]:
        """As the seam says."""
        return self.around(Operation.HEAD, lambda: self.inner.sizes(paths))

    def list(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """As the seam says."""
        return self.around(Operation.LIST, lambda: self.inner.list(prefix, after=after))

    def delete(self, path: str) -> None:
        """As the seam says."""
        self.around(Operation.DELETE, lambda: self.inner.delete(path))

    def close(self) -> None:
        """As the seam says."""
        self.inner.close()

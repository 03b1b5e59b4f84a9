"""Checks blocks while they arrive: what was just written is in the processor's cache, and later it would have to be fetched again."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import xxhash

from tracekv_fsspec.format import ALIGNMENT, BadObject, check_block

#: Larger blocks are checked part by part.
_PART = 256 << 10


class _Blocks:
    """Blocks that lie one after the other in a buffer, each with its padding."""

    __slots__ = ("_at", "_buffer", "_checksums", "_hash", "_length", "_number", "_stride", "wrong")

    def __init__(self, buffer: memoryview, length: int, checksums: Sequence[bytes]) -> None:
        self._buffer = buffer
        self._length = length
        self._stride = len(buffer) // len(checksums)
        self._checksums = checksums
        self.restart()

    def restart(self) -> None:
        """What was checked is written anew."""
        self.wrong: list[int] = []
        self._number = self._at = 0
        self._hash = xxhash.xxh3_128() if self._length > _PART and self._length % ALIGNMENT == 0 else None

    def check(self, end: int) -> None:
        """The first ``end`` bytes are there."""
        stride = self._stride
        while self._number < len(self._checksums):
            start = self._number * stride
            if self._hash is not None:
                stop = min(end, start + stride)
                self._hash.update(self._buffer[self._at : stop])
                self._at = stop
            if end < start + stride:
                return
            digest = self._checksums[self._number]
            if self._hash is not None:
                if self._hash.digest() != digest:
                    self.wrong.append(self._number)
                self._hash.reset()
            else:
                try:
                    check_block(self._buffer[start : start + stride], self._length, digest)
                except BadObject:
                    self.wrong.append(self._number)
            self._number += 1


class Verifier:
    """The check of one read, buffer by buffer. Engines that fill buffers bit by bit tell it (``tally.progress``); it needn't be told.

    Attributes:
        took_ns: Time spent so far.
    """

    def __init__(self) -> None:
        self._buffers: list[_Blocks] = []
        self._ends: list[int] = []
        self._first = 0
        self.took_ns = 0

    def add(self, buffer: memoryview, length: int, checksums: Sequence[bytes]) -> None:
        """The read's next buffer, and what has to be in it."""
        self._buffers.append(_Blocks(buffer, length, checksums))
        self._ends.append(len(buffer))

    def lead_in(self) -> None:
        """There is a buffer before all others, and it holds no blocks."""
        self._first = 1

    def restart(self) -> None:
        """The read begins, maybe again: every buffer is filled from its beginning."""
        for blocks in self._buffers:
            blocks.restart()

    def filled(self, number: int, end: int) -> None:
        """The first ``end`` bytes of the read's buffer of that number are there."""
        if number >= self._first:
            began = perf_counter_ns()
            self._buffers[number - self._first].check(end)
            self.took_ns += perf_counter_ns() - began

    def finish(self) -> list[list[int]]:
        """Check what wasn't yet; by buffer that was added, which of its blocks are wrong."""
        for blocks, end in zip(self._buffers, self._ends, strict=True):
            blocks.check(end)
        return [blocks.wrong for blocks in self._buffers]

"""The limit of a store: the same bytes with the best client there is, and nothing done with them."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

_PIECE = 4 << 20
_THREADS = 8
_SEGMENT = 32 << 20

Pages = Sequence[tuple[str, int]]


class Limit(Protocol):
    """Raw reads and writes below the store's root."""

    def read(self, pages: Pages) -> int:
        """Read whole objects, as (path, size); how many bytes came."""

    def write(self, source: memoryview, total: int) -> int:
        """Write ``total`` bytes of ``source``, again and again, as objects of a segment's size; how many bytes went."""

    def remove_written(self) -> None:
        """Remove what :meth:`write` wrote."""

    def cool(self, paths: Sequence[str]) -> None:
        """Get objects out of this machine's memory."""

    def warm(self, paths: Sequence[str]) -> None:
        """Get objects into it."""

    def close(self) -> None:
        """End threads."""


def limit_for(url: str, options: Mapping[str, Any], s3_client: str) -> Limit:
    """Files by positioned I/O; S3 by obstore; anything else by fsspec's own calls."""
    from tracekv_fsspec import protocols
    from tracekv_fsspec.store import open_engine

    protocol = protocols.protocol_of(url)
    if protocol in protocols.LOCAL and "::" not in url:
        from fsspec.implementations.local import LocalFileSystem

        return _Files(Path(LocalFileSystem._strip_protocol(url)))
    return _Requests(open_engine(url, options, s3_client="obstore" if s3_client == "obstore" else s3_client))


class _Files:
    """8 threads with 4 MiB reads; by O_DIRECT where the bytes aren't cached, which is the faster way then."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(_THREADS)
        self._buffers = [memoryview(mmap.mmap(-1, _PIECE)) for _ in range(_THREADS)]
        self._written: list[Path] = []
        self._is_warm = False
        for buffer in self._buffers:
            buffer[:] = bytes(_PIECE)

    def read(self, pages: Pages) -> int:
        flags = os.O_RDONLY | (0 if self._is_warm else getattr(os, "O_DIRECT", 0))
        files = [(self._open(self._root / path, flags), size) for path, size in pages]
        pieces = [(file, at, min(_PIECE, size - at)) for file, size in files for at in range(0, size, _PIECE)]
        shares = [pieces[number::_THREADS] for number in range(_THREADS)]
        try:
            return sum(self._pool.map(self._read_share, shares, self._buffers))
        finally:
            for file, _ in files:
                os.close(file)

    @staticmethod
    def _open(path: Path, flags: int) -> int:
        try:
            return os.open(path, flags)
        except OSError:  # a file system without O_DIRECT
            return os.open(path, os.O_RDONLY)

    @staticmethod
    def _read_share(pieces: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        return sum(os.preadv(file, [buffer[:length]], at) for file, at, length in pieces)

    def write(self, source: memoryview, total: int) -> int:
        page = memoryview(mmap.mmap(-1, min(total, _PIECE)))
        page[:] = bytes(source[: len(page)]).ljust(len(page), b"\0")
        written = 0
        while written < total:
            path = self._root / f"limit-{secrets.token_hex(6)}"
            self._written.append(path)
            size = min(_SEGMENT, total - written)
            file = self._open_new(path)
            try:
                os.posix_fallocate(file, 0, size)
                at = 0
                while at < size:
                    at += os.pwritev(file, [page[: size - at]], at)
            finally:
                os.close(file)
            written += size
        return written

    @staticmethod
    def _open_new(path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError:
            path.unlink(missing_ok=True)
            return os.open(path, flags, 0o666)

    def remove_written(self) -> None:
        for path in self._written:
            path.unlink()
        self._written.clear()

    def cool(self, paths: Sequence[str]) -> None:
        self._is_warm = False
        for path in paths:
            file = os.open(self._root / path, os.O_RDONLY)
            os.fdatasync(file)  # what is dirty can't be dropped
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def warm(self, paths: Sequence[str]) -> None:
        self._is_warm = True
        for path in paths:
            file = os.open(self._root / path, os.O_RDONLY)
            while os.readv(file, self._buffers[:1]):  # into little memory: the processor's caches are for what comes
                pass
            os.close(file)

    def close(self) -> None:
        self._pool.shutdown()


class _Requests:
    """8 ranged requests of 4 MiB in flight, each answer copied to the buffer of its thread, as positioned reads do it, too."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(_THREADS)
        self._written: list[str] = []
        self._api: Any = getattr(engine, "_api", None)
        self._buffers = threading.local()

    def _get(self, piece: tuple[str, int, int]) -> int:
        path, at, length = piece
        if self._api is not None:
            data = memoryview(self._api.get_range(self._engine._reading, path, start=at, length=length))
        else:
            data = memoryview(self._engine._fs.cat_file(self._engine._full(path), start=at, end=at + length))
        if not hasattr(self._buffers, "mine"):
            self._buffers.mine = memoryview(mmap.mmap(-1, _PIECE))
        self._buffers.mine[: len(data)] = data
        return len(data)

    def read(self, pages: Pages) -> int:
        pieces = [(path, at, min(_PIECE, size - at)) for path, size in pages for at in range(0, size, _PIECE)]
        return sum(self._pool.map(self._get, pieces))

    def write(self, source: memoryview, total: int) -> int:
        data = bytes(source) * (-(-min(_SEGMENT, total) // len(source)))
        written = 0
        while written < total:
            path = f"limit-{secrets.token_hex(6)}"
            self._written.append(path)
            size = min(_SEGMENT, total - written)
            self._engine.put(path, memoryview(data)[:size], create_only=True)
            written += size
        return written

    def remove_written(self) -> None:
        for path in self._written:
            self._engine.delete(path)
        self._written.clear()

    def cool(self, paths: Sequence[str]) -> None:
        """A server's memory is its own."""

    def warm(self, paths: Sequence[str]) -> None:
        """As :meth:`cool`."""

    def close(self) -> None:
        self._pool.shutdown()
        self._engine.close()

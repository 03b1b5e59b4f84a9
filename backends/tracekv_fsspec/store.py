"""Where segments and manifests live: a small seam, and the engine for any fsspec URL.

Everything else (retries, pacing, a breaker, faults in tests) wraps :class:`Store` from outside.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
from fsspec.core import url_to_fs

from tracekv.journal.vocabulary import Outcome, Tier
from tracekv_fsspec import protocols
from tracekv_fsspec.store_errors import AlreadyExists, StoreError, StoreUnusable, translated

#: Prefix of files that are still being written. No listing shows them.
_UNFINISHED = ".unfinished-"
#: Ranges that follow each other are one request, up to so many bytes.
MERGED_BYTES = 8 << 20
#: A PUT of one request; s3fs would otherwise split into several.
_S3_CHUNK = 1 << 30


class Range(NamedTuple):
    """``length`` bytes at ``offset``."""

    offset: int
    length: int


class Entry(NamedTuple):
    """An object: its path below the root, and its size in bytes."""

    path: str
    size: int


class Store(Protocol):
    """Objects below a root, by path. Calls may block and come from several of the stager's threads, from no other.

    Every method raises :class:`StoreError`, whose outcome says why.

    Attributes:
        engine: What reports call it: ``local``, ``s3``, ``memory`` or the URL's protocol.
        tier: Where KV that is read from here comes from.
        bucket: The bucket of an object store, else None.
        url: For messages: no user, no password.
    """

    engine: str
    tier: Tier
    bucket: str | None
    url: str

    def put(self, path: str, data: bytes | bytearray, *, create_only: bool) -> None:
        """Write a whole object; a reader sees all of it or nothing.

        Raises:
            AlreadyExists: ``create_only``, and there is one. It is left as it is.
        """

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill each buffer with its range, exactly. ``ranges`` are in rising order; neighbours are read at once.

        Raises:
            StoreError: ``TRUNCATED`` where the object ends before a range does.
        """

    def read_all(self, path: str, size: int) -> bytes:
        """A whole object of the size that the listing gave."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """Objects whose path begins with the folder ``prefix``, in rising order of path, behind ``after``."""

    def delete(self, path: str) -> None:
        """Remove an object; none there is no error."""

    def close(self) -> None:
        """Give connections back. Further calls are errors."""


def open_store(url: str, options: Mapping[str, Any] | None = None) -> FsspecStore:
    """Open the store at an fsspec URL.

    Raises:
        StoreUnusable: No such protocol, or its package is missing, or it doesn't take an option.
    """
    options = options or {}
    protocol = protocols.protocol_of(url)
    hidden = protocols.Secrets(url, options)
    try:
        file_system, root = url_to_fs(url, **_per_protocol(url, options))
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise StoreUnusable(
            f"tracekv: TRACEKV_FSSPEC__URL={protocols.shown_url(url)} can't be opened: "
            f"{hidden.hidden_in(str(error) or type(error).__name__)}. "
            f"For s3:// install tracekv[s3]; options go to TRACEKV_FSSPEC__STORAGE_OPTIONS."
        ) from None
    if protocol in protocols.S3 and "mode" not in inspect.signature(file_system._pipe_file).parameters:
        raise StoreUnusable("tracekv: this s3fs has no create-only writes. Install s3fs>=2024.12 (tracekv[s3]).")
    return FsspecStore(file_system, str(root), protocol, protocols.shown_url(url), hidden)


def _per_protocol(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    protocol = protocols.protocol_of(url)
    merged = protocols.file_system_options(protocol, options)
    return {protocol: merged} if "::" in url else merged


class FsspecStore:
    """Any fsspec file system, used so that none of its caches and defaults gets between us and the bytes.

    The file system belongs to the process that opened it: after a fork its connections hang, so each call checks.

    Source: storage.md section 6 for the traps that are avoided here.
    """

    #: fsspec's memory file system has no exclusive create of its own; one process, so a lock is one.
    _memory_lock = threading.Lock()

    def __init__(
        self, file_system: fsspec.AbstractFileSystem, root: str, protocol: str, url: str, hidden: protocols.Secrets
    ) -> None:
        self._fs = file_system
        self._root = root.rstrip("/")
        self._protocol = protocol
        self._hidden = hidden
        self._pid = os.getpid()
        self._closed = False
        self.url = url
        self.engine = protocols.engine_of(protocol)
        self.tier = protocols.tier_of(protocol)
        self.bucket = self._root.split("/", 1)[0] if protocol in protocols.S3 else None

    def put(self, path: str, data: bytes | bytearray, *, create_only: bool) -> None:
        """Write a whole object. On protocols without an exclusive create, two writers of one path aren't told apart."""
        with self._translating("write", path):
            if self._protocol in protocols.LOCAL:
                _put_file(self._full(path), data, create_only)
            elif self._protocol == "memory":
                with self._memory_lock:
                    if create_only and self._fs.exists(self._full(path)):
                        raise FileExistsError(path)
                    self._fs.pipe_file(self._full(path), bytes(data))
            elif self._protocol in protocols.S3:
                mode = "create" if create_only else "overwrite"
                self._fs.pipe_file(self._full(path), bytes(data), mode=mode, chunksize=_S3_CHUNK)
            else:
                if create_only and self._fs.exists(self._full(path)):
                    raise FileExistsError(path)
                self._fs.pipe_file(self._full(path), bytes(data))

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill each buffer with its range, exactly."""
        with self._translating("read", path):
            for first, end in _runs(ranges):
                start = ranges[first].offset
                stop = ranges[end - 1].offset + ranges[end - 1].length
                # Both ends, always: without them s3fs asks for the size first, and answers from a stale one.
                data = memoryview(self._fs.cat_file(self._full(path), start=start, end=stop))
                if len(data) != stop - start:
                    raise StoreError(
                        Outcome.TRUNCATED, f"{path} gave {len(data)} bytes instead of {stop - start} from {start} on"
                    )
                for number in range(first, end):
                    offset = ranges[number].offset - start
                    into[number][:] = data[offset : offset + ranges[number].length]

    def read_all(self, path: str, size: int) -> bytes:
        """A whole object of the size that the listing gave."""
        data = bytearray(size)
        if size:
            self.read(path, [Range(0, size)], [memoryview(data)])
        return bytes(data)

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """Objects below the folder ``prefix``, in rising order of path, behind ``after``."""
        with self._translating("list", prefix):
            try:
                found = self._fs.find(self._full(prefix), detail=True)
            except FileNotFoundError:
                found = {}
            # Some servers list the folder itself, as an object of no bytes.
            below = self._full(prefix) + "/"
            cut = len(self._root) + 1
            entries = sorted(
                Entry(name[cut:], int(info.get("size") or 0))
                for name, info in found.items()
                if name.startswith(below) and not name.rsplit("/", 1)[-1].startswith(_UNFINISHED)
            )
        return (entry for entry in entries if entry.path > after)

    def delete(self, path: str) -> None:
        """Remove an object; none there is no error."""
        with self._translating("delete", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def close(self) -> None:
        """Close the client's connections: left to the interpreter's exit they leak or hang (trap 11)."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        client = getattr(self._fs, "_s3", None)
        if client is not None:
            with contextlib.suppress(Exception):  # a connection that is broken already is closed, too
                self._fs.close_session(self._fs.loop, client)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    @contextlib.contextmanager
    def _translating(self, verb: str, path: str) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise StoreError(
                Outcome.ERROR,
                f"the store {self.url} was opened by process {self._pid} and this is a fork of it, where its connections "
                "hang. Open it in the child, or start the child with spawn.",
            )
        if self._closed:
            raise StoreError(Outcome.ERROR, f"the store {self.url} is closed")
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # every kind that a file system may raise; translated() sorts them
            raise translated(error, f"{verb} {self.url.rstrip('/')}/{path}", self._hidden) from None


def check_usable(store: Store) -> None:
    """Write, read, list and remove a small object, so that a store that can't be used is known at start-up.

    Raises:
        StoreUnusable: With what failed, where, and what to do.
    """
    path = f"probe/{secrets.token_hex(8)}"
    data = secrets.token_bytes(32)
    doing = "written to"
    try:
        store.put(path, data, create_only=True)
        doing = "read from"
        same = store.read_all(path, len(data)) == data
        doing = "listed"
        listed = [entry.path for entry in store.list("probe/")]
        doing = "deleted from"
        store.delete(path)
    except StoreError as error:
        raise StoreUnusable(
            f"tracekv: the store TRACEKV_FSSPEC__URL={store.url} can't be {doing} ({error.outcome.value}): {error}. "
            f"{_ADVICE.get(error.outcome, _ADVICE[Outcome.ERROR])}"
        ) from None
    if not same or path not in listed:
        what = "gives other bytes than were written" if not same else "doesn't list what was written"
        raise StoreUnusable(
            f"tracekv: the store TRACEKV_FSSPEC__URL={store.url} {what}. Use one that is consistent after a write."
        )


_ADVICE = {
    Outcome.DENIED: "Check the permissions of the folder or, for S3, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the "
    "role, and that it may put, get, list and delete objects there.",
    Outcome.MISSING: "The bucket or folder doesn't exist: create it, or name another in TRACEKV_FSSPEC__URL.",
    Outcome.UNAVAILABLE: "Check that the server runs and that AWS_ENDPOINT_URL (or endpoint_url in "
    "TRACEKV_FSSPEC__STORAGE_OPTIONS) names it.",
    Outcome.TIMEOUT: "The server doesn't answer: check its address, AWS_ENDPOINT_URL and the network.",
    Outcome.NO_SPACE: "Make room, or name another place in TRACEKV_FSSPEC__URL.",
    Outcome.ERROR: "Check TRACEKV_FSSPEC__URL and TRACEKV_FSSPEC__STORAGE_OPTIONS.",
}


def _runs(ranges: Sequence[Range]) -> Iterator[tuple[int, int]]:
    """Index ranges of neighbours that are read at once."""
    first = 0
    for number in range(1, len(ranges) + 1):
        if number < len(ranges):
            last = ranges[number - 1]
            adjoins = ranges[number].offset == last.offset + last.length
            fits = ranges[number].offset + ranges[number].length - ranges[first].offset <= MERGED_BYTES
            if adjoins and fits:
                continue
        if first < number:
            yield first, number
        first = number


def _put_file(path: str, data: bytes | bytearray, create_only: bool) -> None:
    """Whole or not at all, by a second name: ``link`` fails where the path exists, ``replace`` doesn't.

    There is no fsync: it's a cache. What a power cut tears is found by its checksums.
    """
    target = Path(path)
    unfinished = target.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        if create_only:
            os.link(unfinished, target)
        else:
            unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


__all__ = [
    "AlreadyExists",
    "Entry",
    "FsspecStore",
    "Range",
    "Store",
    "StoreError",
    "StoreUnusable",
    "check_usable",
    "open_store",
]

"""Any fsspec file system, used so that none of its caches and defaults gets between us and the bytes; s3fs among them.

Source: storage.md section 6 for the traps that are avoided here.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import sync
from fsspec.core import url_to_fs

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec import protocols
from tracekv_fsspec.store import TRY_SHARE, UNFINISHED, Data, Deadlines, Entry, Range, runs
from tracekv_fsspec.store_errors import StoreError, StoreUnusable, translating
from tracekv_fsspec.tally import tally

#: A PUT of one request; s3fs would otherwise split into several.
_S3_CHUNK = 1 << 30
#: What fsspec itself and s3fs take beside the parameters that their constructors name.
_ALWAYS_TAKEN = frozenset(
    {"skip_instance_cache", "use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous"}
)


def open_generic(url: str, options: Mapping[str, Any], deadlines: Deadlines) -> FsspecStore:
    """The store at any URL that fsspec knows.

    Raises:
        StoreUnusable: No such protocol, or its package is missing, or it doesn't take an option.
    """
    protocol = protocols.protocol_of(url)
    hidden = protocols.Secrets(url, options)
    shown = protocols.shown_url(url)
    try:
        if protocol in protocols.S3:
            _refuse_unknown(fsspec.get_filesystem_class(protocol), options, shown)
        merged = protocols.file_system_options(protocol, options, deadlines.read_s * TRY_SHARE)
        file_system, root = url_to_fs(url, **({protocol: merged} if "::" in url else merged))
        if protocol in protocols.S3:
            if not _takes_mode(file_system):
                raise StoreUnusable(
                    "tracekv: this s3fs has no create-only writes. Install s3fs>=2024.12 (tracekv[s3])."
                )
            file_system.retries = 1  # a range is tried again as a whole, by our own wrapper and within its deadline
            file_system.connect()  # now, so that the first read's deadline doesn't pay for it
    except StoreUnusable:
        raise
    except Exception as error:  # whatever a file system makes of an option or a missing package
        raise StoreUnusable(
            f"tracekv: TRACEKV_FSSPEC__URL={shown} can't be opened: {hidden.hidden_in(str(error) or type(error).__name__)}. "
            f"For s3:// install tracekv[s3]; options go to TRACEKV_FSSPEC__STORAGE_OPTIONS."
        ) from None
    return FsspecStore(file_system, str(root), protocol, shown, hidden, deadlines)


def _refuse_unknown(file_system: Any, options: Mapping[str, Any], shown: str) -> None:
    """S3fs swallows keywords that it doesn't know; a misspelt option would silently not be there."""
    taken = {name for cls in file_system.__mro__[:-1] for name in inspect.signature(cls.__init__).parameters}
    for name in sorted(set(options) - taken - _ALWAYS_TAKEN):
        raise StoreUnusable(
            f"tracekv: s3fs has no option {name!r} (TRACEKV_FSSPEC__STORAGE_OPTIONS for {shown}). "
            "TRACEKV_FSSPEC__S3_CLIENT chooses the client; see its documentation for the options that it takes."
        )


def _takes_mode(file_system: Any) -> bool:
    """Whether create-only is the file system's own: an exclusive PUT, not a look before the write.

    ``obstore.fsspec`` has the parameter and ignores it (storage.md section 6, trap 15).
    """
    if type(file_system).__module__.startswith("obstore"):
        return False
    writer = getattr(file_system, "_pipe_file", None) or file_system.pipe_file
    return "mode" in inspect.signature(writer).parameters


class FsspecStore:
    """One fsspec file system. On one without an exclusive create, two writers of one path aren't told apart."""

    lists_after = False
    #: fsspec's memory file system has no exclusive create of its own; one process, so a lock is one.
    _memory_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        file_system: fsspec.AbstractFileSystem,
        root: str,
        protocol: str,
        url: str,
        hidden: protocols.Secrets,
        deadlines: Deadlines,
    ) -> None:
        self._fs = file_system
        self._read_s, self._write_s = (seconds * TRY_SHARE for seconds in deadlines)
        self._root = root.rstrip("/")
        self._protocol = protocol
        self._hidden = hidden
        self._creates = protocol in protocols.S3 and _takes_mode(file_system)
        self.url = url
        self.engine = protocols.engine_of(protocol)
        self.tier = protocols.tier_of(protocol)
        self.bucket = self._root.split("/", 1)[0] if protocol in protocols.S3 else None
        self.is_create_atomic = self._creates or protocol == "memory"

    def put(self, path: str, *parts: Data, create_only: bool) -> None:
        """Write a whole object."""
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        tally.requests += 1
        with self._translating("write", path):
            if self._creates:
                mode = "create" if create_only else "overwrite"
                self._call("pipe_file", self._write_s, self._full(path), data, mode=mode, chunksize=_S3_CHUNK)
                return
            with self._memory_lock if self._protocol == "memory" else contextlib.nullcontext():
                if create_only and self._call("exists", self._read_s, self._full(path)):
                    raise FileExistsError(path)
                self._call("pipe_file", self._write_s, self._full(path), data)

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill each buffer with its range, exactly."""
        with self._translating("read", path):
            for first, end in runs(ranges):
                start = ranges[first].offset
                stop = ranges[end - 1].offset + ranges[end - 1].length
                tally.requests += 1
                # Both ends, always: without them s3fs asks for the size first, and answers from a stale one.
                data = memoryview(self._call("cat_file", self._read_s, self._full(path), start=start, end=stop))
                if len(data) != stop - start:
                    raise StoreError(
                        Outcome.TRUNCATED, f"{path} gave {len(data)} bytes instead of {stop - start} from {start} on"
                    )
                for number in range(first, end):
                    offset = ranges[number].offset - start
                    into[number][:] = data[offset : offset + ranges[number].length]

    def sizes(self, paths: Sequence[str]) -> builtins.list[int | None]:
        """How large each object is now; None for those that aren't there."""
        found: list[int | None] = []
        for path in paths:
            with self._translating("look at", path):
                tally.requests += 1
                try:
                    found.append(int(self._call("info", self._read_s, self._full(path))["size"]))
                except FileNotFoundError:
                    found.append(None)
        return found

    def list(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """Objects below the folder ``prefix``, in rising order of path, behind ``after``."""
        with self._translating("list", prefix):
            tally.requests += 1
            try:
                found = self._call("find", self._write_s, self._full(prefix), detail=True)
            except FileNotFoundError:
                found = {}
            # Some servers list the folder itself, as an object of no bytes.
            below = self._full(prefix) + "/"
            cut = len(self._root) + 1
            return sorted(
                Entry(name[cut:], int(info.get("size") or 0), _modified(info))
                for name, info in found.items()
                if name.startswith(below) and name[cut:] > after and not name.rsplit("/", 1)[-1].startswith(UNFINISHED)
            )

    def delete(self, path: str) -> None:
        """Remove an object; none there is no error."""
        with self._translating("delete", path), contextlib.suppress(FileNotFoundError):
            tally.requests += 1
            self._call("rm_file", self._write_s, self._full(path))

    def close(self) -> None:
        """Close the client's connections: left to the interpreter's exit they leak or hang (trap 11)."""
        client = getattr(self._fs, "_s3", None)
        if client is not None:
            with contextlib.suppress(Exception):  # a connection that is broken already is closed, too
                self._fs.close_session(self._fs.loop, client)

    def _call(self, name: str, seconds: float, *arguments: Any, **more: Any) -> Any:
        """A method of the file system; where it is an asynchronous one, within a time."""
        if self._fs.async_impl:
            # On its own loop, from this thread: any other way hangs or fails (trap 12).
            return sync(self._fs.loop, getattr(self._fs, f"_{name}"), *arguments, timeout=seconds, **more)
        return getattr(self._fs, name)(*arguments, **more)

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _translating(self, verb: str, path: str) -> contextlib.AbstractContextManager[None]:
        return translating(f"{verb} {self.url.rstrip('/')}/{path}", self._hidden)


def _modified(info: Mapping[str, Any]) -> float:
    for name in ("mtime", "LastModified", "last_modified", "created", "updated"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0

"""Local files: positioned reads and writes straight between the file and given buffers, past the page cache where that is possible.

What already lies in the page cache is read from there. Everything else goes by O_DIRECT: it is steadier, costs the processor a third
and leaves the cache to the host's other work. Where a file system, an offset or a buffer refuses it, the same call goes on
buffered.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from tracekv.journal.vocabulary import Outcome, Tier
from tracekv_fsspec import protocols
from tracekv_fsspec.format import ALIGNMENT
from tracekv_fsspec.store import UNFINISHED, Data, Entry, Range, runs
from tracekv_fsspec.store_errors import StoreError, StoreUnusable, translating
from tracekv_fsspec.tally import Progress, tally

_DIRECT = getattr(os, "O_DIRECT", 0)
#: What is read at a time of what the page cache has: little enough for a core's own cache, enough that threads don't queue for the
#: interpreter.
_BIT = 1 << 20
_IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))
_CACHESTAT = 451  # the number of cachestat(2), the same on every architecture; Linux 6.5 and newer
#: A folder that comes and goes this often while a file is made in it is no accident.
_FOLDER_TRIES = 100


def open_local(url: str, options: Mapping[str, Any]) -> LocalStore:
    """The store in a folder.

    Raises:
        StoreUnusable: There are options, and files have none.
    """
    known = {"auto_mkdir"}  # fsspec's own, and always so here
    if unknown := sorted(set(options) - known):
        raise StoreUnusable(
            f"tracekv: the option {unknown[0]!r} in TRACEKV_FSSPEC__STORAGE_OPTIONS means nothing to files "
            f"({protocols.shown_url(url)}). Leave it out."
        )
    return LocalStore(LocalFileSystem._strip_protocol(url), protocols.shown_url(url))


class LocalStore:
    """A folder. Whole objects appear under their names by ``link`` (create-only) or ``replace``."""

    engine = "local"
    tier = Tier.DISK
    bucket: str | None = None
    is_create_atomic = True
    lists_after = True

    def __init__(self, root: str, url: str) -> None:
        self._root = root.rstrip("/") or "/"
        self._hidden = protocols.Secrets(url, {})
        self.url = url

    def put(self, path: str, *parts: Data, create_only: bool) -> None:
        """Whole or not at all, by a second name: ``link`` fails where the path exists, ``replace`` doesn't.

        There is no fsync: it's a cache. What a power cut tears is found by its checksums.
        """
        with translating(f"write {self.url}/{path}", self._hidden):
            target = Path(self._root, path)
            unfinished = target.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
            descriptor = _create(unfinished)
            try:
                try:
                    _write(descriptor, [memoryview(part) for part in parts])
                finally:
                    os.close(descriptor)
                if create_only:
                    os.link(unfinished, target)
                else:
                    unfinished.replace(target)
            finally:
                unfinished.unlink(missing_ok=True)

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill each buffer with its range, exactly."""
        progress = tally.progress
        if progress is not None:
            progress.restart()
        with translating(f"read {self.url}/{path}", self._hidden):
            descriptor = os.open(Path(self._root, path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                for first, end in runs(ranges):
                    start = ranges[first].offset
                    length = ranges[end - 1].offset + ranges[end - 1].length - start
                    if progress is not None and _is_cached(descriptor, start, length):
                        came = _copy(descriptor, into, first, end, start, progress)
                    else:
                        came = _fill(descriptor, list(into[first:end]), start, length)
                    if came != length:
                        raise StoreError(
                            Outcome.TRUNCATED, f"{path} gave {came} bytes instead of {length} from {start} on"
                        )
            finally:
                os.close(descriptor)

    def sizes(self, paths: Sequence[str]) -> builtins.list[int | None]:
        """How large each object is now; None for those that aren't there."""
        found: list[int | None] = []
        with translating(f"look at files below {self.url}", self._hidden):
            for path in paths:
                tally.requests += 1
                try:
                    found.append(Path(self._root, path).stat().st_size)
                except FileNotFoundError:
                    found.append(None)
        return found

    def list(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """Objects below the folder ``prefix``, in rising order of path, behind ``after``."""
        with translating(f"list {self.url}/{prefix}", self._hidden):
            found: list[Entry] = []
            self._walk(prefix.rstrip("/"), after, found)
        return sorted(found)

    def delete(self, path: str) -> None:
        """Remove an object, and its folder if it was the last one there."""
        with translating(f"delete {self.url}/{path}", self._hidden), contextlib.suppress(FileNotFoundError):
            tally.requests += 1
            target = Path(self._root, path)
            target.unlink()
            with contextlib.suppress(OSError):  # not empty, or somebody writes into it: then it stays
                if target.parent != Path(self._root):
                    target.parent.rmdir()

    def close(self) -> None:
        """Nothing is kept open."""

    def _walk(self, folder: str, after: str, found: builtins.list[Entry]) -> None:
        tally.requests += 1
        try:
            inside = os.scandir(f"{self._root}/{folder}")
        except (FileNotFoundError, NotADirectoryError):
            return
        below = f"{folder}/" if folder else ""
        with inside:
            for entry in inside:
                path = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    # Everything in a folder begins with its name, so all of it lies before `after` if the name does.
                    if path >= after[: len(path)]:
                        self._walk(path, after, found)
                elif path > after and not entry.name.startswith(UNFINISHED):
                    with contextlib.suppress(FileNotFoundError):  # deleted since
                        facts = entry.stat()
                        found.append(Entry(path, facts.st_size, facts.st_mtime))


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for _ in range(_FOLDER_TRIES):
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            # Whoever deletes the last object of a folder takes the folder along, perhaps the one that was just made.
            with contextlib.suppress(FileExistsError):  # it was there, and was gone before it could be looked at
                path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, flags, 0o666)


def _write(descriptor: int, parts: builtins.list[memoryview]) -> None:
    total = sum(map(len, parts))
    if total >= ALIGNMENT:
        # Room for all of it or none, and one extent: a full disk is told before anything is written.
        try:
            os.posix_fallocate(descriptor, 0, total)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    is_direct = (
        total >= 16 * ALIGNMENT and all(len(part) % ALIGNMENT == 0 for part in parts) and _set_direct(descriptor)
    )
    offset = first = 0
    parts = [part.cast("B") for part in parts if len(part)]
    while first < len(parts):
        try:
            tally.requests += 1
            done = os.pwritev(descriptor, parts[first : first + _IOV_MAX], offset)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            is_direct = False
            _clear_direct(descriptor)
            continue
        offset += done
        first = _advance(parts, first, done)


def _fill(descriptor: int, views: builtins.list[memoryview], offset: int, length: int) -> int:
    """Read into ``views``, which are ``length`` bytes; how many came, fewer where the file ends."""
    is_aligned = offset % ALIGNMENT == 0 and all(len(view) % ALIGNMENT == 0 for view in views)
    is_direct = (
        is_aligned and length > ALIGNMENT and not _is_cached(descriptor, offset, length) and _set_direct(descriptor)
    )
    came = first = 0
    views = [view for view in views if len(view)]
    while first < len(views):
        try:
            tally.requests += 1
            done = os.preadv(descriptor, views[first : first + _IOV_MAX], offset + came)
        except OSError as error:
            if not is_direct or error.errno != errno.EINVAL:
                raise
            is_direct = False
            _clear_direct(descriptor)
            continue
        if not done:
            break
        came += done
        first = _advance(views, first, done)
    if is_direct:
        _clear_direct(descriptor)
    return came


def _copy(descriptor: int, into: Sequence[memoryview], first: int, end: int, offset: int, progress: Progress) -> int:
    """Fill ``into[first:end]`` from the page cache; how many bytes came.

    Bit by bit, so that what is told of is checked while it is in the processor's cache.
    """
    came = at = 0
    while first < end:
        views, room, last = [], _BIT, first
        while last < end and room > 0:
            views.append(into[last][at if last == first else 0 :][:room])
            room -= len(views[-1])
            last += 1
        tally.requests += 1
        done = os.preadv(descriptor, views, offset + came)
        if not done:
            break
        came += done
        while first < end and done >= len(into[first]) - at:
            done -= len(into[first]) - at
            progress.filled(first, len(into[first]))
            first, at = first + 1, 0
        if done:
            at += done
            progress.filled(first, at)
    return came


def _advance(parts: builtins.list[memoryview], first: int, done: int) -> int:
    while first < len(parts) and done >= len(parts[first]):
        done -= len(parts[first])
        first += 1
    if done:
        parts[first] = parts[first][done:]
    return first


def _set_direct(descriptor: int) -> bool:
    if not _DIRECT:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _DIRECT)
    except OSError:
        return False
    return True


def _clear_direct(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Whether most of a range lies in the page cache; False where the kernel can't tell."""
    if _libc is None:
        return False
    asked, answer = _CachestatRange(offset, length), _Cachestat()
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(answer), 0):
        return False
    return bool(answer.cached * mmap.PAGESIZE * 2 > length)

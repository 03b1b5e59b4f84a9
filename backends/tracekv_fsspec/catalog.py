"""Follows the commits of a store into the index: all of them at start-up, other writers' new ones from then on.

Each writer's commits are numbered in the order of writing, so one cursor per writer tells what is new.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, perf_counter

from tracekv.journal.vocabulary import Operation, Outcome
from tracekv_fsspec.format import BadObject
from tracekv_fsspec.index import Index
from tracekv_fsspec.manifest import Manifest, Tombstone, Uses, pack, parse, written_ns
from tracekv_fsspec.paths import (
    Commit,
    commit_of,
    manifest_folder,
    tombstone_path,
    uses_path,
)
from tracekv_fsspec.report import Report, reported
from tracekv_fsspec.store import Entry, Store, StoreError, read_whole

_log = logging.getLogger("tracekv.fsspec")

_LOADERS = 8
#: A manifest lists at most some thousands of blocks; anything larger is none of ours.
_LARGEST = 256 << 20
#: Every so many refreshes all commits are listed: then what was deleted is noticed, and writers whose clocks lag.
FULL_EVERY = 15
#: What an object store lists per request.
_PAGE = 1000
#: A writer that committed within this time is looked at by its cursor. One that was idle for longer begins anew under another id
#: (``committing.ROTATE_S``, well below), so none is missed.
LIVE_S = 900.0
#: How often uses are written down.
USES_EVERY_S = 60.0

Progress = Callable[[int, int], None]
_Found = tuple[Commit, bool, Entry]


class Catalog:
    """Reads manifests and tombstones into the index.

    Args:
        own: Ids under which this engine commits; the index has those commits already.

    Attributes:
        on_refreshed: Called by the background after each refresh, with the time at which it began (``time.monotonic``).
    """

    def __init__(
        self, store: Store, index: Index, *, deployment: bytes, own: Collection[bytes], refresh_s: float
    ) -> None:
        self._store = store
        self._index = index
        self._deployment = deployment
        self._own = own
        self._refresh_s = refresh_s
        self._cursors: dict[bytes, int] = {}
        self._seen_at: dict[bytes, float] = {}
        self._round = 0
        self._listed = 0
        self._uses_path = uses_path(deployment, next(iter(own)))
        self._uses_at = monotonic()
        self._uses_written = 0
        self._is_stopped = False
        self._wake = threading.Event()
        self.on_refreshed: Callable[[float], None] | None = None
        self._refreshing = threading.Lock()
        self._is_down = False
        self._thread = threading.Thread(target=self._run, name="tracekv-refresh", daemon=True)

    def start(self) -> None:
        """Read what is stored, then go on in the background. Does I/O: call it at bring-up.

        Raises:
            StoreError: The store can't be listed.
        """
        started = perf_counter()
        manifests, blocks = self.refresh()
        _log.info(
            "tracekv: %s holds %d blocks in %d manifests for this deployment (read in %.2f s)",
            self._store.url, blocks, manifests, perf_counter() - started,
        )  # fmt: skip
        self._thread.start()

    def refresh(self, progress: Progress | None = None) -> tuple[int, int]:
        """Take in what is new; how many manifests, and how many blocks they added.

        Args:
            progress: Called with (read so far, to be read) manifests.

        Raises:
            StoreError: The store can't be listed.
        """
        with self._refreshing:
            found = self._new()
            by_writer: dict[bytes, list[_Found]] = {}
            for each in found:
                by_writer.setdefault(each[0].writer, []).append(each)
            if not found:
                return 0, 0
            counter = _Counter(len(found), progress)
            # Tombstones first: a block that was removed and stored anew is then found at its new place at once.
            removers = [found for found in by_writer.values() if any(is_tombstone for _, is_tombstone, _ in found)]
            others = [found for found in by_writer.values() if found not in removers]
            with ThreadPoolExecutor(_LOADERS, thread_name_prefix="tracekv-manifest") as pool:
                counts = list(pool.map(lambda each: self._read_writer(each, counter), removers))
                counts += pool.map(lambda each: self._read_writer(each, counter), others)
            return sum(n for n, _ in counts), sum(blocks for _, blocks in counts)

    def refresh_soon(self) -> None:
        """Have the background look for what is new now; returns at once."""
        self._wake.set()

    def close(self, seconds: float) -> None:
        """Stop refreshing, and write down which commits were used."""
        self._is_stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        with suppress(StoreError):
            self._write_uses()

    def _new(self) -> list[_Found]:
        """Commits and tombstones behind the cursors, by as few listings as that takes."""
        now = monotonic()
        live = [writer for writer, seen in self._seen_at.items() if now - seen < LIVE_S and writer not in self._own]
        again = self._index.doubted()
        is_full = (
            self._round % FULL_EVERY == 0
            or bool(again)
            or not self._store.lists_after
            or len(live) + 1 > -(-self._listed // _PAGE)
        )
        self._round += 1
        folder = manifest_folder(self._deployment)
        known = self._index.commits() if is_full else set()
        with reported(self._store, Operation.LIST, folder) as report:
            entries = list(self._store.list(folder)) if is_full else self._listed_by_cursor(folder, live)
            report.blocks = len(entries)
        listed = {}
        for entry in entries:
            if (name := commit_of(entry.path)) is not None:
                listed[entry.path] = (*name, entry)
        if is_full:
            self._listed = len(entries)
            there = {commit for commit, is_tombstone, _ in listed.values() if not is_tombstone}
            for commit in known - there:
                self._index.remove(commit, for_good=False)
            self._index.forget_removed(there)
            self._index.looked_at(again)
            # A writer that comes back to life after all begins at its first commit that is there then.
            for writer in self._cursors.keys() - set(live) - {commit.writer for commit, _, _ in listed.values()}:
                del self._cursors[writer]
                del self._seen_at[writer]
        return [each for each in listed.values() if self._is_new(each[0], again)]

    def _is_new(self, commit: Commit, again: set[Commit]) -> bool:
        if commit in again:
            return True
        return commit.writer not in self._own and commit.sequence > self._cursors.get(commit.writer, -1)

    def _listed_by_cursor(self, folder: str, live: Sequence[bytes]) -> list[Entry]:
        entries: list[Entry] = []
        for writer in live:
            # Tombstones sort behind the manifest of the same number, and no writer uses a number twice.
            after = tombstone_path(self._deployment, writer, self._cursors.get(writer, 0))
            entries += self._store.list(f"{folder}{writer.hex()}/", after=after)
        # Ids begin with the time, so writers that came since lie behind every other.
        newest = max([*self._cursors, *self._own])
        entries += self._store.list(folder, after=f"{folder}{newest.hex()}/~")
        return entries

    def _read_writer(self, found: list[_Found], counter: _Counter) -> tuple[int, int]:
        """One writer's commits, in order. What is broken is passed over; what can't be read now is tried again."""
        manifests = blocks = 0
        for commit, is_tombstone, entry in sorted(found):
            with suppress(StoreError, BadObject), reported(self._store, Operation.READ, entry.path) as report:
                report.nbytes = entry.size
                self._take(commit, is_tombstone, entry, report)
                manifests, blocks = manifests + (not is_tombstone), blocks + report.blocks
            counter.step()
            if report.outcome in (Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.DENIED, Outcome.ERROR):
                break
            if report.outcome not in (Outcome.OK, Outcome.MISSING):
                _log.warning("tracekv: %s is %s and passed over: %s", entry.path, report.outcome.value, report.error)
            self._cursors[commit.writer] = max(commit.sequence, self._cursors.get(commit.writer, -1))
            self._seen_at[commit.writer] = monotonic()
        return manifests, blocks

    def _take(self, commit: Commit, is_tombstone: bool, entry: Entry, report: Report) -> None:
        if entry.size > _LARGEST:
            raise BadObject(Outcome.FOREIGN, f"manifest of {entry.size} bytes")
        data = read_whole(self._store, entry.path, entry.size)
        if is_tombstone:
            tombstone = parse(Tombstone, data, self._deployment)
            _check_name(tombstone, commit)
            for writer, sequence in tombstone.removed:
                self._index.remove(Commit(writer, sequence), for_good=True)
        else:
            manifest = parse(Manifest, data, self._deployment)
            _check_name(manifest, commit)
            report.blocks = self._index.add(manifest, written_ns(data) if self._round > 1 else 0)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._refresh_s)
            if self._is_stopped:
                return
            self._wake.clear()
            try:
                began = monotonic()
                self.refresh()
                if self.on_refreshed is not None:
                    self.on_refreshed(began)
                if monotonic() - self._uses_at >= USES_EVERY_S:
                    self._write_uses()
                self._is_down = False
            except Exception as error:  # the next round may work; a query only misses meanwhile
                if not self._is_down:
                    _log.warning("tracekv: %s can't be refreshed: %s", self._store.url, error)
                self._is_down = True

    def _write_uses(self) -> None:
        """Tell those who delete what is old which commits were read, where that is news."""
        self._uses_at = monotonic()
        used: dict[Commit, int] = {}
        for segment in self._index.segments():
            used[segment.commit] = max(segment.used_at, used.get(segment.commit, 0))
        newest = max(used.values(), default=0)
        if newest <= self._uses_written:
            return
        commits = [(*commit, seconds) for commit, seconds in used.items() if seconds]
        data = pack(self._deployment, Uses(next(iter(self._own)), commits))
        with reported(self._store, Operation.PUT, self._uses_path, nbytes=len(data)):
            self._store.put(self._uses_path, data, create_only=False)
        self._uses_written = newest


class _Counter:
    """Counts what several threads have read."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)


def _check_name(found: Manifest | Tombstone, commit: Commit) -> None:
    if (found.writer, found.sequence) != commit:
        raise BadObject(Outcome.FOREIGN, "object that isn't the one its path names")

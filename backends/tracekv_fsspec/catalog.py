"""Follows the manifests of a store into the index: all of them at start-up, other writers' new ones from then on.

Each writer's manifests are numbered in the order of writing, so one cursor per writer tells what is new.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, perf_counter_ns

import tracekv
from tracekv.journal.vocabulary import Operation, Outcome
from tracekv_fsspec.format import BadObject
from tracekv_fsspec.index import Index
from tracekv_fsspec.manifest import parse_manifest
from tracekv_fsspec.paths import ManifestName, manifest_folder, manifest_name, path_digest
from tracekv_fsspec.store import Entry, Store
from tracekv_fsspec.store_errors import StoreError

_log = logging.getLogger("tracekv.fsspec")

_LOADERS = 8
#: A manifest lists at most some thousands of blocks; anything larger is none of ours.
_LARGEST = 256 << 20


class Catalog:
    """Reads manifests into the index.

    Args:
        writer: This engine's own id, whose commits the index already has.
    """

    def __init__(self, store: Store, index: Index, *, deployment: bytes, writer: bytes, refresh_s: float) -> None:
        self._store = store
        self._index = index
        self._deployment = deployment
        self._writer = writer
        self._refresh_s = refresh_s
        self._cursors: dict[bytes, int] = {}
        self._stop = threading.Event()
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

    def refresh(self) -> tuple[int, int]:
        """Take in new manifests; how many, and how many blocks they added.

        Raises:
            StoreError: The store can't be listed.
        """
        with self._refreshing:
            found = self._new_manifests()
            if not found:
                return 0, 0
            with ThreadPoolExecutor(min(_LOADERS, len(found)), thread_name_prefix="tracekv-manifest") as pool:
                counts = list(pool.map(self._read_writer, found.values()))
            return sum(n for n, _ in counts), sum(blocks for _, blocks in counts)

    def close(self, seconds: float) -> None:
        """Stop refreshing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _new_manifests(self) -> dict[bytes, list[tuple[ManifestName, Entry]]]:
        found: dict[bytes, list[tuple[ManifestName, Entry]]] = {}
        started = perf_counter_ns()
        outcome, message = Outcome.OK, None
        folder = manifest_folder(self._deployment)
        try:
            for entry in self._store.list(folder):
                name = manifest_name(entry.path)
                if name is None or name.writer == self._writer or name.sequence <= self._cursors.get(name.writer, -1):
                    continue
                found.setdefault(name.writer, []).append((name, entry))
        except StoreError as error:
            outcome, message = error.outcome, str(error)
            raise
        finally:
            tracekv.store_operation(
                Operation.LIST, outcome, self._store.engine, started_ns=started, blocks=sum(map(len, found.values())),
                bucket=self._store.bucket, key=path_digest(folder), error=message,
            )  # fmt: skip
        return found

    def _read_writer(self, entries: list[tuple[ManifestName, Entry]]) -> tuple[int, int]:
        """One writer's manifests, in order. What is broken is passed over; what can't be read now is tried again."""
        manifests = blocks = 0
        for name, entry in sorted(entries):
            started = perf_counter_ns()
            outcome, message, added = Outcome.OK, None, 0
            try:
                if entry.size > _LARGEST:
                    raise BadObject(Outcome.FOREIGN, f"manifest of {entry.size} bytes")
                manifest = parse_manifest(self._store.read_all(entry.path, entry.size), self._deployment)
                if (manifest.writer, manifest.sequence) != name:
                    raise BadObject(Outcome.FOREIGN, "manifest that isn't the one its path names")
                added = self._index.add(manifest)
                manifests, blocks = manifests + 1, blocks + added
            except BadObject as error:
                outcome, message = error.outcome, str(error)
                _log.warning("tracekv: %s is %s and passed over: %s", entry.path, outcome.value, error)
            except StoreError as error:
                outcome, message = error.outcome, str(error)
            tracekv.store_operation(
                Operation.READ, outcome, self._store.engine, started_ns=started, nbytes=entry.size, blocks=added,
                bucket=self._store.bucket, key=path_digest(entry.path), error=message,
            )  # fmt: skip
            if outcome in (Outcome.UNAVAILABLE, Outcome.TIMEOUT, Outcome.DENIED, Outcome.ERROR):
                break
            self._cursors[name.writer] = name.sequence
        return manifests, blocks

    def _run(self) -> None:
        while not self._stop.wait(self._refresh_s):
            try:
                self.refresh()
                self._is_down = False
            except Exception as error:  # the next round may work; a query only misses meanwhile
                if not self._is_down:
                    _log.warning("tracekv: %s can't be refreshed: %s", self._store.url, error)
                self._is_down = True

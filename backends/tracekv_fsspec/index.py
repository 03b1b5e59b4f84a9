"""What the store holds, in memory: key -> place, per layer group and rank.

Keys are chained from the namespace's digest, so one index serves every namespace. Lookups take no lock and do no I/O: a
dictionary's own step is atomic, and an answer that is a moment old is checked when the block is read.

A million blocks have to fit, so a key's value is no object of its own but the :class:`Run` that it shares with its neighbours in the
segment: 64 B for the key, 42 B for its place in the dictionary, 44 B in the run's two byte strings.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import filterfalse, islice, pairwise
from time import monotonic
from typing import NamedTuple

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec.format import padded
from tracekv_fsspec.keys import KEY_BYTES
from tracekv_fsspec.manifest import BlockEntry, Manifest
from tracekv_fsspec.paths import Commit

#: How many keys that were found corrupt are remembered, so that a lookup can say so.
_REMEMBERED = 100_000
#: How long it is believed that a block or segment is gone or broken; then its manifest is read again.
NEGATIVE_S = 60.0
#: Rows of a run; finding one of them searches its keys.
_RUN_ROWS = 256
_ROW = struct.Struct("<QI16s")  # offset, length, checksum


class Shard(NamedTuple):
    """Which part of a block's KV: a layer group on a rank."""

    layer_group: int
    rank: int


class Segment:
    """A committed segment.

    Attributes:
        is_checked: Its header was read and fits what the manifest says.
        fault: What is wrong with it, where something is.
        news_of_ns: When another engine committed it while this one ran (ns since 1970, by that engine's clock), until a block of it
            was offered; else 0.
        used_at: When a block of it was last read (seconds since 1970), for those who decide what to delete.
    """

    __slots__ = (
        "commit",
        "fault",
        "is_checked",
        "namespace",
        "news_of_ns",
        "path",
        "rank",
        "runs",
        "size",
        "used_at",
        "world",
    )

    def __init__(self, path: str, size: int, rank: int, manifest: Manifest, news_of_ns: int = 0) -> None:
        self.path = path
        self.news_of_ns = news_of_ns
        self.size = size
        self.rank = rank
        self.world = manifest.world
        self.namespace = manifest.namespace
        self.commit = Commit(manifest.writer, manifest.sequence)
        self.is_checked = False
        self.fault: Outcome | None = None
        self.used_at = 0
        self.runs: list[Run] = []


class Run:
    """Up to 256 blocks of one layer group in one segment, packed."""

    __slots__ = ("keys", "rows", "segment", "shard")

    def __init__(self, segment: Segment, shard: Shard, entries: Sequence[BlockEntry]) -> None:
        self.segment = segment
        self.shard = shard
        self.keys = b"".join([entry.key for entry in entries])
        self.rows = b"".join([_ROW.pack(entry.offset, entry.length, entry.checksum) for entry in entries])

    def each_key(self) -> list[bytes]:
        """The keys, in the order of the segment."""
        keys = self.keys
        return [keys[start:end] for start, end in pairwise(range(0, len(keys) + KEY_BYTES, KEY_BYTES))]

    def each_place(self) -> list[Place]:
        """Where each block is, in the same order."""
        return list(map(Place._make, _ROW.iter_unpack(self.rows)))

    def stretches(self, first: int, keys: Sequence[bytes]) -> Iterator[Stretch]:
        """Where some of its blocks lie; ``first`` is the position of the first one among the caller's."""
        row = self.ordinal(keys[0])
        if self.keys.startswith(b"".join(keys), row * KEY_BYTES):
            rows = range(row, row + len(keys))
            places = list(_ROW.iter_unpack(self.rows[row * _ROW.size : rows.stop * _ROW.size]))
        else:  # in another order than they were stored
            every = self.each_place()
            places = [every[self.ordinal(key)] for key in keys]
        offsets, lengths, checksums = zip(*places, strict=True)
        begin = 0
        for end in range(1, len(places) + 1):
            if (
                end < len(places)
                and lengths[end] == lengths[begin]
                and offsets[end] == offsets[end - 1] + padded(lengths[begin])
            ):
                continue
            yield Stretch(first + begin, self, offsets[begin], lengths[begin], checksums[begin:end])
            begin = end

    def ordinal(self, key: bytes) -> int:
        """Which of the run's blocks a key is."""
        at = self.keys.find(key)
        while at % KEY_BYTES:  # bytes of two neighbours that look like the key
            at = self.keys.find(key, at + 1)
        return at // KEY_BYTES


class Place(NamedTuple):
    """Where a block's bytes are in its segment, and what they have to be."""

    offset: int
    length: int
    checksum: bytes


def first_missing(known: Mapping[bytes, object], keys: Sequence[bytes], start: int) -> int:
    """The ordinal of the first key from ``start`` on that ``known`` lacks, or ``len(keys)``.

    The walk is in C: a query of a thousand blocks makes several.
    """
    missing = next(filterfalse(known.__contains__, islice(keys, start, None) if start else keys), None)
    return len(keys) if missing is None else keys.index(missing, start)


class Stretch(NamedTuple):
    """Blocks of one run that follow each other without a gap, all of one size.

    Attributes:
        first: Position of the first one's key among those that were asked for; the others' follow.
    """

    first: int
    run: Run
    offset: int
    length: int
    checksums: Sequence[bytes]

    @property
    def blocks(self) -> int:
        """How many they are."""
        return len(self.checksums)

    def part(self, begin: int, end: int) -> Stretch:
        """Some of them."""
        if begin == 0 and end == len(self.checksums):
            return self
        offset = self.offset + begin * padded(self.length)
        return Stretch(self.first + begin, self.run, offset, self.length, self.checksums[begin:end])


class Index:
    """Key -> place for each shard. Written by the stager's threads, read by any.

    Args:
        shards: Every layer group on every rank; blocks of others are ignored.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._runs: dict[Shard, dict[bytes, Run]] = {shard: {} for shard in shards}
        self._commits: dict[Commit, list[Segment]] = {}
        self._faults: dict[tuple[Shard, bytes], tuple[Outcome, float]] = {}
        self._doubted: dict[Commit, float] = {}
        self._shadowed: dict[Commit, set[Commit]] = {}
        self._removed: set[Commit] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def add(self, manifest: Manifest, news_of_ns: int = 0) -> int:
        """Take in what a manifest lists; the first place of a key stays. Returns how many blocks are new.

        Args:
            news_of_ns: See :class:`Segment`.
        """
        commit = Commit(manifest.writer, manifest.sequence)
        segments = [Segment(entry.path, entry.size, entry.rank, manifest, news_of_ns) for entry in manifest.segments]
        groups: dict[tuple[int, int], list[BlockEntry]] = {}
        for entry in manifest.blocks:
            groups.setdefault((entry.segment, entry.layer_group), []).append(entry)
        added = 0
        with self._lock:
            if commit in self._removed:
                return 0
            for segment in self._commits.pop(commit, ()):  # read again: what is left of it is taken in anew
                self._forget_segment(segment, None)
            for (number, layer_group), entries in groups.items():
                segment = segments[number]
                shard = Shard(layer_group, segment.rank)
                runs = self._runs.get(shard)
                if runs is None:
                    continue
                fresh = [entry for entry in entries if entry.key not in runs]
                if len(fresh) < len(entries):
                    # Should the first place go, this one is worth another look.
                    for first in {runs[entry.key].segment.commit for entry in entries if entry.key in runs}:
                        self._shadowed.setdefault(first, set()).add(commit)
                for start in range(0, len(fresh), _RUN_ROWS):
                    run = Run(segment, shard, fresh[start : start + _RUN_ROWS])
                    segment.runs.append(run)
                    for entry in fresh[start : start + _RUN_ROWS]:
                        runs[entry.key] = run
                if self._faults:
                    for entry in fresh:
                        self._faults.pop((shard, entry.key), None)
                added += len(fresh)
            self._commits[commit] = segments
        return added

    def remove(self, commit: Commit, *, for_good: bool) -> int:
        """Forget what a commit added. ``for_good``: a manifest of it that is read later is ignored."""
        with self._lock:
            if for_good:
                self._removed.add(commit)
            self._doubted.pop(commit, None)
            self._doubt_shadowed(commit)
            return sum(self._forget_segment(segment, None) for segment in self._commits.pop(commit, ()))

    def forget_removed(self, listed: Collection[Commit]) -> None:
        """Commits that were removed for good and whose manifests are gone needn't be remembered: nobody reads them any more."""
        with self._lock:
            self._removed.intersection_update(listed)

    def commits(self) -> set[Commit]:
        """What is known now."""
        with self._lock:
            return set(self._commits)

    def segments(self) -> list[Segment]:
        """Every segment that is known now."""
        with self._lock:
            return [segment for segments in self._commits.values() for segment in segments]

    def doubted(self) -> set[Commit]:
        """Commits whose manifests are worth another look.

        Something of them was gone or broken some time ago, or what they have twice went elsewhere.
        """
        now = monotonic()
        with self._lock:
            return {commit for commit, until in self._doubted.items() if until <= now}

    def looked_at(self, commits: Iterable[Commit]) -> None:
        """Another look is under way."""
        with self._lock:
            for commit in commits:
                self._doubted.pop(commit, None)

    def stretches(self, shard: Shard, keys: Sequence[bytes]) -> tuple[list[Stretch], list[int]]:
        """Where the keys' blocks lie, and the positions of keys that the store lacks.

        Keys that follow each other as their blocks do, all of one size, are one stretch. Python's own work is by stretch, not by key.
        """
        found = list(map(self._runs[shard].get, keys))
        stretches: list[Stretch] = []
        missing: list[int] = []
        first = 0
        for end in range(1, len(found) + 1):
            if end < len(found) and found[end] is found[first]:
                continue
            run = found[first]
            if run is None:
                missing.extend(range(first, end))
            else:
                stretches += run.stretches(first, keys[first:end])
            first = end
        return stretches, missing

    def holds(self, shard: Shard, key: bytes) -> bool:
        """Whether the store has a block, as far as is known."""
        return key in self._runs[shard]

    def prefix(self, shard: Shard, keys: Sequence[bytes], start: int = 0) -> int:
        """The ordinal of the first key from ``start`` on that the store lacks, or ``len(keys)``."""
        return first_missing(self._runs[shard], keys, start)

    def news_of(self, shard: Shard, key: bytes) -> int:
        """When a block was committed, if that is news (see :class:`Segment`) and none of its segment was offered before; else 0."""
        run = self._runs[shard].get(key)
        if run is None:
            return 0
        committed, run.segment.news_of_ns = run.segment.news_of_ns, 0
        return committed

    def fault(self, shard: Shard, key: bytes) -> Outcome | None:
        """Why a block that was listed isn't any more; None where nothing is known against it, or not lately."""
        known = self._faults.get((shard, key))
        return known[0] if known is not None and known[1] > monotonic() else None

    def quarantine_block(self, run: Run, key: bytes, outcome: Outcome) -> None:
        """Forget one block whose bytes are wrong; it may be saved anew."""
        with self._lock:
            self._forget(run, key, outcome)
            self._doubted[run.segment.commit] = monotonic() + NEGATIVE_S
            self._doubt_shadowed(run.segment.commit)

    def quarantine_segment(self, segment: Segment, outcome: Outcome) -> int:
        """Forget every block of a segment that is gone or not what it should be. Returns how many."""
        with self._lock:
            if segment.fault is not None:
                return 0
            segment.fault = outcome
            self._doubted[segment.commit] = monotonic() + NEGATIVE_S
            self._doubt_shadowed(segment.commit)
            return self._forget_segment(segment, outcome)

    def _doubt_shadowed(self, commit: Commit) -> None:
        for shadowed in self._shadowed.pop(commit, ()):
            if shadowed in self._commits:
                self._doubted[shadowed] = 0.0

    def _forget_segment(self, segment: Segment, outcome: Outcome | None) -> int:
        return sum(self._forget(run, key, outcome) for run in segment.runs for key in run.each_key())

    def _forget(self, run: Run, key: bytes, outcome: Outcome | None) -> int:
        runs = self._runs[run.shard]
        if runs.get(key) is not run:
            return 0
        del runs[key]
        if outcome is not None:
            if len(self._faults) >= _REMEMBERED:
                del self._faults[next(iter(self._faults))]
            self._faults[run.shard, key] = (outcome, monotonic() + NEGATIVE_S)
        return 1

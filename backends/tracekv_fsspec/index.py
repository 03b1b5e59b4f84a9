"""What the store holds, in memory: key -> place, per layer group and rank.

Keys are chained from the namespace's digest, so one index serves every namespace. Lookups take no lock and do no I/O: a
dictionary's own step is atomic, and an answer that is a moment old is checked when the block is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec.format import Block
from tracekv_fsspec.manifest import Manifest

#: How many keys that were found corrupt are remembered, so that a lookup can say so.
_REMEMBERED = 100_000


class Shard(NamedTuple):
    """Which part of a block's KV: a layer group on a rank."""

    layer_group: int
    rank: int


@dataclass(eq=False)
class Segment:
    """A committed segment; ``is_checked`` once its header was read and fits what the manifest says."""

    path: str
    size: int
    rank: int
    world: int
    namespace: bytes
    writer: bytes
    sequence: int
    is_checked: bool = False
    fault: Outcome | None = None


class Place(NamedTuple):
    """Where a block's bytes are, and what they have to be."""

    segment: Segment
    block: Block


class Index:
    """Key -> place for each shard. Written by the stager's threads, read by any.

    Args:
        shards: Every layer group on every rank; blocks of others are ignored.
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._places: dict[Shard, dict[bytes, Place]] = {shard: {} for shard in shards}
        self._faults: dict[tuple[Shard, bytes], Outcome] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def add(self, manifest: Manifest) -> int:
        """Take in what a manifest lists; the first place of a key stays. Returns how many blocks are new."""
        segments = [
            Segment(
                entry.path,
                entry.size,
                entry.rank,
                manifest.world,
                manifest.namespace,
                manifest.writer,
                manifest.sequence,
            )
            for entry in manifest.segments
        ]
        added = 0
        with self._lock:
            for entry in manifest.blocks:
                segment = segments[entry.segment]
                shard = Shard(entry.layer_group, segment.rank)
                places = self._places.get(shard)
                if places is None or entry.key in places:
                    continue
                block = Block(entry.key, entry.layer_group, 0, entry.tokens, entry.offset, entry.length, entry.checksum)
                places[entry.key] = Place(segment, block)
                self._faults.pop((shard, entry.key), None)
                added += 1
        return added

    def place(self, shard: Shard, key: bytes) -> Place | None:
        """Where a block is, or None."""
        return self._places[shard].get(key)

    def holds(self, shard: Shard, key: bytes) -> bool:
        """Whether the store has a block, as far as is known."""
        return key in self._places[shard]

    def prefix(self, shard: Shard, keys: Sequence[bytes], start: int = 0) -> int:
        """The ordinal of the first key from ``start`` on that the store lacks, or ``len(keys)``."""
        places = self._places[shard]
        for ordinal in range(start, len(keys)):
            if keys[ordinal] not in places:
                return ordinal
        return len(keys)

    def fault(self, shard: Shard, key: bytes) -> Outcome | None:
        """Why a block that was listed isn't any more, or None."""
        return self._faults.get((shard, key))

    def quarantine_block(self, shard: Shard, place: Place, outcome: Outcome) -> None:
        """Forget one block whose bytes are wrong; it may be saved anew."""
        with self._lock:
            self._forget(shard, place.block.key, place.segment, outcome)

    def quarantine_segment(self, segment: Segment, outcome: Outcome) -> int:
        """Forget every block of a segment that is gone or not what it should be. Returns how many."""
        forgotten = 0
        with self._lock:
            if segment.fault is not None:
                return 0
            segment.fault = outcome
            for shard, places in self._places.items():
                for key in [key for key, place in places.items() if place.segment is segment]:
                    forgotten += self._forget(shard, key, segment, outcome)
        return forgotten

    def _forget(self, shard: Shard, key: bytes, segment: Segment, outcome: Outcome) -> int:
        place = self._places[shard].get(key)
        if place is None or place.segment is not segment:
            return 0
        del self._places[shard][key]
        if len(self._faults) >= _REMEMBERED:
            del self._faults[next(iter(self._faults))]
        self._faults[shard, key] = outcome
        return 1

"""Everything that lies in a store, whoever wrote it and for whichever model: for those who look after it, not for engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec.format import BadObject, Block, SegmentHeader, parse_segment
from tracekv_fsspec.manifest import BlockEntry, Manifest, Tombstone, Uses, owner_of, parse
from tracekv_fsspec.paths import Commit, commit_of, segment_of
from tracekv_fsspec.store import Entry, Store, StoreError, read_whole

#: Called with (done, to be done).
Progress = Callable[[int, int], None]
_READERS = 8


def quietly(done: int, total: int) -> None:
    """Progress that nobody watches."""


@dataclass
class StoredCommit:
    """A manifest and the segments that belong to it.

    Attributes:
        deployment: The full digest; None where the manifest can't be read.
        missing: Paths of segments that the manifest lists and that aren't there.
        used_at: When an engine last read of it, or when it was written; seconds since 1970.
        buried_at: When a tombstone was written for it, or None.
    """

    folder: str
    commit: Commit
    entry: Entry
    manifest: Manifest | None = None
    deployment: bytes | None = None
    fault: Outcome | None = None
    segments: list[Entry] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    used_at: float = 0.0
    buried_at: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of manifest and segments."""
        return self.entry.size + sum(segment.size for segment in self.segments)

    @property
    def blocks(self) -> int:
        """Blocks of every layer group and rank."""
        return len(self.manifest.blocks) if self.manifest else 0


@dataclass
class Grave:
    """A tombstone and what it names."""

    folder: str
    entry: Entry
    removed: set[Commit]


@dataclass
class Inventory:
    """What a store holds.

    Attributes:
        orphans: Segments that no manifest lists: of a writer that is at it, or that died.
        uses: What engines wrote of their reads.
        others: Objects that are none of the backend's.
    """

    commits: list[StoredCommit] = field(default_factory=list)
    orphans: list[Entry] = field(default_factory=list)
    graves: list[Grave] = field(default_factory=list)
    uses: list[Entry] = field(default_factory=list)
    others: list[Entry] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is the backend's."""
        small = [entry.size for entry in (*self.orphans, *self.uses, *(grave.entry for grave in self.graves))]
        return sum(commit.nbytes for commit in self.commits) + sum(small)


def survey(store: Store, progress: Progress = quietly) -> Inventory:
    """List everything and read every manifest.

    Raises:
        StoreError: The store can't be listed.
    """
    found = Inventory()
    segments: dict[tuple[str, Commit], list[Entry]] = {}
    small: list[tuple[Entry, str, Commit | None]] = []
    for entry in store.list(""):
        folder = entry.path.split("/", 1)[0]
        if (segment := segment_of(entry.path)) is not None:
            segments.setdefault((folder, segment[0]), []).append(entry)
        elif (name := commit_of(entry.path)) is not None:
            small.append((entry, "tmb" if name[1] else "man", name[0]))
        elif entry.path.startswith(f"{folder}/u/") and entry.path.endswith(".use"):
            small.append((entry, "use", None))
            found.uses.append(entry)
        else:
            found.others.append(entry)
    used: dict[tuple[str, Commit], int] = {}
    done = 0
    with ThreadPoolExecutor(_READERS, thread_name_prefix="tracekv-survey") as pool:
        for (entry, kind, commit), data in zip(small, pool.map(lambda each: _read(store, each[0]), small), strict=True):
            done += 1
            progress(done, len(small))
            folder = entry.path.split("/", 1)[0]
            if kind == "man" and commit is not None:
                found.commits.append(_commit(folder, commit, entry, data))
            elif kind == "tmb":
                _take_tombstone(found, folder, entry, data)
            else:
                _take_uses(used, folder, data)
    for each in found.commits:
        _match(each, segments, used)
    buried = {(grave.folder, commit): grave.entry.modified for grave in found.graves for commit in grave.removed}
    for each in found.commits:
        each.buried_at = buried.get((each.folder, each.commit))
    found.orphans = sorted(entry for left in segments.values() for entry in left)
    return found


def verify(store: Store, commit: StoredCommit) -> dict[str, Outcome]:
    """Read every byte of a commit; what is wrong, by path. Empty where all is right."""
    if commit.manifest is None:
        return {commit.entry.path: commit.fault or Outcome.ERROR}
    wrong = dict.fromkeys(commit.missing, Outcome.MISSING)
    sizes = {segment.path: segment.size for segment in commit.segments}
    for number, listed in enumerate(commit.manifest.segments):
        if listed.path not in sizes:
            continue
        try:
            header, blocks = parse_segment(read_whole(store, listed.path, sizes[listed.path]))
            expected = [entry for entry in commit.manifest.blocks if entry.segment == number]
            if not _belongs(commit, header, listed.rank) or not _agree(blocks, expected):
                raise BadObject(Outcome.FOREIGN, "segment that isn't the one its manifest names")
        except (StoreError, BadObject) as error:
            wrong[listed.path] = error.outcome
    return wrong


def _read(store: Store, entry: Entry) -> bytes | Outcome:
    try:
        return read_whole(store, entry.path, entry.size)
    except StoreError as error:
        return error.outcome


def _commit(folder: str, commit: Commit, entry: Entry, data: bytes | Outcome) -> StoredCommit:
    found = StoredCommit(folder, commit, entry)
    if isinstance(data, Outcome):
        found.fault = data
        return found
    try:
        manifest = parse(Manifest, data, bytes.fromhex(folder))
        if (manifest.writer, manifest.sequence) != commit:
            raise BadObject(Outcome.FOREIGN, "manifest that isn't the one its path names")
    except BadObject as error:
        found.fault = error.outcome
        return found
    found.manifest, found.deployment = manifest, owner_of(data)
    return found


def _take_tombstone(found: Inventory, folder: str, entry: Entry, data: bytes | Outcome) -> None:
    removed: set[Commit] = set()
    if not isinstance(data, Outcome):
        with suppress(BadObject):  # a broken one buries nobody, and goes with a later cleaning
            removed = {Commit(*each) for each in parse(Tombstone, data, bytes.fromhex(folder)).removed}
    found.graves.append(Grave(folder, entry, removed))


def _take_uses(used: dict[tuple[str, Commit], int], folder: str, data: bytes | Outcome) -> None:
    if isinstance(data, Outcome):
        return
    try:
        uses = parse(Uses, data, bytes.fromhex(folder))
    except (BadObject, ValueError):
        return  # nothing is known of those reads; what was written lately is kept all the same
    for writer, sequence, seconds in uses.commits:
        place = (folder, Commit(writer, sequence))
        used[place] = max(seconds, used.get(place, 0))


def _match(
    each: StoredCommit, segments: dict[tuple[str, Commit], list[Entry]], used: dict[tuple[str, Commit], int]
) -> None:
    place = (each.folder, each.commit)
    each.used_at = max(used.get(place, 0), each.entry.modified)
    each.segments = segments.pop(place, [])
    if each.manifest is not None:
        there = {segment.path for segment in each.segments}
        each.missing = [segment.path for segment in each.manifest.segments if segment.path not in there]


def _belongs(commit: StoredCommit, header: SegmentHeader, rank: int) -> bool:
    manifest = commit.manifest
    return manifest is not None and (
        header.deployment, header.namespace, header.writer, header.sequence, header.world, header.rank
    ) == (commit.deployment, manifest.namespace, *commit.commit, manifest.world, rank)  # fmt: skip


def _agree(blocks: Iterable[Block], expected: list[BlockEntry]) -> bool:
    stored = {(block.key, block.layer_group, block.offset, block.length, block.checksum) for block in blocks}
    return {(each.key, each.layer_group, each.offset, each.length, each.checksum) for each in expected} <= stored


def age_s(seconds: float) -> float:
    """How long ago that was."""
    return max(0.0, time.time() - seconds)

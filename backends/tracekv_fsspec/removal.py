"""Deleting from a store while engines use it: tombstone, grace, delete.

A tombstone says which commits go. Engines see it with their next refresh and offer none of their blocks from then on. After a
grace that is longer than a refresh and a load take together, the manifests are deleted, then the segments: so there is no moment at
which a block is listed for an engine that starts and its segment is gone. Whoever is interrupted leaves a tombstone, and the next
cleaning goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tracekv_fsspec.inventory import Grave, Inventory, Progress, StoredCommit, age_s, quietly
from tracekv_fsspec.manifest import Tombstone, pack
from tracekv_fsspec.paths import Commit, new_writer, tombstone_path
from tracekv_fsspec.store import Entry, Store

#: Longer than an engine's refresh and its read deadline together, as they are set by default.
GRACE_S = 15.0
#: A segment without manifest may be of a writer that is at it; after so long it is not.
ORPHAN_S = 3600.0
#: Tombstones and uses of engines that are gone are kept for so long.
KEPT_S = 86_400.0
_DELETERS = 8


@dataclass
class Plan:
    """What is going to be deleted.

    Attributes:
        commits: To be buried, and deleted after the grace.
        graves: Whose commits were buried long enough ago by somebody who didn't get to the end.
        leftovers: Orphans, spent tombstones and stale uses.
    """

    commits: list[StoredCommit] = field(default_factory=list)
    graves: list[StoredCommit] = field(default_factory=list)
    leftovers: list[Entry] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What it frees."""
        return sum(commit.nbytes for commit in (*self.commits, *self.graves)) + sum(
            each.size for each in self.leftovers
        )


def plan_cleaning(
    inventory: Inventory, *, excess: int = 0, idle_s: float | None = None, grace_s: float = GRACE_S
) -> Plan:
    """What to delete so that the store shrinks by ``excess`` bytes: rubbish first, then what was used least recently.

    Args:
        idle_s: Delete whatever wasn't used for so long, too.
    """
    plan = Plan()
    plan.graves = [each for each in inventory.commits if each.buried_at is not None and age_s(each.buried_at) > grace_s]
    plan.leftovers = [entry for entry in inventory.orphans if age_s(entry.modified) > ORPHAN_S]
    there = {(each.folder, each.commit) for each in inventory.commits}
    plan.leftovers += [grave.entry for grave in inventory.graves if _is_spent(grave, there)]
    plan.leftovers += [entry for entry in inventory.uses if age_s(entry.modified) > KEPT_S]
    going = {id(each) for each in plan.graves}
    freed = plan.nbytes
    for each in sorted(inventory.commits, key=lambda commit: commit.used_at):
        if id(each) in going or each.buried_at is not None:
            continue
        if freed < excess or (idle_s is not None and age_s(each.used_at) > idle_s):
            plan.commits.append(each)
            freed += each.nbytes
    return plan


def bury(store: Store, commits: Iterable[StoredCommit]) -> list[str]:
    """Write tombstones, one for each folder; their paths."""
    by_folder: dict[str, list[StoredCommit]] = {}
    for each in commits:
        by_folder.setdefault(each.folder, []).append(each)
    writer = new_writer()
    paths = []
    for folder, group in by_folder.items():
        # Where no manifest could be read there is only the folder's half of the digest, and nobody offers those blocks.
        deployment = next(
            (each.deployment for each in group if each.deployment), bytes.fromhex(folder).ljust(32, b"\0")
        )
        path = tombstone_path(deployment, writer, 0)
        store.put(
            path,
            pack(deployment, Tombstone(writer, 0, [(each.commit.writer, each.commit.sequence) for each in group])),
            create_only=True,
        )
        paths.append(path)
    return paths


def delete(store: Store, commits: Sequence[StoredCommit], progress: Progress = quietly) -> None:
    """Delete buried commits: every manifest first, then the segments."""
    manifests = [each.entry.path for each in commits]
    segments = [segment.path for each in commits for segment in each.segments]
    delete_paths(store, manifests, lambda done, _: progress(done, len(manifests) + len(segments)))
    delete_paths(store, segments, lambda done, _: progress(len(manifests) + done, len(manifests) + len(segments)))


def delete_paths(store: Store, paths: Sequence[str], progress: Progress = quietly) -> None:
    """Delete objects, several at once."""
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="tracekv-delete") as pool:
        for done, _ in enumerate(pool.map(store.delete, paths), 1):
            progress(done, len(paths))


def carry_out(
    store: Store,
    plan: Plan,
    *,
    grace_s: float = GRACE_S,
    sleep: Callable[[float], None] = time.sleep,
    progress: Progress = quietly,
) -> None:
    """Bury, wait, delete.

    Raises:
        StoreError: The store can't be written or deleted from; what was buried stays buried, and the next cleaning goes on.
    """
    if plan.commits:
        bury(store, plan.commits)
    delete_paths(store, [entry.path for entry in plan.leftovers])
    delete(store, plan.graves)
    if plan.commits:
        sleep(grace_s)
        delete(store, plan.commits, progress)


def _is_spent(grave: Grave, there: set[tuple[str, Commit]]) -> bool:
    return age_s(grave.entry.modified) > KEPT_S and not any((grave.folder, commit) in there for commit in grave.removed)

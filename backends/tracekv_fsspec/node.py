"""How the ranks of an engine meet: one round in which each says what it is, and one in which each says that it has the arena.

Both are made inside ``register_kv_cache*``, the only callback that every rank gets once and at which it knows its caches. Whatever
fails on a rank is told to all, so that all raise and none is left waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tracekv.contract import Runtime, current_runtime
from tracekv.contract.reading import LayoutView
from tracekv.journal.process import pid_namespace, start_ticks
from tracekv_fsspec.arena_file import ArenaFile, Whereabouts, attach, create
from tracekv_fsspec.arena_tables import Geometry, tables_bytes
from tracekv_fsspec.format import padded
from tracekv_fsspec.index import Shard
from tracekv_fsspec.settings import Settings


class RanksDiffer(RuntimeError):
    """The ranks don't make up one engine, or another one of them failed."""


class SeveralNodes(NotImplementedError):
    """The ranks are on several hosts, which share no memory."""


class Process(NamedTuple):
    """A rank's process, as it can be told from a later one of the same id."""

    pid: int
    started: int
    namespace: int


class _Rank(NamedTuple):
    """What a rank says. Plain values, since it is pickled."""

    world: int
    rank: int
    host: str
    process: Process
    shape: tuple[Any, ...] = ()
    fingerprint: bytes = b""
    page_bytes: dict[int, int] = {}  # noqa: RUF012  # never changed
    arena: Whereabouts | None = None
    error: str = ""


@dataclass(frozen=True)
class Node:
    """The engine's ranks on this node, met.

    Attributes:
        rank: This process's.
        layout: This rank's caches.
        fingerprint: Digest of all ranks' layouts; that of a single one where they are alike.
        page_bytes: Bytes of a page, for every layer group on every rank.
        processes: By rank.
    """

    rank: int
    world: int
    layout: LayoutView
    fingerprint: bytes
    page_bytes: dict[Shard, int]
    processes: Sequence[Process]
    file: ArenaFile
    geometry: Geometry

    def is_gone(self, rank: int) -> bool:
        """Whether a rank's process has ended. False where its id says nothing here."""
        process = self.processes[rank]
        return process.namespace == pid_namespace() and start_ticks(process.pid) != process.started


def runtime_of(llm_args: Any) -> Runtime:
    """Which rank of its engine this process is.

    With attention data parallelism every rank has a scheduler, requests and whole KV of its own, and may enter no collective
    (contract.md section 1.4, ADP): each is an engine of one rank, with an arena of its own, and they share what is stored.

    Raises:
        UnknownRuntime: The rank can't be told.
    """
    runtime = current_runtime()
    if getattr(llm_args, "enable_attention_dp", False) is True:
        return Runtime(host=runtime.host)
    return runtime


def meet(runtime: Runtime, settings: Settings, layout: Callable[[], LayoutView]) -> Node:
    """Enter the engine's meeting; collective. The leader makes the arena, every rank maps it.

    Args:
        layout: Reads this rank's caches; what it raises is raised here, after the others were told.

    Raises:
        SeveralNodes: The ranks are on different hosts.
        RanksDiffer: Their worlds or layouts differ, or another rank failed.
        ArenaTooSmall: There is no room for a block.
        ArenaUnreachable: The arena's directory isn't the leader's.
    """
    process = Process(os.getpid(), start_ticks(os.getpid()) or 0, pid_namespace())
    mine = _Rank(runtime.world, runtime.rank, runtime.host, process)
    view: LayoutView | None = None
    file: ArenaFile | None = None
    failure: Exception | None = None
    try:
        view = layout()
        mine = mine._replace(
            shape=_shape(view),
            fingerprint=view.fingerprint(),
            page_bytes={group.layer_group_id: group.bytes_per_page for group in view.groups},
        )
        if runtime.rank == 0:
            file = _make_arena(settings, runtime.world, mine.page_bytes)
            mine = mine._replace(arena=file.whereabouts)
    except Exception as error:  # the others wait in the collective below
        failure = error
        mine = mine._replace(error=_told(error))
    try:
        ranks: list[_Rank] = runtime.allgather(mine)
        if failure is not None:
            raise failure
        _check(ranks)
        assert view is not None  # or there was a failure
        node = _enter(runtime, view, ranks, file)
    except BaseException:
        if file is not None:
            file.close()
        raise
    return node


def _make_arena(settings: Settings, world: int, page_bytes: dict[int, int]) -> ArenaFile:
    # The others' pages are about as large; what they really are is known after the gathering.
    least = world * sum(map(padded, page_bytes.values()))
    directory = Path(settings.arena_dir) if settings.arena_dir else None
    return create(directory, settings.arena_bytes, tables_bytes(world, settings.arena_bytes), least)


def _enter(runtime: Runtime, layout: LayoutView, ranks: Sequence[_Rank], file: ArenaFile | None) -> Node:
    """Map the arena, and hear that every rank has."""
    failure: Exception | None = None
    node: Node | None = None
    try:
        whereabouts = ranks[0].arena
        assert whereabouts is not None  # or the leader told of an error
        file = file or attach(whereabouts)
        page_bytes = {Shard(group, rank.rank): size for rank in ranks for group, size in rank.page_bytes.items()}
        node = Node(
            rank=runtime.rank,
            world=runtime.world,
            layout=layout,
            fingerprint=_fingerprint(ranks),
            page_bytes=page_bytes,
            processes=[rank.process for rank in ranks],
            file=file,
            geometry=Geometry(page_bytes, runtime.world, whereabouts),
        )
    except Exception as error:
        failure = error
    errors = runtime.allgather("" if failure is None else _told(failure))
    if failure is not None:
        raise failure
    _raise_told(enumerate(errors))
    assert node is not None
    return node


def _check(ranks: Sequence[_Rank]) -> None:
    """Alike on every rank, since all see the same."""
    hosts = sorted({rank.host for rank in ranks})
    if len(hosts) > 1:
        raise SeveralNodes(
            f"tracekv: the ranks are on {len(hosts)} hosts ({', '.join(hosts)}). tracekv_fsspec stages the KV of all ranks in one "
            "shared-memory arena, so an engine has to fit on one node. Run tensor parallelism within a node, or trace another "
            "connector with TRACEKV_CONNECTOR."
        )
    _raise_told((rank.rank, rank.error) for rank in ranks)
    if [rank.rank for rank in ranks] != list(range(len(ranks))) or {rank.world for rank in ranks} != {len(ranks)}:
        said = ", ".join(f"{rank.rank} of {rank.world}" for rank in ranks)
        raise RanksDiffer(
            f"tracekv: {len(ranks)} ranks met and say that they are {said}. Every rank needs its own number and the same world."
        )
    for rank in ranks:
        if rank.shape != ranks[0].shape:
            raise RanksDiffer(
                f"tracekv: the KV caches of rank {rank.rank} are laid out differently from those of rank 0: "
                f"{_difference(ranks[0], rank)}. All ranks of an engine need the same model, block size and KV dtype."
            )


def _raise_told(errors: Any) -> None:
    for rank, error in errors:
        if error:
            raise RanksDiffer(f"tracekv: rank {rank} of the engine failed while it registered its KV caches: {error}")


def _shape(layout: LayoutView) -> tuple[Any, ...]:
    """What has to be alike on all ranks: all but the sizes, since KV heads can be shared out unevenly."""
    groups = tuple(
        (
            group.layer_group_id,
            group.window_size,
            tuple(group.layer_ids),
            tuple(region.roles for region in group.regions),
        )
        for group in layout.groups
    )
    return layout.tokens_per_block, layout.dtype, groups


def _difference(one: _Rank, other: _Rank) -> str:
    for name, mine, theirs in zip(("tokens per block", "dtype"), one.shape, other.shape, strict=False):
        if mine != theirs:
            return f"{name} {theirs} in place of {mine}"
    return "other layer groups, windows or layers"


def _fingerprint(ranks: Sequence[_Rank]) -> bytes:
    found = [rank.fingerprint for rank in ranks]
    return found[0] if len(set(found)) == 1 else sha256(b"".join(found)).digest()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).removeprefix('tracekv: ')}"

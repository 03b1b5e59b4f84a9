"""How ranks meet: what they agree on, and what all of them are told when they don't. Ranks are threads that exchange pickles."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.harness.two_threads import Meeting, ThreadRanks
from tracekv.contract import Runtime, use_runtime
from tracekv.contract.reading import GroupView, LayoutView, RegionView
from tracekv_fsspec import arena_file
from tracekv_fsspec.arena import ArenaTooSmall
from tracekv_fsspec.arena_file import ArenaUnreachable
from tracekv_fsspec.index import Shard
from tracekv_fsspec.node import Process, RanksDiffer, SeveralNodes, meet, runtime_of
from tracekv_fsspec.settings import Settings

ROOM = 1 << 20


def layout(size=5000, *, tokens=32, dtype="torch.float16", windows=(None, 128)):
    groups = tuple(
        GroupView(number, window, (number,), (RegionView(size, size, 8, ("key", "value"), None),))
        for number, window in enumerate(windows)
    )
    return LayoutView(tokens, dtype, groups)


class Rank:
    """What a rank brings to the meeting."""

    def __init__(self, **more):
        self.layout = layout
        self.host = "here"
        self.world = 2
        self.rank = None
        vars(self).update(more)


def meeting(tmp_path, zero=None, one=None, *, capacity=ROOM):
    """What the two ranks come away with: a :class:`Node` or an error, by rank."""
    settings = Settings(arena_bytes=capacity, arena_dir=str(tmp_path))
    room, answers = Meeting(), {}

    def run(number, rank):
        collectives = ThreadRanks(number, room)
        runtime = Runtime(number if rank.rank is None else rank.rank, rank.world, rank.host, collectives.allgather)
        try:
            answers[number] = meet(runtime, settings, rank.layout)
        except Exception as error:
            answers[number] = error
        finally:
            with room.changed:
                room.gone.add(number)
                room.changed.notify_all()

    threads = [threading.Thread(target=run, args=(number, rank or Rank())) for number, rank in enumerate((zero, one))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[0], answers[1]]


def left(tmp_path):
    return list(tmp_path.glob("tracekv-arena-*"))


def test_both_ranks_map_one_file(tmp_path):
    zero, one = meeting(tmp_path)
    assert (zero.rank, one.rank, zero.world, one.world) == (0, 1, 2, 2)
    assert len(left(tmp_path)) == 1
    assert zero.page_bytes == one.page_bytes == {Shard(group, rank): 5000 for group in (0, 1) for rank in (0, 1)}
    assert [zero.geometry.place(shard) for shard in zero.page_bytes] == [
        one.geometry.place(shard) for shard in one.page_bytes
    ]
    zero.file.buffer[-4:] = b"same"
    assert bytes(one.file.buffer[-4:]) == b"same"
    assert zero.fingerprint == one.fingerprint == layout().fingerprint()
    one.file.close()  # another rank's: the leader's stays
    assert len(left(tmp_path)) == 1
    zero.file.close()
    assert left(tmp_path) == []


def test_a_world_of_one_needs_no_second_rank(tmp_path):
    node = meet(Runtime(host="here"), Settings(arena_bytes=ROOM, arena_dir=str(tmp_path)), layout)
    assert (node.world, list(node.page_bytes)) == (1, [Shard(0, 0), Shard(1, 0)])
    assert node.fingerprint == layout().fingerprint()


def test_ranks_may_hold_different_shares_of_the_heads(tmp_path):
    zero, one = meeting(tmp_path, one=Rank(layout=lambda: layout(9000)))
    assert zero.page_bytes == one.page_bytes
    assert (one.page_bytes[Shard(0, 0)], one.page_bytes[Shard(0, 1)]) == (5000, 9000)
    assert zero.fingerprint == one.fingerprint
    assert zero.fingerprint not in (layout().fingerprint(), layout(9000).fingerprint())


def test_ranks_on_two_hosts_are_refused_everywhere(tmp_path):
    answers = meeting(tmp_path, one=Rank(host="there"))
    assert [type(error) for error in answers] == [SeveralNodes] * 2
    assert "2 hosts (here, there)" in str(answers[0])
    assert isinstance(answers[1], NotImplementedError)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"tokens": 16}, "tokens per block 16 in place of 32"),
        ({"dtype": "torch.float8"}, "dtype torch.float8 in place of torch.float16"),
        ({"windows": (None,)}, "other layer groups"),
        ({"windows": (None, 64)}, "other layer groups"),
    ],
)
def test_layouts_that_differ_are_refused_everywhere(tmp_path, other, told):
    answers = meeting(tmp_path, one=Rank(layout=lambda: layout(**other)))
    assert [type(error) for error in answers] == [RanksDiffer] * 2
    assert all(told in str(error) and "rank 1" in str(error) for error in answers)
    assert left(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"world": 3}, {"rank": 0}])
def test_ranks_that_dont_make_up_a_world_are_refused_everywhere(tmp_path, wrong):
    answers = meeting(tmp_path, one=Rank(**wrong))
    assert [type(error) for error in answers] == [RanksDiffer] * 2
    assert left(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_can_not_read_is_told_to_the_other(tmp_path, rank):
    def fail():
        raise ValueError("tracekv: no block size")

    ranks = [None, None]
    ranks[rank] = Rank(layout=fail)
    answers = meeting(tmp_path, *ranks)
    assert isinstance(answers[rank], ValueError)
    assert isinstance(answers[1 - rank], RanksDiffer)
    assert f"rank {rank} of the engine failed" in str(answers[1 - rank])
    assert "ValueError: no block size" in str(answers[1 - rank])
    assert left(tmp_path) == []


def test_an_arena_that_is_too_small_for_all_shards_is_refused_everywhere(tmp_path):
    answers = meeting(tmp_path, one=Rank(layout=lambda: layout(9000)), capacity=2 * 2 * 8192)
    assert [type(error) for error in answers] == [ArenaTooSmall] * 2
    assert left(tmp_path) == []


def test_no_room_at_the_leaders_is_told_to_the_other(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arena_file.os, "posix_fallocate", full)
    zero, one = meeting(tmp_path)
    assert isinstance(zero, ArenaTooSmall)
    assert isinstance(one, RanksDiffer)
    assert all("TRACEKV_FSSPEC__ARENA_BYTES" in str(error) and str(tmp_path) in str(error) for error in (zero, one))


def test_a_rank_that_can_not_map_the_file_is_told_to_the_leader(tmp_path, monkeypatch):
    def unreachable(whereabouts):
        raise ArenaUnreachable("tracekv: this rank can't map it")

    monkeypatch.setattr("tracekv_fsspec.node.attach", unreachable)
    zero, one = meeting(tmp_path)
    assert isinstance(zero, RanksDiffer)
    assert isinstance(one, ArenaUnreachable)
    assert "rank 1 of the engine failed" in str(zero)
    assert left(tmp_path) == []


def test_a_process_that_ended_is_told_from_one_that_runs(tmp_path):
    node = meet(Runtime(host="here"), Settings(arena_bytes=ROOM, arena_dir=str(tmp_path)), layout)
    (process,) = node.processes
    assert process.pid == os.getpid()
    assert not node.is_gone(0)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for other, is_gone in (
        (process._replace(pid=child), True),  # a zombie
        (process._replace(started=process.started - 1), True),  # its id was given to another
        (Process(child, 1, process.namespace + 1), False),  # of another container: its id says nothing
    ):
        assert replace(node, processes=[other]).is_gone(0) is is_gone
    os.waitpid(child, 0)


def test_with_attention_data_parallelism_each_rank_is_an_engine_of_its_own():
    def never(value):
        raise AssertionError("a collective was entered")

    use_runtime(Runtime(1, 2, "here", never))
    try:
        runtime = runtime_of(SimpleNamespace(enable_attention_dp=True))
        assert (runtime.rank, runtime.world, runtime.allgather("mine")) == (0, 1, ["mine"])
        assert runtime_of(SimpleNamespace(enable_attention_dp=False)).world == 2
        assert runtime_of(None).rank == 1
    finally:
        use_runtime(None)

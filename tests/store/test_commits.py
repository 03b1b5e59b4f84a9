"""Commits are written several at a time, and appear in their order."""

from __future__ import annotations

import threading

import pytest

from tests.store.node import DEPLOYMENT, FULL, WAIT_S, Node, keys
from tracekv.journal.records import Drop
from tracekv.journal.vocabulary import DropReason, Outcome
from tracekv_fsspec.keys import namespace_digest
from tracekv_fsspec.paths import commit_of, segment_of
from tracekv_fsspec.store import open_store
from tracekv_fsspec.store_errors import StoreError
from tracekv_fsspec.wrappers.base import Wrapper

TENANTS = [namespace_digest(DEPLOYMENT.digest(), cache_salt=name) for name in ("a", "b", "c")]


class Watched(Wrapper):
    """Notes what is written, and holds up or refuses the segment of the first commit.

    Attributes:
        written: What was put, in its order: ``segment`` or ``manifest``, and the number of its commit.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.written = []
        self.may_write_first = threading.Event()
        self.second_is_there = threading.Event()
        self.refusal = None

    def put(self, path, *parts, create_only):
        segment = segment_of(path)
        what = ("segment", segment[0].sequence) if segment else ("manifest", commit_of(path)[0].sequence)
        if what == ("segment", 0):
            assert self.may_write_first.wait(WAIT_S)
            if self.refusal is not None:
                raise self.refusal
        super().put(path, *parts, create_only=create_only)
        self.written.append(what)
        if what == ("segment", 1):
            self.second_is_there.set()


@pytest.fixture
def two_commits(tmp_path):
    """A store that waits with the first of three commits, and the node that writes them."""
    url = (tmp_path / "kv").as_uri()
    store = Watched(open_store(url))
    node = Node(url, store=store)
    for number, tenant in enumerate(TENANTS):
        node.submit(keys(2, seed=number), tenant, request_id=number)
        node.stager.writer.request_ended(number)
    assert store.second_is_there.wait(WAIT_S)
    yield store, node
    store.may_write_first.set()
    node.stager.close()


def test_a_segment_is_written_while_another_one_is_and_its_manifest_waits_for_that_ones(two_commits, node):
    store, writer = two_commits
    reader = node()
    assert store.written == [("segment", 1)]
    assert reader.stager.catalog.refresh() == (0, 0)
    store.may_write_first.set()
    assert writer.stager.flush(WAIT_S)
    assert [number for what, number in store.written if what == "manifest"] == [0, 1, 2]
    assert reader.stager.catalog.refresh() == (3, 6)


def test_those_behind_a_commit_that_fails_are_stored(two_commits, node, records):
    store, writer = two_commits
    store.refusal = StoreError(Outcome.NO_SPACE, "no space left")
    store.may_write_first.set()
    assert writer.stager.flush(WAIT_S)
    assert [(drop.request_id, drop.blocks, drop.reason) for drop in records.of(Drop)] == [(0, 2, DropReason.NO_SPACE)]
    assert [number for what, number in store.written if what == "manifest"] == [1, 2]
    reader = node()
    assert [reader.stager.index.holds(FULL, keys(2, seed=seed)[0]) for seed in range(3)] == [False, True, True]


def test_all_of_them_are_stored_when_the_engine_ends(two_commits, node):
    store, writer = two_commits
    closing = threading.Thread(target=writer.stager.close)
    closing.start()
    store.may_write_first.set()
    closing.join(WAIT_S)
    assert len(node().stager.index) == 6

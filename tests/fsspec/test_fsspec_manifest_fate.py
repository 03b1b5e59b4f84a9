"""Whether a commit's segments stay, by what became of each try of its manifest: a store of files behind the real wrappers."""

from __future__ import annotations

import pytest

from tests.store.node import Node, keys
from tracekv.journal.records import Drop, StoreOperation
from tracekv.journal.vocabulary import DropReason, Operation, Outcome
from tracekv_fsspec.store import Deadlines, StoreError, open_engine
from tracekv_fsspec.wrappers import guarded
from tracekv_fsspec.wrappers.base import Wrapper

DEADLINES = Deadlines(2.0, 5.0)
REFUSALS = pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (Outcome.DENIED, DropReason.STORE_REFUSED),
        (Outcome.NO_SPACE, DropReason.NO_SPACE),
        (Outcome.MISSING, DropReason.STORE_REFUSED),
    ],
)


class Fickle(Wrapper):
    """Has a script for the tries of a manifest: whether each gets through, and how it fails all the same."""

    def __init__(self, inner, tries):
        super().__init__(inner)
        self.tries = list(tries)

    def put(self, path, *parts, create_only):
        gets_through, outcome = self.tries.pop(0) if path.endswith(".man") and self.tries else (True, None)
        if gets_through:
            super().put(path, *parts, create_only=create_only)
        if outcome is not None:
            raise StoreError(outcome, f"put {path}: by the script")


@pytest.fixture
def nodes(tmp_path):
    """Make nodes of one folder; ``tries`` is the script of the first manifest."""
    made, url = [], (tmp_path / "kv").as_uri()

    def make(*tries):
        store = guarded(Fickle(open_engine(url, deadlines=DEADLINES), tries), DEADLINES)
        made.append(Node(url, store=store, deadlines=DEADLINES))
        return made[-1]

    yield make
    for node in made:
        node.stager.close()


def stored(tmp_path):
    return sorted(path.suffix for path in (tmp_path / "kv").rglob("*.*") if path.is_file())


def manifest_tries(records):
    """How many tries the store operations of manifests report."""
    manifests = [each for each in records.of(StoreOperation) if each.operation is Operation.PUT][1:]
    return [each.attempts for each in manifests]


@REFUSALS
def test_segments_stay_where_a_manifest_got_through_unheard_before_it_was_refused(
    nodes, tmp_path, records, refused, reason
):
    nodes((True, Outcome.TIMEOUT), (False, refused)).save(keys(3))
    assert [drop.reason for drop in records.of(Drop)] == [reason]
    assert stored(tmp_path) == [".man", ".seg"]
    other = nodes()
    ticket, taken, why_not = other.stage(keys(3))
    assert (taken, why_not) == (3, None)
    assert other.is_right(ticket, 3)


@REFUSALS
def test_segments_stay_where_nobody_knows_whether_the_manifest_got_through(nodes, tmp_path, records, refused, reason):
    nodes((False, Outcome.TIMEOUT), (False, refused)).save(keys(3))
    assert [drop.reason for drop in records.of(Drop)] == [reason]
    assert stored(tmp_path) == [".seg"]
    assert nodes().stage(keys(3))[1] == 0


@REFUSALS
def test_segments_go_with_a_manifest_that_was_refused_at_its_first_try(nodes, tmp_path, records, refused, reason):
    nodes((False, refused)).save(keys(3))
    assert [drop.reason for drop in records.of(Drop)] == [reason]
    assert stored(tmp_path) == []
    assert nodes().stage(keys(3))[1] == 0


def test_an_unheard_manifest_that_is_found_in_its_place_is_stored(nodes, tmp_path, records):
    nodes((True, Outcome.TIMEOUT)).save(keys(3))
    assert records.of(Drop) == []
    assert manifest_tries(records) == [2]
    assert stored(tmp_path) == [".man", ".seg"]

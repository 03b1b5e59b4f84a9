"""What metadata of a known shape plans, for connectors that tell nothing themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker
from tracekv.contract import SchedulerOutput
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction, Source


@dataclass
class Files:
    load: list = field(default_factory=list)
    save: list = field(default_factory=list)


@dataclass
class OtherFiles(Files):
    """A class of its own: a shape is looked for once per class."""


@dataclass
class Names(Files):
    """Lists of something else."""


class Opaque:
    load = 7


def planned(records, metadata):
    class Planning(FlatScheduler):
        def build_connector_meta(self, scheduler_output):
            return metadata

    worker = tracekv.trace(TensorWorker)(None)
    worker.register_kv_caches(torch.zeros(16, 2, 2, 8))
    tracekv.trace(Planning)(None).build_connector_meta(SchedulerOutput())
    found = [(each.direction, each.layer_group, each.pages, each.nbytes) for each in records(Transfer)]
    assert {each.source for each in records(Transfer)} <= {Source.PLANNED}
    return found


def test_files_and_pages_are_told_by_direction_with_their_bytes(records):
    page = 2 * 2 * 8 * 4
    assert planned(records, Files([("a.pt", 3), ("b.pt", 5)], [("c.pt", 7)])) == [
        (Direction.LOAD, 0, [3, 5], 2 * page),
        (Direction.SAVE, 0, [7], page),
    ]


def test_a_layer_group_in_between_is_told_too(records):
    told = planned(records, OtherFiles([("a", 1, 4), ("b", 0, 5), ("c", 1, 6)]))
    assert [each[:3] for each in told] == [(Direction.LOAD, 1, [4, 6]), (Direction.LOAD, 0, [5])]


@pytest.mark.parametrize("metadata", [None, b"bytes", {"load": [("a", 1)]}, Opaque(), Names(["a"], [])])
def test_metadata_of_another_shape_plans_nothing(records, metadata):
    assert planned(records, metadata) == []

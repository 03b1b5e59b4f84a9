"""Random schedules: cancellations, lost pages, replays and new engines in any order; tokens equal, and no page of another changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.fsspec.guarded import Careless, Guarded
from tracekv.testing import random_schedules
from tracekv_fsspec import Scheduler

pytestmark = pytest.mark.soak

#: Twelve blocks of the kit's models: less than what requests at once need.
TINY = 12 * 16 * 1024
BASE = {
    "TRACEKV_AGENT": "off",
    "TRACEKV_FSSPEC__URL": "file://{folder}/kv",
    "TRACEKV_FSSPEC__MODEL_ID": "schedules",
    "TRACEKV_FSSPEC__ARENA_BYTES": str(8 << 20),
}
WAITING = {**BASE, "TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000"}
PARKING = {**BASE, "TRACEKV_FSSPEC__OFFER": "async"}
PARTIAL = {**PARKING, "TRACEKV_FSSPEC__PARTIAL_BLOCKS": "true"}
WINDOW = {**WAITING, "TRACEKV_FSSPEC__WINDOW_LOOKUP": "window", "TRACEKV_FSSPEC__PARTIAL_BLOCKS": "true"}
FULL = {**WAITING, "TRACEKV_FSSPEC__ARENA_BYTES": str(TINY)}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class LeavesBeginningsOut(Scheduler):
    """Stores no sliding group's first block, as if the device had kept it: only window lookups can serve what is stored."""

    def wait_for_initialization(self):
        super().wait_for_initialization()
        windows = {group.layer_group_id: group.window_size for group in self._engine.layout.groups}
        saves = self._planner._saves
        pages = saves._pages

        def without_the_first(request, block, position):
            found = pages(request, block, position)
            return {shard: page for shard, page in found.items() if block.ordinal or not windows[shard.layer_group]}

        saves._pages = without_the_first


def schedules(environment, worker=Guarded, scheduler=Scheduler, **more):
    return random_schedules(scheduler, worker, environment=environment, patience_s=20.0, **{"max_examples": 6, **more})


TestWaiting = schedules(WAITING).TestCase
TestParking = schedules(PARKING, options={"overlap": True}).TestCase
TestWindows = schedules(WAITING, groups=2).TestCase
TestWindowLookup = schedules(
    WINDOW,
    scheduler=LeavesBeginningsOut,
    groups=2,
    tokens_per_block=32,  # two blocks to a window
    options={"partial_reuse": True, "chunk_tokens": 256},
    max_examples=12,
).TestCase
TestPartialBlocks = schedules(PARTIAL, options={"partial_reuse": True}).TestCase
TestFullArena = schedules(FULL, options={"overlap": True}).TestCase


def test_a_worker_that_writes_behind_its_pages_is_found_out():
    machine = schedules(WAITING, Careless, max_examples=30)
    with pytest.raises(AssertionError, match="OtherPagesChanged"):
        run_state_machine_as_test(
            machine, settings=settings(machine.TestCase.settings, derandomize=True, phases=(Phase.generate,))
        )

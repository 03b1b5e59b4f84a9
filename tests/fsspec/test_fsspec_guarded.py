"""Requests that are cancelled or begin anew in any phase, under a worker that compares every page around its callbacks."""

from __future__ import annotations

import pytest
import torch

from tests.fsspec.guarded import Careless, Guarded
from tracekv.testing import Kit, matrix
from tracekv.testing.verdicts import Verdict
from tracekv_fsspec import Scheduler

BASE = {
    "TRACEKV_FSSPEC__URL": "file://{folder}/kv",
    "TRACEKV_FSSPEC__MODEL_ID": "guarded",
    "TRACEKV_FSSPEC__ARENA_BYTES": str(8 << 20),
}
WAYS = {
    "waiting": {"TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000"},
    "async": {"TRACEKV_FSSPEC__OFFER": "async"},
}
CELLS = (
    "cancel-waiting",
    "cancel-prefill",
    "overlap-cancel-decode",
    "replay-prefill",
    "overlap-replay-decode",
    "partial",
)


def kit(worker, way):
    torch.set_num_threads(1)
    # Comparing copies of pages is no I/O of the connector's: nothing is observed here.
    return Kit(Scheduler, worker, environment={**BASE, **WAYS[way]}, watch=False)


@pytest.mark.parametrize("way", WAYS)
def test_no_page_but_those_that_loads_name_changes(way):
    cells = [cell for story in CELLS for cell in matrix(16, f"v2-groups2/{story}")]
    if way == "async":
        cells += [cell for story in ("cancel-parked", "overlap-cancel-parked") for cell in matrix(16, f"v2/{story}")]
    with kit(Guarded, way) as guarded:
        results = [guarded.run(cell) for cell in cells]
    assert {result.name: (result.verdict, result.faults) for result in results} == {
        cell.name: (Verdict.OK, []) for cell in cells
    }


def test_a_load_that_goes_on_into_the_next_page_is_found_out():
    """The negative control."""
    (cell,) = matrix(16, "v2/warm")
    with kit(Careless, "waiting") as careless:
        result = careless.run(cell)
    assert result.verdict is Verdict.BROKEN
    assert any("OtherPagesChanged" in fault for fault in result.faults)

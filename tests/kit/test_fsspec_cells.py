"""tracekv_fsspec in the kit: clean on one rank and on two; cells about parked loads need OFFER=async."""

from __future__ import annotations

import pytest

from tracekv.testing import Kit, matrix
from tracekv.testing.verdicts import Verdict
from tracekv_fsspec import Scheduler, Worker

ENVIRONMENT = {
    "TRACEKV_FSSPEC__URL": "file://{folder}/kv",
    "TRACEKV_FSSPEC__MODEL_ID": "kit",
    "TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000",
    "TRACEKV_FSSPEC__ARENA_BYTES": str(64 << 20),
}
STORIES = ("warm", "chunked", "device-reuse", "whole-blocks", "overlap-stop", "cancel-prefill", "salt", "image")


@pytest.fixture(scope="module")
def kit():
    with Kit(Scheduler, Worker, environment=ENVIRONMENT) as kit:
        yield kit


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("cache", ["v1", "v2", "v2-groups2"])
def test_a_cell_on_one_rank_is_clean(kit, cache, story):
    (cell,) = matrix(16, f"{cache}/{story}")
    result = kit.run(cell)
    assert (result.verdict, result.faults) == (Verdict.OK, [])


@pytest.mark.parametrize("story", ["warm", "together", "chunked"])
@pytest.mark.parametrize("cache", ["v1", "v2", "v2-groups2"])
def test_a_cell_on_two_ranks_is_clean(kit, cache, story):
    (cell,) = matrix(16, f"{cache}/ranks2/{story}")
    result = kit.run(cell)
    assert (result.verdict, result.faults) == (Verdict.OK, [])


@pytest.fixture(scope="module")
def parking():
    with Kit(Scheduler, Worker, environment={**ENVIRONMENT, "TRACEKV_FSSPEC__OFFER": "async"}) as kit:
        yield kit


PARKED = (
    "parked",
    "ranks2/parked",
    "overlap-parked",
    "cancel-parked",
    "overlap-cancel-parked",
    "ranks2/overlap-cancel-parked",
)


@pytest.mark.parametrize("cache", ["v2", "v2-groups2"])
def test_a_rank_with_a_cancelled_load_of_its_own_is_clean(parking, cache):
    """contract.md section 1.6: with attention data parallelism a cancel waits for the connector."""
    (cell,) = matrix(16, f"{cache}/ranks2/attention-dp-cancel-parked")
    result = parking.run(cell)
    assert (result.verdict, result.faults) == (Verdict.OK, [])


@pytest.mark.parametrize("cache", ["v2", "v2-groups2"])
def test_ranks_that_poll_inside_a_pass_are_clean(parking, cache):
    """contract.md section 1.6, the ADP branch: parking has left neither a batch nor a page to pad one."""
    (cell,) = matrix(16, f"{cache}/ranks2/attention-dp-parked")
    result = parking.run(cell)
    assert (result.verdict, result.faults) == (Verdict.OK, [])


@pytest.mark.parametrize("story", PARKED)
@pytest.mark.parametrize("cache", ["v1", "v2", "v2-groups2"])
def test_a_cell_with_parked_loads_is_clean(parking, cache, story):
    (cell,) = matrix(16, f"{cache}/{story}")
    result = parking.run(cell)
    assert (result.verdict, result.faults) == (Verdict.OK, [])


def test_without_parking_a_cell_about_it_is_not_supported(kit):
    (cell,) = matrix(16, "v2/parked")
    result = kit.run(cell)
    assert result.verdict is Verdict.NOT_SUPPORTED
    assert "no query was answered asynchronously" in result.reason

"""What the kit says of connectors that are wrong, limited, or of another kind than a cell."""

from __future__ import annotations

import pytest

from examples import persistent_connector as flat
from tests.kit import broken
from tracekv.contract import KvCacheConnectorScheduler
from tracekv.testing import Kit, matrix, minimal, with_fault
from tracekv.testing.limits import limits
from tracekv.testing.verdicts import Verdict


def played(cell, scheduler=minimal.Scheduler, worker=minimal.Worker, **options):
    options.setdefault("environment", {minimal.VARIABLE: "{folder}"})
    with Kit(scheduler, worker, **options) as kit:
        (found,) = matrix(16, cell)
        return kit.run(found)


class SharesBetweenTenants(minimal.Scheduler):
    def seed(self, request):
        return b""


class LoadsAnotherPage(minimal.Worker):
    """Writes the first block's KV into every page: silent, and all rules about pages are kept."""

    def load(self, moves):
        super().load(moves)
        for move in moves:
            self.page(move.layer_group, move.page).copy_(self.store[moves[0].key, move.layer_group])


class NeverReturnsALoad(minimal.ParkingWorker):
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


class NoUrl(minimal.Scheduler):
    def __init__(self, llm_args):
        raise ValueError("no URL")


@pytest.mark.parametrize("field", ["salt", "lora", "image"])
def test_kv_that_is_shared_between_tenants_shows_as_unequal_tokens(field):
    result = played(f"v2/{field}", SharesBetweenTenants)
    assert result.verdict is Verdict.BROKEN
    assert any("answered differently" in fault for fault in result.faults)
    assert any("tokens of KV that was stored for another" in fault for fault in result.faults)


def test_the_same_story_with_keys_that_hold_the_tenant_is_clean():
    """The negative control of the test above."""
    assert played("v2/salt").verdict is Verdict.OK


@pytest.mark.parametrize("cache", ["v1", "v2", "v2-groups2"])
def test_wrong_kv_shows_as_unequal_tokens_in_every_cache(cache):
    result = played(f"{cache}/warm", worker=LoadsAnotherPage)
    assert result.verdict is Verdict.BROKEN
    assert "answered differently" in result.faults[0]
    assert [line.tokens_equal for line in result.requests][:2] == [True, False]


def test_a_key_without_its_prefix_is_found_out():
    result = played("v2/prefix", broken.Scheduler)
    assert result.verdict is Verdict.BROKEN
    assert "answered differently" in result.faults[0]


def test_a_request_that_is_parked_for_ever_ends_the_cell():
    result = played("v2/parked", minimal.ParkingScheduler, NeverReturnsALoad, patience_s=0.3)
    assert result.verdict is Verdict.BROKEN
    assert (
        "nothing was scheduled, and these are left: request 1 (DISAGG_GENERATION_TRANS_IN_PROGRESS)" in result.faults[0]
    )


def test_what_a_connector_raises_is_named_with_its_callback():
    failing = with_fault(minimal.Worker, OSError("the store is gone"), "start_load_kv", after=3)
    result = played("v2/warm", worker=failing)
    assert result.verdict is Verdict.BROKEN
    assert result.faults[0] == "the engine ended: OSError: the store is gone"
    assert any(fault.startswith("W10 violation at start_load_kv") for fault in result.faults)


def test_bytes_are_those_of_the_pages():
    result = played("v2/warm")
    page = 16 * 2 * 2 * 2 * 32 * 4  # tokens, layers, key and value, heads, head size, float32
    assert result.nbytes == dict.fromkeys(("load reported", "load observed"), 5 * page) | dict.fromkeys(
        ("save reported", "save observed"), 7 * page
    )
    assert result.is_watch_complete


def test_a_cell_that_a_connector_never_reaches_is_not_supported():
    result = played("v2/parked")
    assert (result.verdict, result.reason) == (Verdict.NOT_SUPPORTED, "no query was answered asynchronously")


def test_a_refusal_at_bring_up_is_not_supported_and_told():
    result = played(
        "v2-groups2/warm",
        flat.PersistentKvCacheConnectorLeader,
        flat.PersistentKvCacheConnectorWorker,
        environment={"KV_CACHE_FOLDER": "{folder}"},
    )
    assert result.verdict is Verdict.NOT_SUPPORTED
    assert "implement both per-layer-group forms" in result.reason


def test_a_constructor_that_raises_could_not_run():
    result = played("v2/warm", NoUrl)
    assert result.verdict is Verdict.COULD_NOT_RUN
    assert result.reason == "the engine doesn't start: ValueError: no URL"


def test_a_class_that_ranks_cannot_import_is_not_supported_on_two():
    class Local(minimal.Worker):
        pass

    result = played("v2/ranks2/warm", worker=Local)
    assert result.verdict is Verdict.NOT_SUPPORTED
    assert "local to a function" in result.reason


def test_the_report_on_the_documents_example_names_the_limits_that_the_document_states():
    cells = [cell for name in ("v2/warm", "v2/chunked") for cell in matrix(16, name)]
    pair = (flat.PersistentKvCacheConnectorLeader, flat.PersistentKvCacheConnectorWorker)
    with Kit(*pair, environment={"KV_CACHE_FOLDER": "{folder}"}) as kit:
        told = limits([kit.run(cell) for cell in cells], cells, 16)
    assert [limit.split(":")[0] for limit in told] == ["blocking I/O", "full blocks only", "later chunks unplanned"]
    assert "start_load_kv (in 2 cells), wait_for_save (in 2 cells)" in told[0]
    assert "of a prompt of 115 tokens that was computed in chunks, 32 were served again" in told[2]


def test_a_connector_without_these_limits_is_told_only_of_its_full_blocks():
    """The negative control of the test above."""
    cells = [cell for name in ("v2/warm", "v2/chunked") for cell in matrix(16, name)]
    with Kit(minimal.Scheduler, minimal.Worker, environment={minimal.VARIABLE: "{folder}"}) as kit:
        told = limits([kit.run(cell) for cell in cells], cells, 16)
    assert [limit.split(":")[0] for limit in told] == ["full blocks only"]


class RefusesTwoGroups(minimal.Scheduler):
    update_state_after_alloc_by_layer_group = KvCacheConnectorScheduler.update_state_after_alloc_by_layer_group
    request_finished_by_layer_group = KvCacheConnectorScheduler.request_finished_by_layer_group


def test_what_one_rank_refuses_is_not_asked_of_two():
    with Kit(RefusesTwoGroups, minimal.Worker, environment={minimal.VARIABLE: "{folder}"}) as kit:
        one, two = (kit.run(cell) for name in ("warm", "ranks2/warm") for cell in matrix(16, f"v2-groups2/{name}"))
        assert kit._ranks._ranks is None
    assert (one.verdict, two.verdict) == (Verdict.NOT_SUPPORTED, Verdict.NOT_SUPPORTED)
    assert one.reason == two.reason
    assert "2 layer groups" in two.reason

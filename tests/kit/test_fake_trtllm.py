from __future__ import annotations

import importlib
import sys

import pytest

from tracekv import contract
from tracekv.testing import fake_trtllm

CONNECTOR = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


def test_third_party_imports_find_the_contracts_own_types():
    with fake_trtllm.installed():
        theirs = importlib.import_module(CONNECTOR)
        assert theirs.KvCacheConnectorWorker is contract.KvCacheConnectorWorker
        assert theirs.RequestData is contract.RequestData
        assert importlib.import_module("tensorrt_llm.runtime.kv_cache_manager_v2").BAD_PAGE_INDEX == -1
        assert importlib.import_module("tensorrt_llm._utils").mpi_rank() == 0
    assert "tensorrt_llm" not in sys.modules


def test_the_kits_own_contract_never_switches_to_the_fake():
    before = contract.KvCacheConnectorScheduler
    with fake_trtllm.installed():
        assert contract.KvCacheConnectorScheduler is before
        assert before.__module__ == "tracekv.contract._base"


def test_a_class_behind_the_fake_is_found_by_one_name():
    from tracekv.testing import behind_fake

    try:
        assert getattr(behind_fake, f"{CONNECTOR}:KvCacheConnectorWorker") is contract.KvCacheConnectorWorker
        with pytest.raises(AttributeError):
            _ = behind_fake.Nothing
    finally:
        fake_trtllm.remove()

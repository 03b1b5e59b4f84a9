from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import tests.support.connectors as samples
from tracekv import capture, connectors
from tracekv.connectors import Connector, ConnectorError

HERE = "tests.support.connectors"


class HalfFlat(samples.KvCacheConnectorScheduler):
    def build_connector_meta(self, scheduler_output):
        return None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def request_finished(self, request, cache_block_ids):
        return False

    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
        pass


class DuckWorker:
    def start_load_kv(self, stream):
        pass

    def register_kv_cache_layout(self, layout):
        pass


@pytest.mark.parametrize("name", [f"{HERE}:FlatScheduler,TensorWorker", f"{HERE}:FlatScheduler,{HERE}:TensorWorker"])
def test_a_path_names_both_classes(name):
    assert connectors.resolve(name) == Connector(samples.FlatScheduler, samples.TensorWorker)


def test_a_backend_is_found_by_its_entry_point():
    found = connectors.resolve("fsspec")
    assert found.scheduler.__module__.startswith("tracekv_fsspec")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fspec", r"TRACEKV_CONNECTOR=fspec is no connector. Did you mean fsspec\?"),
        ("lmcache", "presets are known only where it is installed"),
        ("no.such.module:A,B", "no.such.module can't be imported .ModuleNotFoundError"),
        (f"{HERE}:FlatSchedular,TensorWorker", r"has no class FlatSchedular. Did you mean FlatScheduler\?"),
        (f"{HERE}:FlatScheduler", "Write package.module:SchedulerClass,WorkerClass"),
        (f"{HERE}:TensorWorker,FlatScheduler", "TensorWorker is a worker class; the scheduler class goes in its place"),
        (
            f"tests.test_connectors:HalfFlat,{HERE}:TensorWorker",
            "defines request_finished but not update_state_after_alloc",
        ),
        (
            f"{HERE}:FlatScheduler,tests.test_connectors:DuckWorker",
            "DuckWorker doesn't define get_finished, save_kv_layer",
        ),
    ],
)
def test_a_name_that_leads_nowhere_says_what_to_do(name, said):
    with pytest.raises(ConnectorError, match=said):
        connectors.resolve(name)


def test_a_preset_of_the_engine_is_found_where_it_is_installed(monkeypatch):
    registry = ModuleType("registry")
    registry.CONNECTOR_REGISTRY = {
        "mine": {
            "connector_module": HERE,
            "connector_scheduler_class": "FlatScheduler",
            "connector_worker_class": "TensorWorker",
        }
    }
    monkeypatch.setitem(sys.modules, connectors._REGISTRY, registry)
    monkeypatch.setattr(connectors.importlib.util, "find_spec", lambda name: object())
    assert connectors.resolve("mine").worker is samples.TensorWorker


def test_the_module_that_the_engine_names_gives_the_traced_pair(monkeypatch):
    monkeypatch.setenv("TRACEKV_CONNECTOR", f"{HERE}:FlatScheduler,TensorWorker")
    from tracekv import trtllm

    assert trtllm.Scheduler is capture.trace(samples.FlatScheduler)
    assert trtllm.Worker is capture.trace(samples.TensorWorker)
    with pytest.raises(AttributeError):
        _ = trtllm.Other


HEAVY = ("opentelemetry", "pydantic", "typer", "rich", "structlog", "transformers", "s3fs", "torch")


def test_what_an_engine_imports_is_light():
    code = f"import sys, tracekv.trtllm, tracekv_fsspec; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

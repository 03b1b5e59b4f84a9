"""Bring-up: what is refused, and in which words."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tracekv_fsspec
from tests.fsspec.engine import Engine, LlmArgs
from tracekv.contract import UnknownRuntime
from tracekv.settings import SettingsError, load, load_section
from tracekv_fsspec import Scheduler, Settings, Worker
from tracekv_fsspec.arena import ArenaTooSmall
from tracekv_fsspec.store import StoreUnusable, check_usable, open_store


def test_a_missing_model_id_is_refused_by_its_name(configure):
    configure(model_id=None)
    with pytest.raises(SettingsError, match="TRACEKV_FSSPEC__MODEL_ID"):
        Scheduler()


@pytest.mark.parametrize("half", [Scheduler, Worker])
def test_an_unknown_rank_is_refused(configure, monkeypatch, half):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UnknownRuntime, match="OMPI_COMM_WORLD_SIZE"):
        half()


def test_an_unwritable_store_is_refused_when_the_engine_starts(configure, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    configure(url=(tmp_path / "file" / "kv").as_uri())
    with pytest.raises(StoreUnusable, match="can't be written to"):
        Scheduler()


def test_a_tensor_without_tokens_per_block_is_refused(configure):
    with pytest.raises(ValueError, match="tokens_per_block"):
        Worker(None).register_kv_caches(torch.zeros(4, 2, 2, 8))


def test_a_scheduler_without_a_worker_is_refused(configure):
    scheduler = Scheduler(LlmArgs())
    with pytest.raises(RuntimeError, match="no worker of this process"):
        scheduler.wait_for_initialization()
    scheduler.shutdown()


def test_an_arena_smaller_than_a_block_is_refused(configure):
    configure(arena_bytes=100)
    engine = Engine(start=False)
    with pytest.raises(ArenaTooSmall, match="TRACEKV_FSSPEC__ARENA_BYTES"):
        engine.start()
    engine.stop()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OFFER_WAIT_MS", "-1"),
        ("ARENA_BYTES", "0"),
        ("WRITE_QUEUE_BYTES", "much"),
        ("REFRESH_MS", "1"),
        ("STORAGE_OPTIONS", "no json"),
        ("LORA_DIGESTS", "[1]"),
    ],
)
def test_a_setting_without_a_valid_value_is_named(variable, value):
    with pytest.raises(SettingsError, match=f"TRACEKV_FSSPEC__{variable}"):
        load_section("fsspec", Settings, {f"TRACEKV_FSSPEC__{variable}": value})


def test_an_unknown_setting_gets_the_nearest_valid_one():
    with pytest.raises(SettingsError, match="Did you mean TRACEKV_FSSPEC__OFFER_WAIT_MS"):
        load({"TRACEKV_FSSPEC__OFFER_WAIT": "1"})


def test_settings_are_read_from_variables():
    settings = load_section(
        "fsspec",
        Settings,
        {
            "TRACEKV_FSSPEC__URL": "s3://bucket/kv",
            "TRACEKV_FSSPEC__STORAGE_OPTIONS": '{"key": "hidden-key"}',
            "TRACEKV_FSSPEC__LORA_DIGESTS": '{"3": "abc"}',
            "TRACEKV_FSSPEC__OFFER_WAIT_MS": "12",
        },
    )
    assert (settings.url, settings.offer_wait_ms, settings.lora_digests) == ("s3://bucket/kv", 12, {"3": "abc"})
    assert settings.storage_options == {"key": "hidden-key"}
    assert "hidden-key" not in repr(settings)
    assert "s3://bucket/kv" in repr(settings)


def test_the_default_store_is_a_folder_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    url = load_section("fsspec", Settings, {}).url
    check_usable(open_store(url))
    assert (tmp_path / "my cache" / "tracekv" / "kv").is_dir()


def test_both_sets_of_callbacks_are_defined():
    grouped = {"update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"}
    assert {"update_state_after_alloc", "request_finished", *grouped} <= set(vars(Scheduler))
    assert {"register_kv_caches", "register_kv_cache_layout"} <= set(vars(Worker))


def test_everything_but_the_worker_runs_without_torch():
    workers = {
        f"tracekv_fsspec.{name}" for name in ("worker", "transfers", "moving", "loading", "gpu_copies", "testing")
    }
    script = (
        "import importlib, pkgutil, sys\n"
        "import tracekv_fsspec\n"
        "assert tracekv_fsspec.Settings and tracekv_fsspec.Scheduler\n"
        "for module in pkgutil.walk_packages(tracekv_fsspec.__path__, 'tracekv_fsspec.'):\n"
        f"    if module.name not in {workers}:\n"
        "        importlib.import_module(module.name)\n"
        "heavy = {'torch', 's3fs', 'obstore', 'pytest', 'botocore', 'pydantic', 'typer', 'rich', 'opentelemetry'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nobody"):
        tracekv_fsspec.Nobody  # noqa: B018

"""On connectors that know nothing of tracekv the watch is exact: what it counts is what their files hold."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tracekv
from examples.persistent_connector import PersistentKvCacheConnectorLeader, PersistentKvCacheConnectorWorker
from examples.vswa_connector import VswaKvCacheConnectorLeader, VswaKvCacheConnectorWorker
from tracekv.harness import Executor
from tracekv.journal.records import BuildCall, RegisterCall, TracerFault, Transfer, WatchReport
from tracekv.journal.vocabulary import Direction, Source, WatchGap
from tracekv_fsspec import Scheduler, Worker

FLAT = (PersistentKvCacheConnectorLeader, PersistentKvCacheConnectorWorker)
VSWA = (VswaKvCacheConnectorLeader, VswaKvCacheConnectorWorker)
PAIRS = {
    "flat on V1": ("llama", FLAT, "v1"),
    "flat on V2": ("llama", FLAT, "v2"),
    "by group, two groups": ("gemma3", VSWA, "v2"),
}


def tokens(seed, count=300):
    return random.Random(seed).choices(range(2048), k=count)


def run(model, pair, mode, *prompts):
    executor = Executor(model, *map(tracekv.trace, pair), mode=mode, num_blocks=64)
    requests = [executor.submit(prompt, 4) for prompt in prompts]
    executor.run()
    assert all(request.error is None for request in requests)
    executor.shutdown()
    return requests


def observed(records, direction):
    return [each for each in records(Transfer) if each.source is Source.OBSERVED and each.direction is direction]


def sums(transfers):
    """{(layer group, request): (bytes, page slots)}"""
    found = {}
    for each in transfers:
        nbytes, pages = found.get((each.layer_group, each.request_id), (0, ()))
        found[each.layer_group, each.request_id] = (nbytes + each.nbytes, (*pages, *each.pages))
    return found


def held(folder):
    """{layer group: [bytes of KV in a file, ...]}"""
    found = {}
    for path in Path(folder).glob("*.pt"):
        kept = torch.load(path)
        group = int(path.stem.partition(".group")[2] or 0)
        nbytes = sum(part.nbytes for part in (kept if isinstance(kept, list) else [kept]))
        found.setdefault(group, []).append(nbytes)
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_counted_is_what_the_files_hold(model, records, name, tmp_path):
    preset, pair, mode = PAIRS[name]
    prompts = tokens(1), tokens(2, 200)
    cold = run(model(preset), pair, mode, *prompts)
    (register,) = records(RegisterCall)
    page_bytes = {group.layer_group_id: group.bytes_per_page for group in register.groups}
    files = held(tmp_path / "kv")
    saves, loads = observed(records, Direction.SAVE), observed(records, Direction.LOAD)
    assert loads == []
    assert {group: sum(sizes) for group, sizes in files.items()} == {
        group: sum(each.nbytes for each in saves if each.layer_group == group) for group in page_bytes
    }
    assert set(files) == set(page_bytes)
    reported = {}
    for build in records(BuildCall):
        for position, lists in build.pages:
            for group, slots in enumerate(lists):
                reported.setdefault((group, build.request_ids[position]), slots)
    by_owner = sums(saves)
    for request in cold:
        full = request.prompt_len // 32
        for group, nbytes in page_bytes.items():
            saved, pages = by_owner[group, request.request_id]
            assert saved == full * nbytes
            assert list(pages) == reported[group, request.request_id][:full]

    before = len(records(BuildCall))
    warm = run(model(preset), pair, mode, *prompts)
    assert [each.honoured_tokens for each in warm] == [288, 192]
    by_owner = sums(observed(records, Direction.LOAD))
    for request in warm:
        for group, nbytes in page_bytes.items():
            loaded, pages = by_owner[group, request.request_id]
            slots = next(
                lists[group]
                for build in records(BuildCall)[before:]
                for position, lists in build.pages
                if build.request_ids[position] == request.request_id
            )
            wanted = [slot for slot in slots[: request.honoured_tokens // 32] if slot >= 0]
            assert loaded == len(wanted) * nbytes
            assert list(pages) == wanted
    assert all(report.is_complete and not report.last_slots for report in records(WatchReport))
    assert records(WatchReport)
    assert records(TracerFault) == []


@pytest.mark.parametrize("name", [*PAIRS, "tracekv_fsspec"])
def test_watched_or_not_the_engine_computes_the_same_bits(model, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACEKV_FSSPEC__MODEL_ID", "watch")
    monkeypatch.setenv("TRACEKV_FSSPEC__OFFER_WAIT_MS", "10000")
    preset, pair, mode = PAIRS.get(name, ("gemma3", (Scheduler, Worker), "v2"))
    results = {}
    for watch in ("0", "1"):
        tracekv.capture.shutdown()
        monkeypatch.setenv("TRACEKV_WATCH", watch)
        monkeypatch.setenv("KV_CACHE_FOLDER", str(tmp_path / watch))
        monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / f"fsspec{watch}").as_uri())
        results[watch] = [run(model(preset), pair, mode, tokens(3))[0] for _ in range(2)]
    for bare, watched in zip(results["0"], results["1"], strict=True):
        assert bare.output_tokens == watched.output_tokens
        assert bare.honoured_tokens == watched.honoured_tokens
        assert torch.equal(bare.first_logits, watched.first_logits)
    assert watched.honoured_tokens == 288


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_copies_past_torch_are_said_not_to_be_seen_and_what_is_reported_stands(
    model, records, monkeypatch, tmp_path, mode
):
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "fsspec").as_uri())
    monkeypatch.setenv("TRACEKV_FSSPEC__MODEL_ID", "watch")
    monkeypatch.setenv("TRACEKV_FSSPEC__OFFER_WAIT_MS", "10000")
    preset = {"v1": "llama", "v2": "gemma3"}[mode]
    for _ in range(2):
        run(model(preset), (Scheduler, Worker), mode, tokens(4))
    for direction in Direction:
        assert sums(t for t in records(Transfer) if t.source is Source.REPORTED and t.direction is direction)
        assert not observed(records, direction)
    gaps = {gap.reason for report in records(WatchReport) for gap in report.gaps}
    assert gaps & {WatchGap.ARRAY, WatchGap.RAW_ADDRESS}
    assert not any(report.is_complete for report in records(WatchReport))


def test_off_it_costs_no_import(tmp_path):
    code = (
        "import sys, tracekv\n"
        "from tests.support.connectors import FlatScheduler, TensorWorker\n"
        "tracekv.trace(FlatScheduler)(None)\n"
        "worker = tracekv.trace(TensorWorker)(None)\n"
        "tensor = object()\n"
        "assert worker._tracekv_recorder.hand_out(tensor) is tensor\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'tracekv.capture.watch', 'tracekv.capture.obs'))])\n"
    )
    environ = {"TRACEKV_AGENT": "off", "TRACEKV_JOURNAL_DIR": str(tmp_path), "PATH": ""}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_off_the_caches_are_the_runtimes_own(model, monkeypatch):
    monkeypatch.setenv("TRACEKV_WATCH", "0")
    tracekv.capture.shutdown()
    executor = Executor(model("llama"), *map(tracekv.trace, FLAT), mode="v1", num_blocks=64)
    assert type(executor.worker.kv_cache_tensor) is torch.Tensor

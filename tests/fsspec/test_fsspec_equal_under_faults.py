"""Tokens are those of a run without a connector whatever the store answers, or the engine stops where it promised too much.

Each equality has its negative control: the same fault, and a reader that takes what has come for what was wanted.
"""

from __future__ import annotations

import random
import shutil
import uuid
from dataclasses import dataclass, field

import pytest
import torch

from tracekv.harness import Executor
from tracekv.testing import faults
from tracekv.testing.faults import FaultProxy, first, on
from tracekv.testing.playing import model_of
from tracekv_fsspec import Scheduler, Worker, fetching
from tracekv_fsspec.format import HEADER_BYTES
from tracekv_fsspec.header_checks import HeaderChecks
from tracekv_fsspec.parked import ParkedLoadFailed

BLOCK, NEW, LENGTH = 16, 4, 7 * 16 + 5
TOLERANCE = 1e-3
WAYS = ("waiting", "hinted", "async")
SETTINGS = {
    "waiting": {"offer_wait_ms": 20_000},
    "hinted": {"offer_wait_ms": 0},
    "async": {"offer": "async", "offer_wait_ms": 0},
}


def tokens(seed, length=LENGTH):
    return random.Random(seed).choices(range(512), k=length)


PROMPTS = [tokens(1), tokens(2), tokens(3)]


@dataclass
class Outcome:
    """What an engine made of the prompts; ``stopped`` is what ended it."""

    requests: list = field(default_factory=list)
    stopped: Exception | None = None

    @property
    def honoured(self):
        return [request.honoured_tokens for request in self.requests]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))


def executor(preset, *pair):
    return Executor(model_of(preset), *pair, tokens_per_block=BLOCK, num_blocks=64)


def served(preset, *pair, prompts=PROMPTS, between=lambda running: None, is_hinted=False):
    """Run all prompts at once; ``between`` is called when the engine is up."""
    running, outcome = executor(preset, *pair), Outcome()
    try:
        between(running)
        outcome.requests = [running.submit(prompt, NEW) for prompt in prompts]
        if is_hinted:
            prefetcher = running.scheduler._engine.stager.prefetcher
            for hint in list(prefetcher._of_request.values()):
                prefetcher.wait(hint, 30, hint.begun + 30)
        running.run()
    except ParkedLoadFailed as error:
        outcome.stopped = error
    finally:
        running.shutdown()
    assert [request.error for request in outcome.requests] == [None] * len(prompts)
    return outcome


COLD = {}


def cold(preset):
    if preset not in COLD:
        COLD[preset] = served(preset)
    return COLD[preset]


def is_equal(outcome, preset):
    return all(
        ours.output_tokens == theirs.output_tokens and (ours.first_logits - theirs.first_logits).abs().max() < TOLERANCE
        for ours, theirs in zip(outcome.requests, cold(preset).requests, strict=True)
    )


def save(preset):
    """The prompts in a segment each."""
    running = executor(preset, Scheduler, Worker)
    for prompt in PROMPTS:
        running.submit(prompt, NEW)
        running.run()
        assert running.scheduler.flush(30)
    running.shutdown()


@pytest.fixture
def trusting(monkeypatch):
    """A reader that believes whatever came, or didn't come: the negative control."""

    def begin():
        monkeypatch.setattr(fetching, "_fail_all", lambda filled, reason: None)
        monkeypatch.setattr(fetching.Fetcher, "_forget_wrong", lambda *args: None)
        monkeypatch.setattr(fetching.Fetcher, "_give_up", lambda *args: None)
        monkeypatch.setattr(HeaderChecks, "check", lambda *args: None)

    return begin


@pytest.fixture
def configured(configure, monkeypatch):
    def for_way(url, way, **more):
        monkeypatch.setenv("TRACEKV_ENQUEUE_HOOK", "1" if way == "hinted" else "0")
        settings = {
            "url": url, "role": "consumer", "read_deadline_ms": 400, "write_deadline_ms": 20_000, **SETTINGS[way], **more,
        }  # fmt: skip
        configure(**settings)

    return for_way


WHOLE = [LENGTH // BLOCK * BLOCK] * len(PROMPTS)


def check_way(preset, way, break_store, trusting, *, restore=lambda: None, is_controlled=True):
    """As the reader is, then with one that trusts."""
    outcome = served(preset, Scheduler, Worker, between=break_store, is_hinted=way == "hinted")
    assert outcome.honoured != WHOLE or outcome.stopped
    if way == "async":
        # What was promised can't be taken back.
        assert outcome.stopped is not None
        for ours, theirs in zip(outcome.requests, cold(preset).requests, strict=True):
            assert ours.output_tokens == theirs.output_tokens[: len(ours.output_tokens)]
        assert any(not request.output_tokens for request in outcome.requests)
    else:
        assert outcome.stopped is None
        assert is_equal(outcome, preset)
    if not is_controlled:
        return
    restore()
    trusting()
    control = served(preset, Scheduler, Worker, between=break_store, is_hinted=way == "hinted")
    assert control.stopped is None
    assert not is_equal(control, preset)


#: Into the last block of a layer group, where every window sees it.
SEEN_AT = HEADER_BYTES + 6 * 8192 + 703

ALTERED = faults.altered_at(SEEN_AT)
READ_FAULTS = [
    pytest.param(faults.status(503, "SlowDown"), id="503 storm"),
    pytest.param(faults.status(500, "InternalError"), id="500"),
    pytest.param(faults.cut_after(HEADER_BYTES + 700), id="cut body"),
    pytest.param(ALTERED, id="altered body"),
    pytest.param(faults.slowed_to(4000), id="slow body"),
    pytest.param(faults.stalled, id="no answer"),
    pytest.param(faults.status(404, "NoSuchKey"), id="404 after lookup"),
    pytest.param(faults.status(403, "AccessDenied"), id="permission lost"),
    pytest.param(faults.status(416, "InvalidRange"), id="range not satisfiable"),
    pytest.param(faults.shortened_to(HEADER_BYTES + 700), id="short in good order"),
]


@pytest.fixture(scope="module")
def proxy(s3_server):
    with FaultProxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def bucket(s3_server, proxy, monkeypatch):
    """The server behind the proxy."""
    for name, value in s3_server.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield f"s3://{s3_server.bucket}"
    proxy.fault = None


IN_BUCKET = {}


@pytest.fixture
def stored(bucket, configure):
    """The prompts in the bucket; saved once, since nobody here writes there again."""

    def of(preset):
        if (bucket, preset) not in IN_BUCKET:
            url = f"{bucket}/{uuid.uuid4().hex}"
            configure(url=url, write_deadline_ms=20_000)
            save(preset)
            IN_BUCKET[bucket, preset] = url
        return IN_BUCKET[bucket, preset]

    return of


def preset_of(way):
    """One layer group or two; each way has one of them."""
    return "gemma3" if way == "hinted" else "llama"


@pytest.mark.s3
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_tokens_are_equal_whatever_reads_answer(stored, proxy, configured, trusting, way, fault):
    preset = preset_of(way)
    configured(stored(preset), way)

    def break_store(_):
        proxy.fault = on("GET", fault, ".seg")

    try:
        # One control of each fault, and one of each way.
        check_way(preset, way, break_store, trusting, is_controlled=way == "waiting" or fault is ALTERED)
    finally:
        proxy.fault = None


ONCE = [
    pytest.param(faults.status(503, "SlowDown"), id="503"),
    pytest.param(faults.cut_after(HEADER_BYTES + 700), id="cut body"),
]


@pytest.mark.s3
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", ONCE)
def test_what_goes_wrong_once_is_served_all_the_same(stored, proxy, configured, way, fault):
    preset = preset_of(way)
    configured(stored(preset), way, read_deadline_ms=10_000)

    def break_store(_):
        proxy.fault = first(1, on("GET", fault, ".seg"))

    outcome = served(preset, Scheduler, Worker, between=break_store, is_hinted=way == "hinted")
    assert outcome.honoured == WHOLE
    assert is_equal(outcome, preset)


@pytest.mark.s3
@pytest.mark.parametrize("way", WAYS)
def test_one_bad_segment_costs_its_own_request_only(stored, proxy, configured, way):
    preset = preset_of(way)
    configured(stored(preset), way)
    seen = []

    def only_one(call):
        segment = call.target.partition("?")[0]
        if call.method != "GET" or not segment.endswith(".seg"):
            return None
        seen.append(segment)
        return faults.Answer(status=404, code="NoSuchKey") if segment == min(seen) == seen[0] else None

    def break_store(_):
        proxy.fault = only_one

    outcome = served(preset, Scheduler, Worker, between=break_store, is_hinted=way == "hinted")
    if way == "async":
        assert outcome.stopped is not None
        return
    assert sorted(outcome.honoured) in ([0, WHOLE[0], WHOLE[0]], [0, 0, WHOLE[0]])
    assert is_equal(outcome, preset)


WRITE_FAULTS = [
    pytest.param(faults.status(503, "SlowDown"), "", id="503 storm"),
    pytest.param(faults.status(403, "AccessDenied"), ".seg", id="segments refused"),
    pytest.param(faults.status(403, "AccessDenied"), ".man", id="manifests refused"),
    pytest.param(faults.cut_after(0), ".man", id="answers lost"),
    pytest.param(faults.stalled, ".seg", id="no answer"),
]


@pytest.mark.s3
@pytest.mark.parametrize(("fault", "part"), WRITE_FAULTS)
def test_what_writes_come_to_changes_no_token_then_or_later(bucket, proxy, configure, fault, part):
    """What was dropped is a miss, what got through is right: whether an answer was lost can't be known."""
    url = f"{bucket}/{uuid.uuid4().hex}"
    configure(url=url, write_deadline_ms=500)

    def break_store(_):
        proxy.fault = on("PUT", fault, part)

    assert is_equal(served("llama", Scheduler, Worker, between=break_store), "llama")
    proxy.fault = None
    configure(url=url)
    assert is_equal(served("llama", Scheduler, Worker), "llama")


def each_segment(change):
    def break_store(folder):
        for path in folder.rglob("*.seg"):
            data = bytearray(path.read_bytes())
            path.unlink()
            changed = change(data)
            if changed is not None:
                path.write_bytes(bytes(changed))

    return break_store


def flipped(position):
    def change(data):
        data[position] ^= 1
        return data

    return change


IN_FOLDER = [
    pytest.param(each_segment(flipped(SEEN_AT)), id="altered body"),
    pytest.param(each_segment(lambda data: data[: HEADER_BYTES + 700]), id="truncated"),
    pytest.param(each_segment(lambda data: None), id="removed"),
    pytest.param(each_segment(lambda data: bytes(len(data))), id="zeroed"),
    pytest.param(shutil.rmtree, id="all of it gone"),
]


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory):
    return {}, tmp_path_factory.mktemp("saved")


@pytest.fixture
def folder(saved_folders, configure, tmp_path):
    """A folder of the test's own with the prompts in it."""

    def of(preset):
        made, home = saved_folders
        if preset not in made:
            made[preset] = home / preset
            configure(url=made[preset].as_uri())
            save(preset)
        return shutil.copytree(made[preset], tmp_path / "kv")

    return of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", IN_FOLDER)
def test_tokens_are_equal_whatever_became_of_a_folders_segments(folder, configured, trusting, way, change):
    preset = preset_of(way)
    there = folder(preset)
    configured(there.as_uri(), way)
    kept = shutil.copytree(there, there.with_name("kept"))

    def restore():
        shutil.copytree(kept, there, dirs_exist_ok=True)

    check_way(preset, way, lambda _: change(there), trusting, restore=restore, is_controlled=way == "waiting")

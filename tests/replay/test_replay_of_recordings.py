"""A recorded run drives another connector without a model: the same connector answers the same, another one differs by name."""

from __future__ import annotations

import json
import random
import struct

import msgspec
import pytest
from typer.testing import CliRunner

import tracekv
from examples.persistent_connector import PersistentKvCacheConnectorLeader, PersistentKvCacheConnectorWorker
from examples.vswa_connector import VswaKvCacheConnectorLeader, VswaKvCacheConnectorWorker
from tracekv.cli.app import app
from tracekv.connectors import Connector
from tracekv.harness import Executor
from tracekv.journal.records import ReplayEnd, ReplayPrompt
from tracekv.testing.replay import NoRecording, replay
from tracekv_fsspec import Scheduler, Worker

FLAT = Connector(PersistentKvCacheConnectorLeader, PersistentKvCacheConnectorWorker)
VSWA = Connector(VswaKvCacheConnectorLeader, VswaKvCacheConnectorWorker)
FSSPEC = Connector(Scheduler, Worker)


def tokens(seed, count=300):
    return random.Random(seed).choices(range(2048), k=count)


def turns(prompt, answer):
    """A conversation that goes on: the first turn, its answer, and more."""
    return [*prompt, *answer, *tokens(99, 50)]


@pytest.fixture
def record(model, tmp_path):
    """``record(preset, pair, mode, *prompts)``: run twice, cold then warm, in two engines; the journal's folder."""

    def run(preset, pair, mode, *prompts, **options):
        for _ in range(2):
            executor = Executor(model(preset), *map(tracekv.trace, pair), mode=mode, num_blocks=96, **options)
            requests = [executor.submit(prompt, 40, cache_salt=salt) for prompt, salt in prompts]
            executor.run()
            requests.append(
                executor.submit(turns(prompts[0][0], requests[0].output_tokens), 4, cache_salt=prompts[0][1])
            )
            executor.run()
            assert all(request.error is None for request in requests)
            executor.shutdown()
        tracekv.capture.shutdown()
        return tmp_path / "journals"

    return run


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Stores that are empty, for the replay."""
    monkeypatch.setenv("KV_CACHE_FOLDER", str(tmp_path / "replayed"))
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "replayed-fsspec").as_uri())


PROMPTS = ((tokens(1), None), (tokens(1, 200) + tokens(2, 60), None), (tokens(1), "another tenant"))
CASES = {
    "flat on V1": ("llama", FLAT, "v1"),
    "flat on V2": ("llama", FLAT, "v2"),
    "by group": ("gemma3", VSWA, "v2"),
    "fsspec, by group": ("gemma3", FSSPEC, "v2"),
    "fsspec on V1": ("llama", FSSPEC, "v1"),
}


@pytest.mark.parametrize(
    ("name", "chunk"), [*((name, None) for name in CASES), ("flat on V1", 128), ("fsspec, by group", 128)]
)
def test_the_same_connector_answers_the_same(record, fresh, name, chunk):
    preset, pair, mode = CASES[name]
    journals = record(preset, pair, mode, *PROMPTS, chunk_tokens=chunk)
    result = replay([journals], pair)
    assert result.errors == []
    assert result.differences == []
    assert len(result.requests) == 8
    assert any(each.recorded.honoured for each in result.requests)
    for each in result.requests:
        assert each.recorded == each.replayed


def test_the_bytes_that_the_replayed_connector_moves_are_observed(record, fresh, monkeypatch):
    monkeypatch.setenv("TRACEKV_WATCH", "1")
    journals = record("gemma3", VSWA, "v2", *PROMPTS)
    result = replay([journals], VSWA)
    observed = {(each.direction, each.layer_group): each for each in result.moved if each.source == "observed"}
    assert set(observed) == {("load", 0), ("load", 1), ("save", 0), ("save", 1)}
    for each in observed.values():
        assert each.recorded == each.replayed > 0


def test_another_connector_differs_and_the_differences_are_named(record, fresh):
    """Of a chunked prompt the example keeps the first chunk, tracekv_fsspec all of it."""
    journals = record("llama", FLAT, "v1", *PROMPTS, chunk_tokens=128)
    result = replay([journals], FSSPEC)
    assert result.errors == []
    assert result.recorded == ["examples.persistent_connector.PersistentKvCacheConnectorLeader"] * 2
    assert result.replayed == "tracekv_fsspec.scheduler.Scheduler"
    first = next(each for each in result.requests if (each.life, each.request_id) == (2, 1))
    assert (first.recorded.offered, first.replayed.offered) == (128, 288)
    # The recorded pass ends at 256: what it has no pages for can't be honoured, and a chunk begins with a block.
    assert (first.recorded.honoured, first.replayed.honoured) == (128, 224)
    assert "request 1 of life 2: offered 128 tokens, now 288" in result.differences


class Never(PersistentKvCacheConnectorLeader):
    """Offers nothing."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.prompts[request.request_id].matched = 0
        return 0, False


def test_a_connector_that_offers_nothing_has_its_requests_computed(record, fresh):
    journals = record("llama", FLAT, "v2", *PROMPTS)
    result = replay([journals], Connector(Never, PersistentKvCacheConnectorWorker))
    assert result.errors == []
    assert all(each.replayed.offered == each.replayed.honoured == 0 for each in result.requests)
    served = [each for each in result.requests if each.recorded.offered]
    assert len(served) == len([told for told in result.differences if "now 0" in told]) > 0


class Failing(PersistentKvCacheConnectorLeader):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id == 2:
            raise KeyError("no such [block]")
        return 0, request.request_id == 3


def test_what_a_callback_raises_is_an_error_and_the_replay_goes_on(record, fresh):
    journals = record("llama", FLAT, "v1", *PROMPTS)
    result = replay([journals], Connector(Failing, PersistentKvCacheConnectorWorker))
    raised = {(each.life, each.request_id, each.callback, each.error) for each in result.errors}
    assert (1, 2, "get_num_new_matched_tokens", "KeyError") in raised
    assert (2, 3, "get_num_new_matched_tokens", "RuntimeError") in raised  # (0, True): the runtime refuses it
    assert {each.request_id for each in result.requests} == {1, 2, 3, 4}


class Parking(PersistentKvCacheConnectorLeader):
    """Loads asynchronously: its worker needs a few polls."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        offered, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return offered, offered > 0


class Polling(PersistentKvCacheConnectorWorker):
    polls = 0
    loading = ()

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        self.polls += 1
        self.loading = [*self.loading, *started_loading_req_ids]
        if self.polls % 3:
            return [], []
        done, self.loading = self.loading, []
        return [], done


PARKING = Connector(Parking, Polling)


def test_a_request_that_is_parked_only_now_waits_for_its_load(record, fresh):
    journals = record("llama", FLAT, "v2", *PROMPTS)
    result = replay([journals], PARKING)
    assert result.errors == []
    assert any("asynchronous" in told for told in result.differences)
    assert [each.replayed.honoured for each in result.requests] == [each.recorded.honoured for each in result.requests]


def test_a_request_that_was_parked_is_reported_in_the_pass_of_its_query(record, fresh):
    journals = record("llama", PARKING, "v2", *PROMPTS)
    result = replay([journals], FLAT)
    assert result.errors == []
    assert any("was asynchronous, now it is synchronous" in told for told in result.differences)
    assert replay([journals], PARKING).differences == []


def test_a_flat_connector_is_refused_on_two_layer_groups_as_at_bring_up(record, fresh):
    journals = record("gemma3", VSWA, "v2", *PROMPTS)
    result = replay([journals], FLAT)
    assert {each.error for each in result.errors} == {"NotImplementedError"}
    assert result.requests
    assert all(each.replayed is None for each in result.requests)


@pytest.mark.parametrize("name", ["flat on V1", "flat on V2", "by group"])
def test_caches_too_large_for_this_machine_share_a_row(record, fresh, name):
    preset, pair, mode = CASES[name]
    result = replay([record(preset, pair, mode, *PROMPTS)], pair, most_bytes=1 << 16)
    assert result.has_shared_rows
    assert result.errors == []
    assert result.differences == []


def test_a_later_replay_finds_nothing_that_an_earlier_one_stored(record, fresh):
    journals = record("llama", FLAT, "v1", *PROMPTS)
    assert replay([journals], FLAT).differences == []
    assert replay([journals], FLAT).differences == []
    assert replay([journals], FLAT, seed="one").differences == []
    assert replay([journals], FLAT, seed="one").differences != []


IMAGE = {"multimodal_hashes": [[7] * 8], "multimodal_positions": [3], "multimodal_lengths": [4]}


def test_salts_images_and_adapters_tell_requests_apart_in_a_replay_too(model, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACEKV_FSSPEC__LORA_DIGESTS", '{"3": "one", "4": "two"}')
    kinds = [{}, IMAGE, {**IMAGE, "multimodal_hashes": [[8] * 8]}, {"cache_salt": "mine"}, {"lora_task_id": 3}]
    for _ in range(2):
        executor = Executor(model("llama"), *map(tracekv.trace, FSSPEC), mode="v1", num_blocks=96)
        for kind in kinds:
            executor.submit(tokens(1, 100), 2, **kind)
        executor.run()
        executor.shutdown()
    tracekv.capture.shutdown()
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "again").as_uri())
    result = replay([tmp_path / "journals"], FSSPEC)
    assert result.errors == []
    offers = {(each.life, each.request_id): (each.recorded.offered, each.replayed.offered) for each in result.requests}
    assert [offers[1, number] for number in range(1, 6)] == [(0, 0)] * 5
    assert [offers[2, number] for number in range(1, 6)] == [(96, 96)] * 5


# -- what is kept, and what isn't ----------------------------------------------------------------------------------------


def occurrences(raw, sequence):
    """How often a token sequence is in bytes, in any of the ways in which one might be written."""
    ways = [struct.pack(f"{order}{len(sequence)}{kind}", *sequence) for order in "<>" for kind in "HIQ"]
    ways += [msgspec.msgpack.encode(sequence)[1:], msgspec.json.encode(sequence)[1:-1]]
    ways += [separator.join(map(str, sequence)).encode() for separator in (" ", ", ", ",")]
    return sum(raw.count(way) for way in ways)


def test_no_token_is_in_the_journal(record):
    prompts = PROMPTS
    journals = record("llama", FSSPEC, "v1", *prompts)
    files = [path.read_bytes() for path in journals.iterdir()]
    pages = (raw[at : at + 4096] for raw in files for at in range(0, len(raw), 4096))
    raw = b"".join(page for page in pages if any(page))
    assert len(raw) > 10000
    for prompt, _ in prompts[:2]:
        for start in range(0, len(prompt) - 4, 8):
            assert occurrences(raw, prompt[start : start + 4]) == 0
    assert occurrences(raw + struct.pack("<4I", *prompts[0][0][:4]), prompts[0][0][:4]) == 1  # it would be found


def test_equal_blocks_have_equal_digests_and_only_in_one_recording(model, records):
    def digests():
        for _ in range(2):
            executor = Executor(model("llama"), *map(tracekv.trace, FLAT), mode="v1")
            executor.submit(tokens(1, 100), 2)
            executor.submit(tokens(2, 32) + tokens(1, 64), 2)
            executor.run()
        found = [record.blocks for record in records(ReplayPrompt)]
        tracekv.capture.shutdown()
        return found

    first, again, other_recording = *digests()[1::2], digests()[1]
    assert first == again
    blocks = [first[i : i + 8] for i in range(0, len(first), 8)]
    assert len(set(blocks)) == 3
    assert other_recording != first
    assert len(other_recording) == len(first)


def test_a_finished_request_tells_its_generated_blocks(model, records):
    executor = Executor(model("llama"), *map(tracekv.trace, FLAT), mode="v1")
    executor.submit(tokens(1, 60), 40)
    executor.run()
    (prompt,), (end,) = records(ReplayPrompt), records(ReplayEnd)
    assert (prompt.tokens, len(prompt.blocks), len(prompt.rest)) == (60, 8, 8)
    assert (end.tokens, len(end.blocks)) == (100, 24)
    assert end.blocks.startswith(prompt.blocks)


# -- the command -----------------------------------------------------------------------------------------------------------

COMMAND_CONNECTOR = "examples.persistent_connector:PersistentKvCacheConnectorLeader,PersistentKvCacheConnectorWorker"


def test_the_command_prints_tables_and_json(record, fresh):
    journals = record("llama", FLAT, "v1", *PROMPTS)
    shown = CliRunner().invoke(app, ["replay", str(journals), "--connector", COMMAND_CONNECTOR])
    assert shown.exit_code == 0
    assert "0 differences, 0 errors" in shown.output
    printed = CliRunner().invoke(app, ["replay", str(journals), "--connector", COMMAND_CONNECTOR, "--json"])
    assert printed.exit_code == 0
    result = json.loads(printed.stdout)
    assert result["differences"] == result["errors"] == []
    assert {each["callback"] for each in result["callbacks"]} >= {
        "scheduler.build_connector_meta",
        "worker.start_load_kv",
    }
    assert all(each["recorded"] == each["replayed"] for each in result["requests"])


def test_the_command_exits_with_1_on_errors_and_0_on_differences(record, fresh):
    journals = record("llama", FLAT, "v1", *PROMPTS)
    here = __name__
    for connector, code in ((f"{here}:Failing,Polling", 1), (f"{here}:Never,Polling", 0)):
        shown = CliRunner().invoke(app, ["replay", str(journals), "--connector", connector])
        assert shown.exit_code == code, shown.output
        assert "no such [block]" in shown.output if code else "differs: " in shown.output


def test_a_journal_without_a_recording_says_how_to_make_one(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKV_RECORD", "")
    executor = Executor(model("llama"), *map(tracekv.trace, FLAT), mode="v1")
    executor.submit(tokens(1, 40), 2)
    executor.run()
    tracekv.capture.shutdown()
    with pytest.raises(NoRecording, match="TRACEKV_RECORD=replay"):
        replay([tmp_path / "journals"], FLAT)
    shown = CliRunner().invoke(app, ["replay", str(tmp_path / "journals"), "--connector", COMMAND_CONNECTOR])
    assert shown.exit_code == 1


# -- other callbacks -------------------------------------------------------------------------------------------------------


class Keeping(PersistentKvCacheConnectorLeader):
    """Keeps the pages of a request that finishes."""

    def request_finished(self, request, cache_block_ids):
        super().request_finished(request, cache_block_ids)
        return True


class Saving(PersistentKvCacheConnectorWorker):
    saving = ()

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        done, self.saving = list(self.saving), list(finished_gen_req_ids)
        return done, []


class Forgetting(Saving):
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


KEEPING = Connector(Keeping, Saving)


def test_get_finished_is_given_what_the_replayed_connector_keeps(record, fresh):
    journals = record("llama", FLAT, "v1", *PROMPTS)
    result = replay([journals], KEEPING)
    assert result.errors == []
    assert any("pages were given back when it finished, now they are kept" in told for told in result.differences)
    journals = record("llama", KEEPING, "v1", *PROMPTS)
    assert replay([journals], KEEPING).errors == []


def test_a_save_that_is_never_returned_is_an_error(record, fresh, monkeypatch):
    from tracekv.testing import replay_driver

    monkeypatch.setattr(replay_driver, "WAIT_S", 0.2)
    journals = record("llama", FLAT, "v1", *PROMPTS)
    result = replay([journals], Connector(Keeping, Forgetting))
    assert {(each.callback, each.error) for each in result.errors} == {("get_finished", "NeverFinished")}


class Layerwise(PersistentKvCacheConnectorWorker):
    seen = ()

    def wait_for_layer_load(self, layer_idx, stream):
        Layerwise.seen = (*Layerwise.seen, ("wait", layer_idx))

    def save_kv_layer(self, layer_idx, stream):
        Layerwise.seen = (*Layerwise.seen, ("save", layer_idx))


def test_the_per_layer_hooks_come_in_their_order(record, fresh):
    journals = record("llama", FLAT, "v1", *PROMPTS)
    Layerwise.seen = ()
    result = replay([journals], Connector(PersistentKvCacheConnectorLeader, Layerwise))
    assert result.errors == []
    one_pass = (("wait", 0), ("save", 0), ("wait", 1), ("save", 1))
    assert Layerwise.seen[:4] == one_pass
    assert Layerwise.seen == one_pass * (len(Layerwise.seen) // 4)

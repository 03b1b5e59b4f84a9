"""The manager against call traces of TensorRT-LLM's real one: the same steps let the same calls reach the connector."""

from __future__ import annotations

import threading
import types

import pytest

from tests.harness.recording import Recorder, plain, prompt, recording_pair, scenario
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import Batch, Request, RequestState
from tracekv.harness.stream import HostStream

BLOCK = 32

# What the loop decided in each scenario: prompt and output tokens, and the width of each prefill pass.
LOOPS = {
    "a": {1: (96, 4, [32]), 2: (96, 4, [64])},
    "b": {1: (256, 2, [128, 64])},
    "c1": {1: (256, 2, [64, 128])},
    "c2": {1: (256, 2, [64])},
    "d": {1: (184, 12, [56])},
    "e1": {1: (96, 2, [32, 32])},
    "e2": {1: (96, 2, [32, 32]), 2: (64, 6, [64])},
    "g1": {1: (64, 1, [64])},
}


class FakeCache:
    """Page lists as the scenarios' cache had them: what the alloc callback names, then the next free id per block."""

    def __init__(self, grouped):
        self._grouped = grouped
        self.lists = {}

    def page_indices(self, request):
        lists = self.lists[request.request_id]
        covered = max(request.num_tokens if request.output_tokens else 0, request.context_current_position)
        if request.state is RequestState.CONTEXT_INIT:
            covered += request.context_chunk_size
        for group, slots in enumerate(lists):
            while len(slots) * BLOCK < covered:
                slots.append(1 + max(slot for other in self.lists.values() for slot in other[group]))
        return (list(lists[0]), None) if not self._grouped else (lists[0] if len(lists) == 1 else [], lists)

    def block_hashes(self, request):
        if self._grouped:
            return []
        return [request.request_id * 100 + ordinal for ordinal in range((request.num_tokens - 1) // BLOCK)]


class Locked:
    """Metadata that can't be pickled."""

    def __init__(self):
        self.lock = threading.Lock()


def answer_of(call):
    """What the connector did in the trace: answered, or raised."""
    if "raised" in call:
        return {"ValueError": ValueError}[call["raised"]["type"]](call["raised"]["first_words"] + " connector")
    return Locked() if call["ret"] == "<Locked>" else call["ret"]


class Driver:
    """Does a scenario's steps to our manager and keeps what the loop around it keeps."""

    def __init__(self, name, forms, collectives=None):
        self.loop = LOOPS.get(name, LOOPS["g1"])
        self.recorder = Recorder()
        scheduler, worker = recording_pair(self.recorder, forms)
        stream = HostStream("execution")
        leads = collectives is None or collectives.rank == 0
        self.manager = KvCacheConnectorManager(
            worker(None),
            scheduler(None) if leads else None,
            collectives=collectives,
            current_stream=lambda: stream,
        )
        self.cache = FakeCache(grouped=name in ("c1", "c2", "d", "e2"))
        self.requests = {}
        for request_id, (length, outputs, widths) in self.loop.items():
            salt = "s2" if (name, request_id) == ("a", 2) else None
            self.requests[request_id] = Request(request_id, prompt(request_id, length), outputs, cache_salt=salt)
            self.requests[request_id].context_chunk_size = widths[0]
        self.widths = {request_id: list(widths) for request_id, (_, _, widths) in self.loop.items()}
        self.batch = Batch()

    def argument(self, value):
        if isinstance(value, dict) and "req" in value:
            return self.requests[value["req"]]
        if isinstance(value, dict):
            batch = Batch(
                *([self.requests[i] for i in value[part]] for part in ("chunking", "last_chunk", "generation"))
            )
            self.batch = batch
            return batch
        if value in ("<FakeV1>", "<FakeV2>"):
            return self.cache
        if value == "stream":
            return HostStream("current")
        if isinstance(value, str) and value.startswith("layer "):
            return types.SimpleNamespace(layer_idx=int(value.split()[1]))
        return value

    def do(self, step):
        for call in step.get("calls", []):
            self.recorder.answers[call["m"]].append(answer_of(call))
        self.recorder.calls = []
        side, verb = step["do"].split(".")
        if verb == "build_scheduler_output":
            self.next_widths(step["args"][0])
        args = [self.argument(value) for value in step["args"]]
        returned = self.manager.call("worker", verb, *args) if side == "worker" else getattr(self.manager, verb)(*args)
        self.after(verb, args, returned)
        return returned

    def next_widths(self, batch):
        for request_id in (*batch["chunking"], *batch["last_chunk"]):
            self.requests[request_id].context_chunk_size = self.widths[request_id].pop(0)

    def after(self, verb, args, returned):
        """What the loop does between the manager's steps."""
        if verb == "get_num_new_matched_tokens":
            args[0].context_current_position = returned
        elif verb == "commit_new_matched_tokens":
            args[0].context_current_position = args[1]
        elif verb == "update_state_after_alloc":
            self.cache.lists[args[0].request_id] = [list(ids) for ids in (args[2] if len(args) > 2 else [args[1]])]
        elif verb == "wait_for_save":
            self.forward_done()

    def forward_done(self):
        for request in self.batch.context:
            request.context_current_position += request.context_chunk_size
            if request.context_remaining_length == 0:
                self.sample(request)
        for request in self.batch.generation:
            self.sample(request)

    def sample(self, request):
        request.append_token(request.request_id * 1000 + 900 + len(request.output_tokens))
        done = len(request.output_tokens) == request.max_new_tokens
        request.state = RequestState.GENERATION_COMPLETE if done else RequestState.GENERATION_IN_PROGRESS

    def tables(self):
        manager = self.manager
        tables = {
            "new.saving": manager.new_async_requests.saving,
            "new.loading": manager.new_async_requests.loading,
            "pending.saving": manager.pending_async_requests.saving,
            "pending.loading": manager.pending_async_requests.loading,
            "local_finished.saving": manager.local_finished_async_requests.saving,
            "local_finished.loading": manager.local_finished_async_requests.loading,
            "finished_loading": manager.finished_async_loading_requests,
        }
        return {name: sorted(table) for name, table in tables.items() if table}


def comparable(calls):
    """Id lists of ``get_finished`` are built from sets: their order says nothing."""
    out = []
    for call in calls:
        if call["m"] == "get_finished" and "ret" in call:
            call = {**call, "args": [sorted(ids) for ids in call["args"]], "ret": [sorted(ids) for ids in call["ret"]]}
        out.append(call)
    return out


@pytest.mark.parametrize("name", ["a", "b", "c1", "c2", "d", "e1", "e2"])
def test_what_reaches_the_connector_is_what_the_real_manager_let_through(name):
    driver = Driver(name, forms=("grouped",) if name == "d" else ("flat", "grouped"))
    tables, compared = {}, 0
    for number, step in enumerate(scenario(name)["steps"]):
        returned = driver.do(step)
        where = f"step {number}: {step['do']}"
        assert comparable(driver.recorder.calls) == comparable(step.get("calls", [])), where
        assert plain(returned) == step["ret"], where
        for request_id, state in step.get("state", {}).items():
            assert driver.requests[int(request_id)].state.value == state, where
        tables = step.get("mgr", tables)
        assert driver.tables() == tables, where
        if "batch_after" in step:
            parts = {part: [r.request_id for r in getattr(driver.batch, part)] for part in step["batch_after"]}
            assert parts == step["batch_after"], where
        compared += len(step.get("calls", []))
    assert compared > 10


def test_a_changed_trace_is_noticed():
    """Negative control of the comparison above."""
    driver = Driver("c1", forms=("flat", "grouped"))
    steps = scenario("c1")["steps"]
    steps[4]["calls"][0]["args"][0]["new_requests"][0]["computed_position"] = 64
    differing = []
    for step in steps:
        driver.do(step)
        if comparable(driver.recorder.calls) != comparable(step.get("calls", [])):
            differing.append(step["do"])
    assert differing == ["manager.handle_metadata"]

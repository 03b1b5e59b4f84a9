"""The manager against call traces of TensorRT-LLM's real one: the same steps let the same calls reach the connector."""

from __future__ import annotations

import threading
import types

import pytest

from tests.harness.recording import Recorder, named_in, plain, prompt, recording_pair, scenario
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
    "c3": {1: (256, 2, [64, 128])},
    "c.retention": {1: (64, 2, [1])},
    "f1": {1: (256, 2, [32, 32, 32])},
    "i1": {1: (96, 6, [32, 35])},
    "i3": {1: (96, 2, [32])},
    "i4": {1: (96, 2, [])},
    "h.early_id": {1: (64, 1, []), 2: (64, 1, [])},
    "k.dummy_tp": {90: (32, 1, [32])},
    "l.commit_then_other_build": {1: (64, 1, [32])},
    "l.drafts_and_alias": {1: (64, 2, [])},
    "l.generation_first": {5: (64, 2, [])},
    "l.id_order": {request_id: (64, 1, []) for request_id in (3, 5, 12)},
    "l.state_formula": {1: (64, 1, [64]), 2: (64, 1, [64])},
}
GROUPED = (
    "c1",
    "c2",
    "c3",
    "c.retention",
    "d",
    "e2",
    "f1",
    "i1",
    "i3",
    "l.commit_then_other_build",
    "l.drafts_and_alias",
    "l.state_formula",
)
FORMS = {"d": ("grouped",), "c3": ("flat",)}


def generating(request):
    """The driver of these scenarios sampled one token before their first step."""
    request.append_token(request.request_id * 1000 + 900)
    request.state = RequestState.GENERATION_IN_PROGRESS


def prepare(name, driver):
    """What the driver of a scenario had done before its first step."""
    for request_id, blocks in {
        "i3": {1: 3},
        "l.commit_then_other_build": {1: 2},
        "l.drafts_and_alias": {1: 3},
        "l.generation_first": {5: 3},
        "l.state_formula": {1: 2, 2: 2},
    }.get(name, {}).items():
        first = max((slot + 1 for lists in driver.cache.lists.values() for slot in lists[0]), default=0)
        driver.cache.lists[request_id] = [list(range(first, first + blocks))]
    requests = driver.requests
    if name == "c.retention":
        requests[1].kv_cache_retention_config = types.SimpleNamespace()
    elif name == "i3":
        requests[1].context_current_position = 64
    elif name == "k.dummy_tp":
        requests[90].is_dummy_request = True
    elif name == "l.drafts_and_alias":
        generating(requests[1])
        requests[1].py_draft_tokens = [1, 2, 3]
    elif name == "l.generation_first":
        generating(requests[5])
    elif name == "l.state_formula":
        requests[2].state = RequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS


class FakeCache:
    """Page lists as the scenarios' cache had them: what the alloc callback names, then the next free id per block."""

    def __init__(self, grouped):
        self._grouped = grouped
        self.lists = {}

    def page_indices(self, request):
        lists = self.lists[request.request_id]
        covered = request.context_current_position
        if request.state is RequestState.CONTEXT_INIT:
            covered += request.context_chunk_size
        elif request.output_tokens:
            covered = request.num_tokens
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
    if call["m"] == "get_finished" and isinstance(call["ret"], list):
        return [set(ids["set"]) if isinstance(ids, dict) else ids for ids in call["ret"]]
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
        self.cache = FakeCache(grouped=name in GROUPED)
        self.requests = {}
        for request_id, (length, outputs, widths) in self.loop.items():
            salt = "s2" if (name, request_id) == ("a", 2) else None
            self.requests[request_id] = Request(request_id, prompt(request_id, length), outputs, cache_salt=salt)
            if widths:
                self.requests[request_id].context_chunk_size = widths[0]
        self.widths = {request_id: list(widths) for request_id, (_, _, widths) in self.loop.items()}
        self.batch = Batch()
        self.freed = []
        prepare(name, self)

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
        elif verb == "reset_request_state" and args[0].output_tokens:
            args[0].reset_for_recompute()
        elif verb == "request_finished" and not returned:
            self.freed.append(args[0].request_id)
        elif verb == "get_finished":
            self.freed += [request.request_id for request in returned]
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
        request.append_token(request.request_id * 1000 + 900 + request.num_tokens - request.prompt_len)
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


def in_order(answer):
    """Id lists, sorted; an answer of any other shape as it is."""
    if isinstance(answer, list) and all(isinstance(ids, list) for ids in answer):
        return [sorted(ids) for ids in answer]
    return answer


def comparable(calls):
    """Id lists of ``get_finished`` are built from sets: their order says nothing."""
    out = []
    for call in calls:
        if call["m"] == "get_finished" and "ret" in call:
            call = {**call, "args": [sorted(ids) for ids in call["args"]], "ret": in_order(call["ret"])}
        out.append(call)
    return out


def outcome(driver, step):
    try:
        return {"ret": plain(driver.do(step))}
    except Exception as error:
        return {"raised": named_in(error, step.get("raised", {}))}


PASSES = ["a", "b", "c1", "c2", "c3", "c.retention", "d", "e1", "e2", "f1", "i1", "k.dummy_tp", "l.meta_none"]
STEPS = [
    "h.zero_async", "h.unknown_id", "h.unknown_after_good", "h.twice_same_call", "h.twice_two_calls", "h.swapped",
    "h.early_id", "h.none", "h.pair_of_none", "h.sets", "h.str_id", "h.unpicklable_tp1", "i3", "i4", "l.id_order",
    "l.generation_first", "l.commit_then_other_build", "l.drafts_and_alias", "l.state_formula", "l.finished_loading_memo",
]  # fmt: skip


def facts_of(name, driver):
    """What a scenario asks of the manager when its steps are done."""
    manager = driver and driver.manager
    return {
        "has_pending_transfers(1)": lambda: manager.has_pending_transfers(driver.requests[1]),
        "get_pending_transfer_requests": lambda: [r.request_id for r in manager.get_pending_transfer_requests()],
        "py_num_connector_matched_tokens": lambda: driver.requests[1].py_num_connector_matched_tokens,
        "still registered as loading": lambda: 1 in manager.new_async_requests.loading,
        "after request_finished": lambda: manager.should_add_sequence(driver.requests[1]),
        "freed": lambda: sorted(driver.freed),
        "requests still kept by the output manager": lambda: manager._reports.kept,
        "entries left": lambda: list(manager.finished_async_loading_requests),
    }


@pytest.mark.parametrize("name", [*PASSES, *STEPS])
def test_what_reaches_the_connector_is_what_the_real_manager_let_through(name):
    driver = Driver(name, forms=FORMS.get(name, ("flat", "grouped")))
    tables, compared = {}, 0
    for number, step in enumerate(scenario(name)["steps"]):
        got = outcome(driver, step)
        where = f"step {number}: {step['do']}"
        assert comparable(driver.recorder.calls) == comparable(step.get("calls", [])), where
        assert got == {key: step[key] for key in ("ret", "raised") if key in step}, where
        for request_id, state in step.get("state", {}).items():
            assert driver.requests[int(request_id)].state.value == state, where
        tables = step.get("mgr", tables)
        assert driver.tables() == tables, where
        if "batch_after" in step:
            parts = {part: [r.request_id for r in getattr(driver.batch, part)] for part in step["batch_after"]}
            assert parts == step["batch_after"], where
        compared += len(step.get("calls", []))
    facts = facts_of(name, driver)
    for fact, value in scenario(name).get("facts", {}).items():
        if fact in facts:
            assert facts[fact]() == value, fact
    assert compared > 5 if name in PASSES else compared > 0


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

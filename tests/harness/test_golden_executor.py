"""The executor's own passes against the golden traces: every call that reaches the connector, in order.

Page slots, block hashes and generated tokens are this executor's own; they are renamed to the trace's, one to one.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.harness.recording import Recorder, prompt, recording_pair, scenario
from tests.harness.test_golden_manager import LOOPS, comparable
from tracekv.harness import Executor

SCHEDULER_FORMS = {"d": ("grouped",), "c3": ("flat",)}
MODES = {
    "a": "v1", "b": "v1", "c1": "v2", "c2": "v2", "c3": "v2", "c.retention": "v2", "d": "v2", "e1": "v1", "e2": "v2",
    "f1": "v2", "i1": "v2",
}  # fmt: skip
CHUNKS = {"b": 128, "c1": 128, "c2": 128, "c3": 128, "f1": 32}
OPTIONS = {"f1": {"grow_limit": 0}}
#: f1 stops in the middle of the prompt.
STEPS = {"f1": 4}
#: e2 asks request 2 first; ids follow the order of submission, so there they are exchanged.
ORDERS = {"e2": {1: 2, 2: 1}}


class Renaming:
    """One-to-one names, given at first sight: ours -> the trace's."""

    def __init__(self):
        self.forward = {}

    def __call__(self, ours, theirs):
        known = self.forward.setdefault(ours, theirs)
        assert known == theirs, f"{ours} was {known} before and is {theirs} now"
        assert list(self.forward.values()).count(theirs) == 1, f"two names for {theirs}"
        return theirs


def golden_calls(name):
    calls = [call for step in scenario(name)["steps"] for call in step.get("calls", [])]
    return comparable(calls)


class Renamer:
    def __init__(self, requests):
        self._requests = requests
        self._pages = defaultdict(Renaming)
        self._hashes = Renaming()
        self._reported = defaultdict(int)
        self._prompts = {}

    def __call__(self, ours, theirs):
        """``ours`` in the names of ``theirs`` as far as they are names; everything else stays as it is."""
        method = ours["m"]
        if method != theirs["m"]:
            return ours
        args = list(ours["args"])
        if method in ("update_state_after_alloc", "request_finished"):
            args[1] = self.pages(0, args[1], theirs["args"][1])
        elif method.endswith("_by_layer_group"):
            args[1] = self.groups(args[1], theirs["args"][1])
        elif method == "build_connector_meta":
            args[0] = {**args[0]}
            for part in ("new_requests", "cached_requests"):
                pairs = zip(args[0][part], theirs["args"][0][part], strict=False)
                if part == "new_requests":
                    for report in args[0][part]:  # a replay begins anew; the trace names its tokens from 900 on again
                        self._reported[report["request_id"]] = 0
                args[0][part] = [self.report(*pair) for pair in pairs] if args[0][part] else []
                if part == "new_requests":
                    self._prompts |= {report["request_id"]: len(report["new_tokens"]) for report in args[0][part]}
        return {**ours, "args": args}

    def pages(self, group, ours, theirs):
        if len(ours) != len(theirs):
            return ours
        return [o if o < 0 or t < 0 else self._pages[group](o, t) for o, t in zip(ours, theirs, strict=True)]

    def groups(self, ours, theirs):
        return [self.pages(group, *pair) for group, pair in enumerate(zip(ours, theirs, strict=True))]

    def report(self, ours, theirs):
        renamed = {
            **ours,
            "new_tokens": self.tokens(ours),
            "new_block_ids": self.pages(0, *both(ours, theirs, "new_block_ids")),
        }
        renamed["new_block_ids_by_layer_group"] = self.groups(*both(ours, theirs, "new_block_ids_by_layer_group"))
        renamed["block_hashes"] = [self._hashes(o, t) for o, t in zip(*both(ours, theirs, "block_hashes"), strict=True)]
        return renamed

    def tokens(self, report):
        request_id = report["request_id"]
        request, tokens = self._requests[request_id], []
        for token in report["new_tokens"]:
            at = self._reported[request_id]
            assert token == request.get_tokens(0)[at]
            generated = at - self._prompts.get(request_id, request.orig_prompt_len)
            if request_id in self._prompts and at < self._prompts[request_id]:
                generated = at - request.orig_prompt_len
            tokens.append(token if generated < 0 else request_id * 1000 + 900 + generated)
            self._reported[request_id] += 1
        return tokens


def both(ours, theirs, field):
    return ours[field], theirs[field]


@pytest.mark.parametrize("name", list(MODES))
def test_the_executor_lets_the_calls_of_the_golden_trace_through(name, model):
    golden = golden_calls(name)
    answers = defaultdict(list)
    for call in golden:
        answers[call["m"]].append(tuple(call["ret"]) if isinstance(call["ret"], list) else call["ret"])
    order = ORDERS.get(name, {})
    recorder = Recorder(answers)
    scheduler, worker = recording_pair(recorder, SCHEDULER_FORMS.get(name, ("flat", "grouped")))
    if name == "d":
        worker = recording_pair(recorder, ("grouped",))[1]
    preset = "gemma3" if name == "d" else "llama"
    driven = model(preset, vocab_size=3000, **({"sliding_window": 64} if name == "d" else {}))
    executor = Executor(
        driven, scheduler, worker, mode=MODES[name], chunk_tokens=CHUNKS.get(name), **OPTIONS.get(name, {})
    )
    if "wait_for_initialization" in answers:
        assert recorder.calls.pop()["m"] == golden.pop(0)["m"]
    recorder.calls.clear()

    requests = {}
    for ours in sorted(LOOPS[name]):
        theirs = order.get(ours, ours)
        length, outputs, _ = LOOPS[name][theirs]
        salt = "s2" if (name, theirs) == ("a", 2) else None
        requests[ours] = executor.submit(prompt(theirs, length), outputs, cache_salt=salt)
    if order:
        for ours, request in requests.items():
            request.request_id = order[ours]
        requests = {request.request_id: request for request in requests.values()}
    if name == "i1":
        for _ in range(3):
            executor.step()
        executor.destroy(requests[1], forget=True)
    for _ in range(STEPS.get(name, 0)):
        executor.step()
    if name not in STEPS:
        executor.run()

    hooks = ("wait_for_layer_load", "save_kv_layer")
    got = [call for call in comparable(recorder.calls) if name == "a" or call["m"] not in hooks]
    rename = Renamer(requests)
    for number, (ours, theirs) in enumerate(zip(got, golden, strict=False)):
        assert rename(ours, theirs) == theirs, f"call {number}"
    assert len(got) == len(golden)
    counted = sum(n for call, n in executor.calls.items() if not call.startswith("worker.register_"))
    assert counted == len(recorder.calls) + 1  # and wait_for_initialization

"""Connector pairs that note what reaches them, in the words of the golden traces, and answer by a script."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import defaultdict, deque
from pathlib import Path

from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, RequestData, SchedulerOutput

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.json"


@functools.cache
def _golden():
    return {scenario["id"]: scenario for scenario in json.loads(GOLDEN.read_text())["scenarios"]}


def scenario(name):
    return _expanded(_golden()[name])


def _expanded(value):
    """Runs of numbers written out."""
    if isinstance(value, dict):
        if set(value) == {"runs"}:
            return [number for first, past in value["runs"] for number in range(first, past)]
        return {key: _expanded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return value


def plain(value):
    """A callback's argument as the golden traces write it; lists are copied, since the runtime goes on using them."""
    if isinstance(value, (RequestData, SchedulerOutput)):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, set):
        return {"set": sorted(value)}
    if hasattr(value, "request_id"):
        return {"req": value.request_id}
    if hasattr(value, "record_event"):
        return "stream"
    return value if value is None or isinstance(value, (bool, int, float, str, dict)) else f"<{type(value).__name__}>"


def raised(error):
    """An exception as the golden traces write it, but for the identifiers that its message names."""
    return {"type": type(error).__name__, "first_words": " ".join(str(error).split()[:4])}


def named_in(error, golden):
    """The facts of an exception, with the identifiers that the golden one names and this one does too."""
    facts = raised(error)
    if "names" in golden:
        facts["names"] = [name for name in golden["names"] if name in str(error)]
    if "groups" in golden:
        facts["groups"] = golden["groups"] if f"{golden['groups']} layer groups" in str(error) else None
    return facts


class Recorder:
    """What reached a connector, in order; ``answers[method]`` are the answers of its next calls, or what they raise."""

    def __init__(self, answers=None):
        self.calls = []
        self.answers = defaultdict(deque, {method: deque(values) for method, values in (answers or {}).items()})

    def note(self, on, method, args):
        default = {"request_finished": False, "request_finished_by_layer_group": False, "get_finished": ([], [])}
        default["get_num_new_matched_tokens"] = (0, False)
        script = self.answers[method]
        answer = script.popleft() if script else default.get(method)
        if isinstance(answer, Exception):
            self.calls.append({"on": on, "m": method, "args": plain(args), "raised": raised(answer)})
            raise answer
        self.calls.append({"on": on, "m": method, "args": plain(args), "ret": plain(answer)})
        return answer

    def of(self, method):
        return [call for call in self.calls if call["m"] == method]

    def reports(self):
        """``(is_new, report)`` of every request in every scheduler output."""
        found = []
        for call in self.of("build_connector_meta"):
            output = call["args"][0]
            found += [(True, report) for report in output["new_requests"]]
            found += [(False, report) for report in output["cached_requests"]]
        return found


_SCHEDULER = {
    "flat": ("update_state_after_alloc", "request_finished"),
    "grouped": ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"),
}
_WORKER = {"flat": ("register_kv_caches",), "grouped": ("register_kv_cache_layout",)}
_BOTH_SCHEDULER = ("get_num_new_matched_tokens", "build_connector_meta", "wait_for_initialization")
_BOTH_WORKER = (
    "bind_connector_meta",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
)


def recording_pair(recorder, forms=("flat", "grouped")):
    """``(scheduler class, worker class)`` that define the callbacks of the given forms."""

    def noting(on, method):
        def callback(self, *args):
            return recorder.note(on, method, args)

        return callback

    def build(on, base, always, by_form):
        names = [*always, *(name for form in forms for name in by_form[form])]
        return type(f"Recording{on.title()}", (base,), {name: noting(on, name) for name in names})

    return (
        build("scheduler", KvCacheConnectorScheduler, _BOTH_SCHEDULER, _SCHEDULER),
        build("worker", KvCacheConnectorWorker, _BOTH_WORKER, _WORKER),
    )


def prompt(request_id, length):
    """The tokens that the golden traces use."""
    return [request_id * 1000 + index for index in range(length)]

"""The function that stands in for each callback: enter, call the inner one, leave with what it carried.

They are made from one template per shape, as ``dataclasses`` makes methods, so that each has the contract's own parameter
names, takes no ``*args`` unless its inner function takes more than the contract gives it, binds that function once, and costs no
call more than it needs. The inner call is in no ``try`` that could swallow: an exception is noted on its way and goes on as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from tracekv.capture.envelope import Envelope
from tracekv.capture.hooks import hooks
from tracekv.capture.templates import function_from
from tracekv.contract import reading
from tracekv.journal.current import current
from tracekv.journal.layout import MAX_LAYERS
from tracekv.journal.vocabulary import Callback

Inner = Callable[..., Any]

_CALLBACK = """\
def {name}({parameters}):
    recorder = self._tracekv_recorder
    if recorder is None or not (started := recorder.{enter}({code})):
        return inner({call})
    try:
        answer = inner({arguments})
    except BaseException as error:
        recorder.raised({code}, started, error)
        raise
    recorder.{instrument}({code}, started{facts})
    return answer
"""

# A hook writes two numbers into the journal's own slots; the pass's record is made from them when the pass ends. They are floats: an
# int of this size costs a third more to take and to store.
_LAYER_HOOK = """\
def {name}({parameters}):
    starts = hooks.{instrument}
    if starts is None:
        return inner({call})
    try:
        starts[layer_idx] = now()
    except Exception as error:
        starts = hook_failed(self, "{name}", "{instrument}", layer_idx, error)
        if starts is None:
            return inner({call})
    try:
        answer = inner({call})
    except BaseException as error:
        hook_raised(self, {code}, starts[layer_idx], error)
        raise
    hooks.{instrument}_ends[layer_idx] = now()
    return answer
"""


_BUILD = """\
def {name}({parameters}):
    recorder = self._tracekv_recorder
    if recorder is None or not (started := recorder.enter_step({code})):
        return inner({call})
    recorder.steps += 1
    current.step = recorder.steps
    try:
        metadata = inner({call})
    except BaseException as error:
        recorder.raised({code}, started, error)
        raise
    recorder.build({code}, started, scheduler_output, metadata)
    return recorder.enclose(metadata)
"""

# Unwrapping is no instrument: it happens even where every instrument is gone.
_BIND = """\
def {name}({parameters}):
    envelope = None
    if type(metadata) is Envelope:
        envelope = metadata
        metadata = envelope.inner
    recorder = self._tracekv_recorder
    if recorder is None or not (started := recorder.enter_step({code})):
        return inner({call})
    if envelope is not None:
        current.step = envelope.step
    try:
        answer = inner({call})
    except BaseException as error:
        recorder.raised({code}, started, error)
        raise
    recorder.bind({code}, started, envelope)
    return answer
"""

# The ids are copied before the call: the inner connector may empty the lists that it was given. What isn't as the contract has it
# may not be listed, nor compared: that is our fault, and not the engine's.
_GET_FINISHED = """\
def {name}({parameters}):
    recorder = self._tracekv_recorder
    if recorder is None or not (started := recorder.enter({code})):
        return inner({call})
    try:
        saving, loading = list(finished_gen_req_ids), list(started_loading_req_ids)
    except Exception as error:
        saving, loading = [], []
        recorder.remove("finished", error)
    try:
        answer = inner({call})
    except BaseException as error:
        recorder.raised({code}, started, error)
        raise
    try:
        is_idle = not saving and not loading and answer == ([], [])
    except Exception:
        is_idle = False
    if is_idle:
        recorder.idle_poll({code}, started)
    else:
        recorder.finished({code}, started, saving, loading, answer)
    return answer
"""

# The runtime registers only a truthy answer, so a falsy one goes back as it is.
_REGISTER_CALLABLE = """\
def {name}({parameters}):
    recorder = self._tracekv_recorder
    if recorder is None or not (started := recorder.enter_bring_up({code})):
        return inner({call})
    try:
        given = inner({call})
    except BaseException as error:
        recorder.raised({code}, started, error)
        raise
    recorder.forward_callable({code}, started, given)
    return forward_pass_callable(recorder, given) if given else given
"""


def _hook_failed(
    instance: Any, name: str, instrument: str, layer: object, error: Exception
) -> memoryview[float] | None:
    """The slots with the hook's start, where it has one now: a layer of no registered group comes as one out of reach."""
    if isinstance(error, IndexError) and isinstance(layer, int) and 0 <= layer < MAX_LAYERS:
        hooks.reach(MAX_LAYERS)
        starts: memoryview[float] | None = getattr(hooks, instrument)
        if starts is not None and layer < len(starts):
            starts[layer] = perf_counter()
            return starts
        return None
    recorder = instance._tracekv_recorder
    if recorder is not None:
        recorder.remove(name, error)
    return None


def _hook_raised(instance: Any, code: int, started: float, error: BaseException) -> None:
    recorder = instance._tracekv_recorder
    if recorder is not None:
        recorder.raised(code, round(1e9 * started), error)


class _Shape(NamedTuple):
    """What fills a template.

    Attributes:
        facts: The instrument's arguments after the time.
        arguments: The inner call's, where they aren't the parameters.
    """

    parameters: str
    instrument: str = "simple"
    facts: str = ""
    enter: str = "enter"
    template: str = _CALLBACK
    arguments: str | None = None


_SHAPES = {
    Callback.GET_NUM_NEW_MATCHED_TOKENS: _Shape(
        "self, request, num_computed_tokens", "query", ", request, num_computed_tokens, answer"
    ),
    Callback.UPDATE_STATE_AFTER_ALLOC: _Shape("self, request, block_ids", "alloc", ", request, [block_ids]"),
    Callback.UPDATE_STATE_AFTER_ALLOC_BY_LAYER_GROUP: _Shape(
        "self, request, block_ids_by_layer_group", "alloc", ", request, block_ids_by_layer_group"
    ),
    Callback.REQUEST_FINISHED: _Shape(
        "self, request, cache_block_ids", "finish", ", request, [cache_block_ids], answer"
    ),
    Callback.REQUEST_FINISHED_BY_LAYER_GROUP: _Shape(
        "self, request, cache_block_ids_by_layer_group", "finish", ", request, cache_block_ids_by_layer_group, answer"
    ),
    Callback.BUILD_CONNECTOR_META: _Shape("self, scheduler_output", template=_BUILD),
    Callback.WAIT_FOR_INITIALIZATION: _Shape("self", enter="enter_bring_up"),
    Callback.CANCEL_LOAD: _Shape("self, request, start, end", "cancel_load", ", request, start, end"),
    Callback.REQUEST_RESET: _Shape("self, request", "request_reset", ", request"),
    Callback.SCHEDULER_SHUTDOWN: _Shape("self", enter="enter_bring_up"),
    Callback.REGISTER_KV_CACHES: _Shape(
        "self, kv_cache_tensor",
        "register",
        ", reading.layout_of_tensor, kv_cache_tensor",
        "enter_bring_up",
        arguments="self, recorder.hand_out(kv_cache_tensor)",
    ),
    Callback.REGISTER_KV_CACHE_LAYOUT: _Shape(
        "self, layout",
        "register",
        ", reading.layout_of, layout",
        "enter_bring_up",
        arguments="self, recorder.hand_out(layout)",
    ),
    Callback.REGISTER_FORWARD_PASS_CALLABLE: _Shape("self", template=_REGISTER_CALLABLE),
    Callback.BIND_CONNECTOR_META: _Shape("self, metadata", template=_BIND),
    Callback.START_LOAD_KV: _Shape("self, stream"),
    Callback.WAIT_FOR_LAYER_LOAD: _Shape("self, layer_idx, stream", "waits", template=_LAYER_HOOK),
    Callback.SAVE_KV_LAYER: _Shape("self, layer_idx, stream", "saves", template=_LAYER_HOOK),
    Callback.WAIT_FOR_SAVE: _Shape("self, stream", "end_pass"),
    Callback.GET_FINISHED: _Shape("self, finished_gen_req_ids, started_loading_req_ids", template=_GET_FINISHED),
    Callback.WORKER_SHUTDOWN: _Shape("self", enter="enter_bring_up"),
}


def wrap(callback: Callback, inner: Inner) -> Inner:
    """The function to put in place of ``inner``, an unbound function that takes ``self`` first."""
    shape = _SHAPES[callback]
    defaults, more = _beyond_the_contract(inner, shape.parameters.split(", "))
    source = shape.template.format(
        name=callback.method,
        code=int(callback),
        parameters=", ".join(
            f"{name}=defaults[{name!r}]" if name in defaults else name for name in shape.parameters.split(", ")
        )
        + more,
        call=shape.parameters + more,
        arguments=(shape.arguments or shape.parameters) + more,
        enter=shape.enter,
        instrument=shape.instrument,
        facts=shape.facts,
    )
    scope: dict[str, Any] = {
        "inner": inner,
        "defaults": defaults,
        "reading": reading,
        "now": perf_counter,
        "hooks": hooks,
        "current": current,
        "Envelope": Envelope,
        "hook_failed": _hook_failed,
        "hook_raised": _hook_raised,
        "forward_pass_callable": _forward_pass_callable,
    }
    return function_from(source, callback.method, f"wrapper of {callback.side.value}.{callback.method}", scope)


def _beyond_the_contract(inner: Inner, names: list[str]) -> tuple[dict[str, Any], str]:
    """Defaults of ``inner`` for the contract's parameters, and what passes further ones on: a connector's own code may use them."""
    own = list(inspect.signature(inner).parameters.values())
    places = [each for each in own if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    defaults = {name: each.default for name, each in zip(names, places, strict=False) if each.default is not each.empty}
    takes_more = len(places) > len(names) or len(places) < len(own)
    return defaults, ", *more, **named" if takes_more else ""


def _forward_pass_callable(recorder: Any, given: Inner) -> Inner:
    code = int(Callback.FORWARD_PASS_CALLABLE)

    def forward_pass_callable(*args: Any, **kwargs: Any) -> Any:
        # Once a pass, and its arguments are between the runtime and the connector: passed on as they come.
        if not (started := recorder.enter_bring_up(code)):
            return given(*args, **kwargs)
        try:
            answer = given(*args, **kwargs)
        except BaseException as error:
            recorder.raised(code, started, error)
            raise
        recorder.simple(code, started)
        return answer

    return forward_pass_callable

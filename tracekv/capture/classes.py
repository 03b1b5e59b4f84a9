"""Builds the traced class from a connector class: a subclass that overrides what the inner class overrides, and no more.

The runtime looks at classes, not at instances: ``type(x).method is Base.method`` says which set of callbacks a connector has,
``supports_attention_dp`` is read from the class. A proxy with every method would change the answers, so the subclass mirrors its
inner class (contract.md section 3, "For a transparent wrapper").
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from tracekv import contract
from tracekv.capture.recorder import Recorder
from tracekv.capture.session import Session, session
from tracekv.capture.wrappers import wrap
from tracekv.journal.records import CallbackSource, ConnectorWrapped
from tracekv.journal.vocabulary import Callback, Side

C = TypeVar("C", bound=type)

_BASES = {Side.SCHEDULER: contract.KvCacheConnectorScheduler, Side.WORKER: contract.KvCacheConnectorWorker}
#: A class without the base class is told by the callback that only one side can have.
_TELLTALES = {Side.SCHEDULER: "build_connector_meta", Side.WORKER: "start_load_kv"}
_NOT_METHODS = {Callback.SCHEDULER_INIT, Callback.WORKER_INIT, Callback.FORWARD_PASS_CALLABLE}
#: In no base class: a connector has them or not.
_OPTIONAL = {"shutdown", "cancel_load", "request_reset"}
#: Holds an instance's recorder, or None. Set past the class's own ``__setattr__``, which may need what ``__init__`` makes.
_SLOT = "_tracekv_recorder"
_set = object.__setattr__

#: Weak on both sides: a traced class holds its inner one, which would then be there for good.
_traced: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()
_results: weakref.WeakSet[type] = weakref.WeakSet()
_registering = threading.Lock()


def trace(connector: C) -> C:
    """The traced form of a connector class, scheduler or worker; usable as a decorator.

    It behaves as the class does: the same overrides, class attributes, exceptions and answers. While
    ``TRACEKV_DETAIL=off`` its instances record nothing. A class is traced once; a traced class is returned as it is.

    Args:
        connector: A subclass of ``tracekv.contract.KvCacheConnectorScheduler`` or ``...Worker``, or a class that has
            the callbacks of one of them without inheriting it.

    Raises:
        TypeError: ``connector`` is no connector class.

    Source: DESIGN.md, "capture: wrapping any connector".
    """
    if connector in _results:
        return connector
    return _registered(connector) or _registered(connector, _build(connector))  # type: ignore[return-value]


def _registered(connector: type, fresh: type | None = None) -> type | None:
    """The traced form that there is, which from now on is ``fresh`` where there is none."""
    with _registering:
        reference = _traced.get(connector)
        known = reference() if reference is not None else None
        if known is None and fresh is not None:
            known = fresh
            _traced[connector] = weakref.ref(fresh)
            _results.add(fresh)
        return known


def side_of(connector: type) -> Side:
    """Which half of a connector a class is; TypeError if it is none."""
    sides = [side for side, base in _BASES.items() if isinstance(connector, type) and issubclass(connector, base)]
    if not sides:
        sides = [side for side, name in _TELLTALES.items() if hasattr(connector, name)]
    if len(sides) != 1:
        has = "the callbacks of both halves" if sides else "neither build_connector_meta nor start_load_kv"
        name = getattr(connector, "__qualname__", repr(connector))
        raise TypeError(
            f"tracekv: {name} has {has}. trace() takes a scheduler class or a worker class of a KV cache connector."
        )
    return sides[0]


def implemented_callbacks(connector: type) -> dict[Callback, Any]:
    """The callbacks that a class overrides relative to its base, along the MRO, with what it defines."""
    side = side_of(connector)
    base = _BASES[side]
    found: dict[Callback, Any] = {}
    for callback in Callback:
        if callback.side is not side or callback in _NOT_METHODS:
            continue
        defined = inspect.getattr_static(connector, callback.method, None)
        if defined is None or defined is inspect.getattr_static(base, callback.method, None):
            continue
        if not getattr(defined, "__isabstractmethod__", False) and not _is_injected_stub(defined, base):
            found[callback] = defined
    return found


def _is_injected_stub(defined: Any, base: type) -> bool:
    # The base's __init_subclass__ puts it into the class; its module is still the base's.
    return getattr(defined, "__module__", None) == base.__module__


def _build(inner: type) -> type:
    side = side_of(inner)
    implemented = implemented_callbacks(inner)
    wrapped = dict(implemented)
    bind = inspect.getattr_static(inner, "bind_connector_meta", None)
    if side is Side.WORKER and bind is not None:
        # Always: it takes the envelope off. No probe looks at it.
        wrapped[Callback.BIND_CONNECTOR_META] = bind

    made: list[type] = []

    def fill(namespace: dict[str, Any]) -> None:
        slots = [] if hasattr(inner, _SLOT) else [_SLOT]
        if not inner.__weakrefoffset__:
            slots.append("__weakref__")
        namespace["__slots__"] = slots
        namespace["__module__"] = inner.__module__
        namespace["__qualname__"] = inner.__qualname__
        namespace["__doc__"] = inner.__doc__
        namespace["__new__"] = _new(inner)
        namespace["__init__"] = _init(made, inner, side, implemented)
        for callback, defined in wrapped.items():
            function = _unbound(made, callback.method, defined)
            namespace[callback.method] = functools.update_wrapper(wrap(callback, function), function)

    made.append(types.new_class(inner.__name__, (inner,), {}, fill))
    return made[0]


def _unbound(made: list[type], name: str, defined: Any) -> Callable[..., Any]:
    """What to call with ``self`` first. A function is bound once; any other descriptor is asked at each call."""
    if inspect.isfunction(defined):
        return defined

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(made[0], self), name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _new(inner: type) -> Callable[..., Any]:
    made_by: Any = inner.__new__
    plain: Any = object.__new__

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        instance = made_by(cls) if made_by is plain else made_by(cls, *args, **kwargs)
        # Not every instance comes to our __init__: a copy doesn't, nor one of a subclass that leaves it out.
        if isinstance(instance, cls):
            _set(instance, _SLOT, None)
        return instance

    # Whose signature is the class's.
    __new__.__wrapped__ = inner.__init__ if made_by is plain else made_by  # type: ignore[attr-defined, misc]
    return __new__


def _init(made: list[type], inner: type, side: Side, implemented: dict[Callback, Any]) -> Callable[..., None]:
    original = inner.__init__  # type: ignore[misc]
    code = Callback.SCHEDULER_INIT if side is Side.SCHEDULER else Callback.WORKER_INIT

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # Until it is constructed its own calls are nobody's business; from then on its recorder stands in the slot.
        _set(self, _SLOT, None)
        # A traced class may be traced again further down, and records there.
        capture = session() if _most_derived(type(self)) is made[0] else None
        if capture is None:
            original(self, *args, **kwargs)
            return
        llm_args = args[0] if args else kwargs.get("llm_args")
        recorder = _recorder(capture, side, llm_args)
        if side is Side.SCHEDULER:
            capture.lint(inner, llm_args)
        started = recorder.enter_bring_up(code)
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            if started:
                recorder.raised(code, started, error)
            raise
        if started:
            recorder.simple(code, started)
        _announce(self, inner, side, implemented, capture, recorder)
        recorder.learn_engine(args[0] if args else kwargs.get("llm_args"))
        _set(self, _SLOT, recorder)

    return __init__


def _most_derived(kind: type) -> type:
    return next(each for each in kind.__mro__ if each in _results)


def _recorder(capture: Session, side: Side, llm_args: Any) -> Recorder:
    run_id = os.urandom(16) if side is Side.SCHEDULER else b""
    if capture.settings.watch or capture.settings.record:
        try:
            module: Any = importlib.import_module("tracekv.capture.observers")
            observed: Recorder = module.observed_recorder(capture, side, run_id, llm_args)
            return observed
        except Exception as error:
            capture.fault("observers", error)
    return Recorder(capture, run_id)


def _announce(
    instance: object, inner: type, side: Side, implemented: dict[Callback, Any], capture: Session, recorder: Recorder
) -> None:
    try:
        missing = [
            callback.method
            for callback in Callback
            if callback.side is side
            and callback not in implemented
            and callback not in _NOT_METHODS
            and callback.method not in _OPTIONAL
        ]
        sources = [_source(callback, defined) for callback, defined in implemented.items()]
        capture.journal.write(ConnectorWrapped(side, f"{inner.__module__}.{inner.__qualname__}", sources, missing))
        if side is Side.SCHEDULER:
            capture.join_run(recorder.run_id)
        else:
            capture.add_worker(instance)
    except Exception as error:
        recorder.remove("announce", error)


def _source(callback: Callback, defined: Any) -> CallbackSource:
    code = getattr(inspect.unwrap(defined) if callable(defined) else defined, "__code__", None)
    return CallbackSource(callback.method, code.co_filename if code else "", code.co_firstlineno if code else 0)

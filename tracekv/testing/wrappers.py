"""Wrappers around a connector's classes: slow down, fail, or count the I/O of its callbacks.

.. code-block:: python

   Slow = with_latency(MyWorker, 0.2, "start_load_kv")
   Failing = with_fault(MyWorker, OSError("disk full"), "wait_for_save", after=3)

Each answers a subclass that overrides those callbacks only that the class implements itself, so the runtime's probes of the class
see no difference.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tracekv.capture import implemented_callbacks

Connector = TypeVar("Connector", bound=type)
#: Called with the instance, the callback's name, and the call itself; answers what the callback answers.
Around = Callable[[Any, str, Callable[[], Any]], Any]


def wrapped(cls: Connector, around: Around, *callbacks: str) -> Connector:
    """A subclass whose callbacks go through ``around``.

    Args:
        cls: A scheduler or worker class.
        around: See :data:`Around`.
        callbacks: Names; none: every one that the class implements.

    Raises:
        ValueError: A callback that the class doesn't implement.
    """
    implemented = {callback.method for callback in implemented_callbacks(cls)}
    if unknown := sorted(set(callbacks) - implemented):
        raise ValueError(
            f"tracekv: {cls.__module__}.{cls.__qualname__} does not implement {', '.join(unknown)}; it implements "
            f"{', '.join(sorted(implemented))}"
        )
    methods = {name: _method(cls, name, around) for name in callbacks or sorted(implemented - {"__init__"})}
    namespace = {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Connector = type(cls)(cls.__name__, (cls,), namespace)
    return made


def _method(cls: type, name: str, around: Around) -> Callable[..., Any]:
    inner = getattr(cls, name)

    @functools.wraps(inner)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, name, lambda: inner(self, *args, **kwargs))

    return method


def with_latency(cls: Connector, seconds: float, *callbacks: str) -> Connector:
    """A subclass whose callbacks take ``seconds`` longer."""

    def around(_: Any, __: str, call: Callable[[], Any]) -> Any:
        time.sleep(seconds)
        return call()

    return wrapped(cls, around, *callbacks)


def with_fault(
    cls: Connector, error: Exception, *callbacks: str, after: int = 0, times: int | None = None
) -> Connector:
    """A subclass whose callbacks raise ``error`` in place of being called.

    Args:
        cls: A scheduler or worker class.
        error: What is raised.
        callbacks: Names; none: every one.
        after: So many calls go well first, all callbacks and instances together.
        times: How often it is raised; None: from then on.
    """
    calls = 0

    def around(_: Any, __: str, call: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls > after and (times is None or calls <= after + times):
            raise error
        return call()

    return wrapped(cls, around, *callbacks)


@dataclass
class IoCount:
    """File I/O of one callback, on the thread that called it: system calls, and bytes, those of the page cache included."""

    calls: int = 0
    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass
class IoCounts:
    """By callback; ``is_known`` is False where the system doesn't tell (only Linux does)."""

    of: dict[str, IoCount] = field(default_factory=dict)
    is_known: bool = True


def with_io_counted(cls: Connector, counts: IoCounts, *callbacks: str) -> Connector:
    """A subclass that counts the file I/O inside its callbacks: what it makes the engine's thread wait for.

    Sockets and mapped memory are not in these numbers.
    """

    def around(_: Any, name: str, call: Callable[[], Any]) -> Any:
        before = _io()
        if before is None:
            counts.is_known = False
            return call()
        try:
            return call()
        finally:
            after = _io() or before
            count = counts.of.setdefault(name, IoCount())
            count.calls += 1
            # What was read to know the numbers before is in them.
            count.read_bytes += after["rchar"] - before["rchar"] - before["own"]
            count.written_bytes += after["wchar"] - before["wchar"]
            count.reads += after["syscr"] - before["syscr"] - 2
            count.writes += after["syscw"] - before["syscw"]

    return wrapped(cls, around, *callbacks)


def _io() -> dict[str, int] | None:
    try:
        text = Path("/proc/thread-self/io").read_text()
    except OSError:
        return None
    found = {name: int(value) for name, _, value in (line.partition(": ") for line in text.splitlines())}
    found["own"] = len(text)
    return found

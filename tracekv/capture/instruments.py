"""The guard around what a recorder writes: it runs after the inner call, and nothing of it may reach the engine.

An instrument that fails is removed and reported once; while tracing costs too much, those of every pass only count.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import perf_counter_ns
from typing import Concatenate, ParamSpec, TypeVar

from tracekv.capture.budget import ENTER_NS
from tracekv.capture.templates import function_from

#: What is only counted while tracing costs too much: what comes with every pass.
_PER_STEP = frozenset({"simple", "build", "bind", "end_pass", "finished", "idle_poll"})

S = TypeVar("S")
P = ParamSpec("P")

_GUARDED = """\
def {name}({parameters}):
    ended = now()
    self.leave()
    if "{name}" in self.removed:
        return
    try:
        if {is_per_step} and self._budget.is_reduced:
            self.count(code, started, ended)
        else:
            method({arguments})
            self._budget.spent_ns += now() - ended + ENTER_NS
    except Exception as error:
        self.remove("{name}", error)
"""


def instrument(
    method: Callable[Concatenate[S, int, int, int, P], None],
) -> Callable[Concatenate[S, int, int, P], None]:
    """Leave the callback, then write its record; whatever fails in the writing removes the instrument."""
    name = method.__name__
    arguments = list(inspect.signature(method).parameters)
    source = _GUARDED.format(
        name=name,
        parameters=", ".join(argument for argument in arguments if argument != "ended"),
        arguments=", ".join(arguments),
        is_per_step=name in _PER_STEP,
    )
    scope = {"method": method, "now": perf_counter_ns, "ENTER_NS": ENTER_NS}
    return functools.wraps(method)(function_from(source, name, f"instrument {name}", scope))

"""Functions made from a template, as ``dataclasses`` makes methods: with the parameters that they need and no ``*args``."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any


def function_from(source: str, name: str, title: str, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """The function ``name`` that ``source`` defines; ``scope`` holds the globals that it sees.

    ``title`` stands for its file in tracebacks, which show its lines.
    """
    filename = f"<tracekv {title}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names = dict(scope)
    exec(compile(source, filename, "exec"), names)  # noqa: S102  # our own templates, filled with constants
    made: Callable[..., Any] = names[name]
    return made

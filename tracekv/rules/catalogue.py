"""Every rule, in the order in which they judge: causes before what may follow from them."""

from __future__ import annotations

import inspect
from types import ModuleType

from tracekv.rules import (
    calls,
    coverage,
    isolation,
    lifetime,
    metadata,
    numbers,
    offers,
    pages,
    pairing,
    performance,
    streams,
)
from tracekv.rules.model import Rule

MODULES: tuple[ModuleType, ...] = (
    offers,
    calls,
    metadata,
    pages,
    lifetime,
    pairing,
    coverage,
    isolation,
    performance,
    numbers,
    streams,
)


def rules_of(module: ModuleType) -> list[type[Rule]]:
    """A module's rules in the order in which they are written."""
    return [
        found
        for found in vars(module).values()
        if inspect.isclass(found) and issubclass(found, Rule) and found.id and found.__module__ == module.__name__
    ]


RULES: tuple[type[Rule], ...] = tuple(rule for module in MODULES for rule in rules_of(module))

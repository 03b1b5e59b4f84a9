"""The table of plays: each fault with the rule that has to name it, and the clean runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tracekv.testing.corpus.stage import Stage

Play = Callable[[Stage], None]


class Fault(NamedTuple):
    """One broken connector (or runtime).

    Attributes:
        id: The function's name, with dashes.
        rule: Id of the rule that has to name it first.
        how: ``run`` in the reference executor; ``ranks``: on two ranks of it; ``driven`` through its traced classes, callback by
            callback; ``records`` written by hand, where no run can produce them here.
        what: One line.
        play: Plays it.
    """

    id: str
    rule: str
    how: str
    what: str
    play: Play


FAULTS: dict[str, Fault] = {}
CLEAN: dict[str, Play] = {}


def fault(rule: str, how: str = "run") -> Callable[[Play], Play]:
    """Enter a play as a fault; its docstring says what is wrong."""

    def enter(play: Play) -> Play:
        name = play.__name__.replace("_", "-")
        FAULTS[name] = Fault(name, rule, how, (play.__doc__ or "").strip(), play)
        return play

    return enter


def clean(play: Play) -> Play:
    """Enter a play of which no rule may name anything."""
    CLEAN[play.__name__.replace("_", "-")] = play
    return play

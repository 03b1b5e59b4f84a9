"""From a load to what first needed it: the layer hook that waited for it, else the forward pass that it was for."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tracekv.journal.vocabulary import Callback
from tracekv.views.timeline import Bar, Row

#: Passes whose uses and loads are kept: connectors tell of a load late, but not later than this.
_KEPT_PASSES = 4
#: Loads of one pass that wait for their use.
_MOST_LOADS = 16_384
_WAIT = Callback.WAIT_FOR_LAYER_LOAD.method
_FORWARD = Callback.FORWARD_PASS_CALLABLE.method


class Placed(NamedTuple):
    """A bar, and the track that whoever draws gave it."""

    bar: Bar
    track: int


class Arrow(NamedTuple):
    """A load and its first use."""

    load: Placed
    use: Placed


class _Pass:
    def __init__(self) -> None:
        self.loads: list[Placed] = []
        #: Layer group -> wait hooks in the order of time.
        self.waits: dict[int, list[Placed]] = {}
        self.forward: Placed | None = None
        self.whole: Placed | None = None


class FirstUses:
    """Consumes the bars of one journal in the order in which they were told.

    A load of layer group g in pass n is first used by the first ``wait_for_layer_load`` of a layer of g in n that ended no earlier
    than the load. Where the connector has no such hook, by the forward callable of the pass, else by the pass. A load that
    ended after all of these has no use that is known.
    """

    def __init__(self) -> None:
        self._passes: OrderedDict[int, _Pass] = OrderedDict()

    def feed(self, bar: Bar, track: int) -> list[Arrow]:
        """Take a bar; the arrows that are known by now."""
        placed = Placed(bar, track)
        match bar.lane.row:
            case Row.LOADS if bar.error is None:
                known = self._pass(bar.step)
                if known.whole is not None:
                    return self._settle(known, [placed])
                if len(known.loads) < _MOST_LOADS:
                    known.loads.append(placed)
            case Row.HOOKS if bar.name == _WAIT:
                self._pass(bar.step).waits.setdefault(bar.lane.group, []).append(placed)
            case Row.WORKER if bar.name == _FORWARD:
                self._pass(bar.step).forward = placed
            case Row.PASSES:
                known = self._pass(bar.step)
                known.whole = placed
                loads, known.loads = known.loads, []
                return self._settle(known, loads)
        return []

    def _pass(self, step: int) -> _Pass:
        known = self._passes.get(step)
        if known is None:
            known = self._passes[step] = _Pass()
            while len(self._passes) > _KEPT_PASSES:
                self._passes.popitem(last=False)
        return known

    def _settle(self, known: _Pass, loads: list[Placed]) -> list[Arrow]:
        arrows = []
        for load in loads:
            waits = known.waits.get(load.bar.lane.group, [])
            # Hooks are told by layer; a group's layers run in that order.
            others = [] if waits else [use for use in (known.forward, known.whole) if use is not None]
            use = next((use for use in (waits or others) if use.bar.end_ns >= load.bar.end_ns), None)
            if use is not None:
                arrows.append(Arrow(load, use))
        return arrows

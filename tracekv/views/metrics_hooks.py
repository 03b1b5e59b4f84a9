"""The per-layer hooks of a process's passes: how many were expected, how many were called, and the time in each layer group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import itemgetter, sub

from tracekv.journal.records import ConnectorWrapped, LayerHooks, RegisterCall
from tracekv.journal.vocabulary import Callback
from tracekv.views import names
from tracekv.views.facts import Facts
from tracekv.views.metrics_model import Histogram, Key

Pick = Callable[[Sequence[int]], tuple[int, ...]]

_HOOKS = {
    callback: f"{callback.side.value}.{callback.method}"
    for callback in (Callback.WAIT_FOR_LAYER_LOAD, Callback.SAVE_KV_LAYER)
}


class HookMetrics:
    """Fed by the metrics of a process.

    Args:
        counts: The process's counters.
        facts: What is known of it; observed by whoever feeds.
        duration_of: The histogram of a callback's durations.
    """

    def __init__(self, counts: defaultdict[Key, int], facts: Facts, duration_of: Callable[[int], Histogram]) -> None:
        self._counts = counts
        self._facts = facts
        self._duration_of = duration_of
        self._num_layers = 0
        #: Their number where they are 0, 1, 2, ..., else -1.
        self._dense_layers = -1
        self._group_layers: list[tuple[int, Pick]] = []
        self._expected: tuple[str, ...] = ()

    def registered(self, record: RegisterCall) -> None:
        """The layers are known."""
        layers = {layer for group in record.groups for layer in group.layer_ids}
        self._num_layers = len(layers)
        self._dense_layers = len(layers) if layers == set(range(len(layers))) else -1
        self._group_layers = [
            (group.layer_group_id, _picker(group.layer_ids)) for group in record.groups if group.layer_ids
        ]

    def wrapped(self, record: ConnectorWrapped) -> None:
        """The worker's class is known, and so which hooks it has."""
        implemented = {source.name for source in record.implemented}
        self._expected = tuple(name for hook, name in _HOOKS.items() if hook.method in implemented)

    def pass_ended(self) -> None:
        """Each layer's hooks were due once more."""
        for hook in self._expected:
            self._counts[names.METRIC_LAYER_HOOK_EXPECTED, hook] += self._num_layers

    def called(self, record: LayerHooks) -> None:
        """The hooks of a pass."""
        for (callback, hook), payload in zip(_HOOKS.items(), (record.waits, record.saves), strict=True):
            times = memoryview(payload)[: len(payload) // 16 * 16].cast("q").tolist()
            starts, ends = times[::2], times[1::2]
            seen = len(starts) - starts.count(0)
            if seen:
                self._counts[names.METRIC_LAYER_HOOK_SEEN, hook] += seen
                self._add_times(self._duration_of(callback), hook, starts, ends, seen)

    def _add_times(self, durations: Histogram, hook: str, starts: list[int], ends: list[int], seen: int) -> None:
        counts = self._counts
        if seen == self._dense_layers and seen == len(starts) and 0 not in ends:
            # The usual pass: each registered layer was called and no other. Everything at the speed of C.
            took = list(map(sub, ends, starts))
            durations.add_all(took)
            for group, pick in self._group_layers:
                counts[names.METRIC_LAYER_HOOK_TIME, hook, group] += max(0, sum(pick(took)))
            return
        took = []
        for layer, (started, ended) in enumerate(zip(starts, ends, strict=True)):
            # An end of 0: the hook raised, and has a record of its own.
            if started and ended:
                took.append(max(0, ended - started))
                counts[names.METRIC_LAYER_HOOK_TIME, hook, self._facts.group_of_layer(layer)] += took[-1]
        durations.add_all(took)


def _picker(positions: Sequence[int]) -> Pick:
    """Picks the items at ``positions`` as a tuple."""
    if len(positions) == 1:
        only = positions[0]
        return lambda items: (items[only],)
    return itemgetter(*positions)

"""The layer hooks of a large run: a pass has dozens of them, and they are arrays of times already, so they are summed as arrays."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.journal.arrays import np, npt
from tracekv.journal.columns import Columns, Ints, alike
from tracekv.journal.records import LayerHooks, in_ns
from tracekv.journal.vocabulary import Callback
from tracekv.views.bulk.drawing import Durations, stretches
from tracekv.views.into import Into
from tracekv.views.runs import Segment
from tracekv.views.timeline import Block, Lane, Row

_Bools = npt.NDArray[np.bool_]
_Both = dict[Callback, tuple[Ints, Ints]]
_HOOKS = (Callback.WAIT_FOR_LAYER_LOAD, Callback.SAVE_KV_LAYER)


def take_hooks(segment: Segment, into: Into) -> None:
    """Count and draw the layer hooks of a process: the passes that begin within one width together."""
    durations = Durations(into.view)
    for found in segment.batches_by_kind(LayerHooks):
        payloads = found[LayerHooks].payloads
        columns = Columns(LayerHooks, payloads)
        columns.skip()
        waits, saves, in_seconds = columns.blobs(), columns.blobs(), columns.truths().astype(np.int64)
        singly = [np.flatnonzero(columns.odd)]
        for (is_in_seconds, *lengths), rows in alike(~columns.odd, in_seconds, waits[1], saves[1]):
            both = {
                callback: _times(columns.read(begins[rows], length // 16 * 16), in_seconds=bool(is_in_seconds))
                for callback, (begins, _), length in zip(_HOOKS, (waits, saves), lengths, strict=True)
            }
            is_plain, is_within, is_short = _are(both, into)
            singly.append(rows[~is_plain])
            for at in rows[is_plain & is_within & ~is_short].tolist():
                record = segment.process.decoded(payloads[at])
                if isinstance(record, LayerHooks):
                    into.take(into.timeline.hooks(in_ns(record)))
            _take_plain(both, is_plain, is_within & is_short, into, durations)
        for at in np.concatenate(singly).tolist():
            record = segment.process.decoded(payloads[at])
            if isinstance(record, LayerHooks):
                into.take_singly(in_ns(record))
    durations.close()


def _are(both: _Both, into: Into) -> tuple[_Bools, _Bools, _Bools]:
    """Passes of which all hooks were called and left, those within the time that is drawn, and those within a width."""
    took = [ends - starts for starts, ends in both.values()]
    # Layers that took no time that can be told, weren't called (0, 0), or raised: an end of 0.
    is_plain = np.logical_and.reduce([each.min(axis=1, initial=1) > 0 for each in took])
    is_short = np.logical_and.reduce(
        [_latest(ends) - _earliest(starts) < into.picture.width_ns for starts, ends in both.values()]
    )
    is_within = np.logical_or.reduce(
        [((ends >= into.begin) & (starts <= into.end)).any(axis=1) for starts, ends in both.values()]
    )
    return is_plain, is_within, is_short


def _take_plain(both: _Both, is_plain: _Bools, is_drawn: _Bools, into: Into, durations: Durations) -> None:
    """Count the passes that are plain, and draw those of them that are to be."""
    into.view.summary.records += int(is_plain.sum())
    for callback, (starts, ends) in both.items():
        durations.add(callback, _only(ends, is_plain) - _only(starts, is_plain))
        starts, ends = (_only(each, is_plain & is_drawn) for each in (starts, ends))
        for group, (first, last) in into.timeline.spans_of_groups(starts.shape[1]):
            lane = Lane(Row.HOOKS, group)
            for block in _blocks(
                lane, callback.method, starts[:, first:last], ends[:, first:last], into.picture.width_ns
            ):
                if block.last_ns >= into.begin and block.first_ns <= into.end:
                    into.picture.add_block(block)


def _only(passes: Ints, chosen: _Bools) -> Ints:
    return passes if chosen.all() else passes[chosen]  # nearly always all of them


def _times(stored: npt.NDArray[np.uint8], *, in_seconds: bool) -> tuple[Ints, Ints]:
    """When the hooks of each pass began and ended, in ns: two arrays of passes by layers."""
    moments = np.rint(1e9 * stored.view(np.float64)).astype(np.int64) if in_seconds else stored.view(np.int64)
    return moments[:, ::2], moments[:, 1::2]


def _blocks(lane: Lane, name: str, starts: Ints, ends: Ints, width: int) -> Iterator[Block]:
    """Passes of one hook and layer group: neighbours that begin in one place are one."""
    if not starts.size:
        return
    took = ends - starts
    layers = np.full(len(took), took.shape[1])
    found = stretches(width, _earliest(starts), _latest(ends), layers, took.sum(axis=1), took.max(axis=1))
    for each in found:
        yield Block(lane, *each[2:], name)


def _earliest(starts: Ints) -> Ints:
    found: Ints = starts.min(axis=1, initial=np.iinfo(np.int64).max)
    return found


def _latest(ends: Ints) -> Ints:
    found: Ints = ends.max(axis=1, initial=0)
    return found

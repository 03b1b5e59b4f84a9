"""Two record streams of the same life, recorded and replayed, side by side."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import msgspec

from tracekv.journal.records import (
    AllocCall,
    Call,
    FinishCall,
    IdlePolls,
    LayerHooks,
    QueryCall,
    Record,
    Transfer,
)
from tracekv.journal.vocabulary import Callback

_PAIRS = struct.Struct("=qq")


class Offer(msgspec.Struct, frozen=True):
    """What a query answered, and what was taken of it (None: not allocated, or not told)."""

    offered: int
    is_async: bool
    honoured: int | None


class RequestPair(msgspec.Struct, frozen=True):
    """One query of one request; ``replayed`` is None where the callback raised."""

    life: int
    request_id: int
    prompt_tokens: int | None
    computed_tokens: int
    recorded: Offer
    replayed: Offer | None


class Durations(msgspec.Struct, frozen=True):
    """Of one callback, in nanoseconds; its time includes the connector's own waiting, and no model's."""

    calls: int
    median_ns: int
    max_ns: int


class CallbackPair(msgspec.Struct, frozen=True):
    """A callback in both streams."""

    callback: str
    recorded: Durations | None
    replayed: Durations | None


class BytesPair(msgspec.Struct, frozen=True):
    """Bytes of one layer group and direction, by where the number comes from; 0 where a stream has none of that source."""

    direction: str
    layer_group: int
    source: str
    recorded: int
    replayed: int


def requests_of(life: int, recorded: Iterable[Record], replayed: Iterable[Record]) -> list[RequestPair]:
    """The queries in the order recorded, each with its namesake."""
    theirs = _offers(recorded)
    ours = _offers(replayed)
    return [
        RequestPair(
            life,
            query.request_id,
            query.prompt_tokens,
            query.computed_tokens,
            offer,
            ours[key][1] if key in ours else None,
        )
        for key, (query, offer) in theirs.items()
    ]


def _offers(records: Iterable[Record]) -> dict[tuple[int, int], tuple[QueryCall, Offer]]:
    """By request id and which of its queries it is."""
    found: dict[tuple[int, int], tuple[QueryCall, Offer]] = {}
    times: dict[int, int] = defaultdict(int)
    for record in records:
        if isinstance(record, QueryCall):
            times[record.request_id] += 1
            offer = Offer(record.offered_tokens, record.is_async, None)
            found[record.request_id, times[record.request_id]] = record, offer
        elif isinstance(record, AllocCall):
            key = record.request_id, times[record.request_id]
            if key in found:
                query, offer = found[key]
                found[key] = query, msgspec.structs.replace(offer, honoured=record.honoured_tokens)
    return found


def callbacks_of(recorded: Iterable[Record], replayed: Iterable[Record]) -> list[CallbackPair]:
    """Every callback that either stream has, in the order of ``vocabulary.Callback``."""
    theirs, ours = _durations(recorded), _durations(replayed)
    return [
        CallbackPair(f"{callback.side.value}.{callback.method}", theirs.get(callback), ours.get(callback))
        for callback in Callback
        if callback in theirs or callback in ours
    ]


def _durations(records: Iterable[Record]) -> dict[Callback, Durations]:
    took: dict[Callback, list[int]] = defaultdict(list)
    for record in records:
        if isinstance(record, Call):
            took[Callback(record.callback)].append(record.ended_ns - record.started_ns)
        elif isinstance(record, IdlePolls):
            rest = [(record.sum_ns - record.max_ns) // max(1, record.count - 1)] * (record.count - 1)
            took[Callback.GET_FINISHED] += [*rest, record.max_ns]
        elif isinstance(record, LayerHooks):
            for callback, pairs in (
                (Callback.WAIT_FOR_LAYER_LOAD, record.waits),
                (Callback.SAVE_KV_LAYER, record.saves),
            ):
                took[callback] += [ended - started for started, ended in _PAIRS.iter_unpack(pairs) if started and ended]
    return {callback: Durations(len(each), round(median(each)), max(each)) for callback, each in took.items() if each}


def bytes_of(recorded: Iterable[Record], replayed: Iterable[Record]) -> list[BytesPair]:
    """What either stream says was moved."""
    theirs, ours = _bytes(recorded), _bytes(replayed)
    return [BytesPair(*key, theirs.get(key, 0), ours.get(key, 0)) for key in sorted({*theirs, *ours})]


def _bytes(records: Iterable[Record]) -> dict[tuple[str, int, str], int]:
    moved: dict[tuple[str, int, str], int] = defaultdict(int)
    for record in records:
        if isinstance(record, Transfer):
            moved[record.direction.value, record.layer_group, record.source.value] += record.nbytes
    return moved


def kept_pages(records: Iterable[Record]) -> dict[int, bool]:
    """What ``request_finished`` answered, by request."""
    return {record.request_id: record.keeps_pages for record in records if isinstance(record, FinishCall)}


def differences_of(
    requests: Iterable[RequestPair], moved: Iterable[BytesPair], recorded_keeps: dict[int, bool], keeps: dict[int, bool]
) -> list[str]:
    """What differs, a sentence each. A source that only one of the streams has is no difference."""
    told = []
    for pair in requests:
        theirs, ours = pair.recorded, pair.replayed
        who = f"request {pair.request_id} of life {pair.life}"
        if ours is None:
            told.append(f"{who}: offered {theirs.offered} tokens, and now the query has no answer")
            continue
        if theirs.offered != ours.offered:
            told.append(f"{who}: offered {theirs.offered} tokens, now {ours.offered}")
        if theirs.is_async != ours.is_async:
            told.append(f"{who}: the load was {_kind(theirs)}, now it is {_kind(ours)}")
    for each in moved:
        if each.recorded and each.replayed and each.recorded != each.replayed:
            told.append(
                f"{each.direction}s of layer group {each.layer_group} ({each.source}): {each.recorded} bytes, now {each.replayed}"
            )
    for request_id in sorted(recorded_keeps.keys() & keeps.keys()):
        if recorded_keeps[request_id] != keeps[request_id]:
            was, now = ("kept" if each else "given back" for each in (recorded_keeps[request_id], keeps[request_id]))
            told.append(f"request {request_id}: its pages were {was} when it finished, now they are {now}")
    return told


def _kind(offer: Offer) -> str:
    return "asynchronous" if offer.is_async else "synchronous"

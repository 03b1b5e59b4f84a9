"""What capture writes and views read: one small struct per kind of event.

Times are CLOCK_MONOTONIC nanoseconds of the writing process (``time.perf_counter_ns``). Pages are page slots per layer group, with -1
where a block has none. ``step`` is the number of the pass, counted by the leader from 1; 0 before the first. There is no
prompt text, no token id and no salt in any record: keys and salts are digests.

The fields are fixed (a record is an array: new fields go at the end, with a default). How the bytes lie in a file is the journal's.

Source of the fields: contract.md section 10 (what a rule needs), DESIGN.md "views" (what a story needs).
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from tracekv.journal.records.base import Record
from tracekv.journal.records.calls import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CallCounts,
    CancelLoadCall,
    FinishCall,
    FinishedCall,
    ForwardCallableCall,
    GroupFacts,
    IdlePolls,
    LayerHooks,
    QueryCall,
    RegionFacts,
    RegisterCall,
    RequestResetCall,
)
from tracekv.journal.records.findings import Finding, WatchGapSeen, WatchReport
from tracekv.journal.records.moves import Drop, Enqueued, Lookup, Prefetch, StoreCeiling, StoreOperation, Transfer
from tracekv.journal.records.process import (
    CallbackSource,
    ClockAnchor,
    ConnectorWrapped,
    ProcessStarted,
    RunJoined,
    SettingsSeen,
    TracerFault,
    TracingReduced,
)
from tracekv.journal.records.replay import ReplayBuild, ReplayCaches, ReplayEnd, ReplayPrompt, ReplayStart

__all__ = [
    "AllocCall",
    "AnyRecord",
    "BindCall",
    "BuildCall",
    "Call",
    "CallCounts",
    "CallbackSource",
    "CancelLoadCall",
    "ClockAnchor",
    "ConnectorWrapped",
    "Drop",
    "Enqueued",
    "Finding",
    "FinishCall",
    "FinishedCall",
    "ForwardCallableCall",
    "GroupFacts",
    "IdlePolls",
    "LayerHooks",
    "Lookup",
    "Prefetch",
    "ProcessStarted",
    "QueryCall",
    "Record",
    "RegionFacts",
    "RegisterCall",
    "ReplayBuild",
    "ReplayCaches",
    "ReplayEnd",
    "ReplayPrompt",
    "ReplayStart",
    "RequestResetCall",
    "RunJoined",
    "SettingsSeen",
    "StoreCeiling",
    "StoreOperation",
    "TracerFault",
    "TracingReduced",
    "Transfer",
    "WatchGapSeen",
    "WatchReport",
    "decode",
    "decode_as_stored",
    "in_ns",
]

AnyRecord = (
    ProcessStarted
    | ClockAnchor
    | ConnectorWrapped
    | RunJoined
    | SettingsSeen
    | TracerFault
    | TracingReduced
    | Call
    | QueryCall
    | AllocCall
    | BuildCall
    | FinishCall
    | BindCall
    | FinishedCall
    | IdlePolls
    | LayerHooks
    | RegisterCall
    | ForwardCallableCall
    | CancelLoadCall
    | RequestResetCall
    | CallCounts
    | Transfer
    | Lookup
    | StoreOperation
    | Drop
    | Prefetch
    | Enqueued
    | StoreCeiling
    | Finding
    | WatchReport
    | ReplayStart
    | ReplayCaches
    | ReplayPrompt
    | ReplayBuild
    | ReplayEnd
)

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyRecord)


def decode(payload: bytes | memoryview) -> Record:
    """The record in ``payload``; msgspec.DecodeError where it is none of this version's."""
    record: Record = _decoder.decode(payload)
    return in_ns(record) if type(record) is LayerHooks else record


def decode_as_stored(payload: bytes | memoryview) -> Record:
    """As :func:`decode`, but a pass's hooks are left as they are, in seconds perhaps: for who looks at few of many."""
    record: Record = _decoder.decode(payload)
    return record


def in_ns(record: LayerHooks) -> LayerHooks:
    """A pass's hooks with their times as :func:`decode` gives them, be they stored in seconds or not."""
    if not record.in_seconds:
        return record
    return LayerHooks(record.step, _in_ns(record.waits), _in_ns(record.saves))


def _in_ns(seconds: bytes) -> bytes:
    moments = memoryview(seconds)[: len(seconds) // 16 * 16].cast("d")
    return array("q", [round(1e9 * moment) for moment in moments.tolist()]).tobytes()

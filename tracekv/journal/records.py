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

from tracekv.journal.vocabulary import (
    Direction,
    DropReason,
    MissReason,
    Operation,
    Outcome,
    PrefetchFate,
    Side,
    Source,
    Tier,
    WatchGap,
)


class Record(msgspec.Struct, array_like=True, gc=False):
    """Any record."""


class ProcessStarted(Record, tag=1):
    """First record of a journal. ``wall_ns`` was read beside ``monotonic_ns``: the process's first clock anchor."""

    pid: int
    process_id: bytes
    host: str
    boot_id: str
    monotonic_ns: int
    wall_ns: int
    version: str


class ClockAnchor(Record, tag=2):
    """Both clocks read together, again and again, so that other hosts' journals can be aligned."""

    monotonic_ns: int
    wall_ns: int


class CallbackSource(Record):
    """Where an implemented callback is defined."""

    name: str
    file: str
    line: int


class ConnectorWrapped(Record, tag=3):
    """A traced class was instantiated; ``not_implemented`` are the callbacks it inherits from the base."""

    side: Side
    class_name: str
    implemented: list[CallbackSource]
    not_implemented: list[str]


class RunJoined(Record, tag=4):
    """Which run (16 bytes, made by the leader) and rank this process belongs to; known only after the first metadata."""

    run_id: bytes
    rank: int
    world: int


class SettingsSeen(Record, tag=5):
    """Digest of the settings as resolved here; it differs between ranks only by mistake."""

    digest: bytes


class TracerFault(Record, tag=6):
    """An instrument of tracekv failed and was removed; the engine went on without it."""

    at_ns: int
    instrument: str
    error: str
    where: str


class TracingReduced(Record, tag=7):
    """Less is recorded from here on, or everything again: tracing took more than its share of the engine thread (parts per million),
    so calls are only counted, or somebody switched the detail of the running engine.

    Attributes:
        is_off: The detail was set to ``off``: until the next record of this kind there is none of any callback, in this process.
            Cost and limit aren't judged then, and are 0.
    """

    at_ns: int
    is_reduced: bool
    cost_ppm: int
    limit_ppm: int
    is_off: bool = False


class Call(Record, tag=10):
    """A callback of the runtime, with nothing to add: what every other call record begins with.

    Attributes:
        callback: ``vocabulary.Callback``.
        error: Class name of what the inner connector raised, else None.
    """

    callback: int
    started_ns: int
    ended_ns: int
    step: int
    error: str | None


class QueryCall(Call, tag=11):
    """``get_num_new_matched_tokens``. ``answer`` names the types when the answer is no ``(int, bool)``, else None."""

    request_id: int
    client_id: int | None
    prompt_tokens: int | None
    computed_tokens: int
    offered_tokens: int
    is_async: bool
    answer: str | None
    salt_digest: bytes | None
    multimodal_digest: bytes | None
    lora_id: int | None


class AllocCall(Call, tag=12):
    """``update_state_after_alloc`` and its per-layer-group form.

    Attributes:
        is_never_asked: The request is of a kind that the runtime doesn't ask about (a dummy, or it only generates); None where its
            object doesn't say.
    """

    request_id: int
    honoured_tokens: int | None
    pages: list[list[int]]
    is_never_asked: bool | None = None


class BuildCall(Call, tag=13):
    """``build_connector_meta``; lists are parallel, the first ``new_requests`` entries are new ones.

    Attributes:
        prompt_tokens: Tokens of the first report, for the new requests only.
        pages: ``(position in request_ids, new page slots per layer group)`` where there are any.
        has_metadata: False where the connector returned None or something empty.
    """

    new_requests: int
    request_ids: list[int]
    computed_positions: list[int]
    scheduled_tokens: list[int]
    prompt_tokens: list[int]
    pages: list[tuple[int, list[list[int]]]]
    has_metadata: bool


class FinishCall(Call, tag=14):
    """``request_finished`` and its per-layer-group form; ``keeps_pages`` is the truth of the answer."""

    request_id: int
    keeps_pages: bool
    answer: str | None
    pages: list[list[int]]


class BindCall(Call, tag=15):
    """``bind_connector_meta``. Size and digest are of the pickled metadata, None where nothing was pickled."""

    has_envelope: bool
    nbytes: int | None
    digest: bytes | None


class FinishedCall(Call, tag=16):
    """``get_finished`` that was given ids or returned some."""

    saving_given: list[int]
    loading_given: list[int]
    saving_returned: list[int]
    loading_returned: list[int]
    answer: str | None


class IdlePolls(Record, tag=17):
    """Consecutive ``get_finished`` calls with nothing in and nothing out."""

    step: int
    count: int
    sum_ns: int
    max_ns: int
    first_started_ns: int
    last_ended_ns: int


class LayerHooks(Record, tag=18):
    """The per-layer hooks of one forward pass.

    Attributes:
        waits, saves: int64 pairs ``(started_ns, ended_ns)``, native byte order; pair i is layer i's. (0, 0): not called;
            an end of 0: entered and not left (it raised, when a later record exists).
        in_seconds: As the engine writes it: the pairs are float64, in seconds of the same clock. :func:`decode` turns them.
    """

    step: int
    waits: bytes
    saves: bytes
    in_seconds: bool = False


class RegionFacts(Record):
    """One byte range of a page."""

    size: int
    stride: int
    num_slots: int


class GroupFacts(Record):
    """One layer group of the registered caches."""

    layer_group_id: int
    window_size: int | None
    layer_ids: list[int]
    num_slots: int
    bytes_per_page: int
    regions: list[RegionFacts]


class RegisterCall(Call, tag=19):
    """``register_kv_caches`` or ``register_kv_cache_layout``; ``tokens_per_block`` 0 means that it isn't told."""

    tokens_per_block: int
    dtype: str
    groups: list[GroupFacts]


class ForwardCallableCall(Call, tag=20):
    """``register_forward_pass_callable``: whether it gave one."""

    has_callable: bool


class CancelLoadCall(Call, tag=21):
    """``cancel_load`` (newer runtimes): tokens ``[start, end)`` of an offer are not wanted."""

    request_id: int
    start: int
    end: int


class RequestResetCall(Call, tag=22):
    """``request_reset`` (newer runtimes): the request is going to be replayed."""

    request_id: int


class CallCounts(Record, tag=23):
    """What the calls since ``started_ns`` add up to while only counters are kept: ``(callback, calls, sum_ns, max_ns)``."""

    step: int
    started_ns: int
    ended_ns: int
    callbacks: list[tuple[int, int, int, int]]


class Transfer(Record, tag=40):
    """KV of one request moved between pages and a tier; ``source`` says how the bytes are known.

    Attributes:
        pages: Page slots of ``layer_group``.
        queued_ns, read_ns, verify_ns, copy_ns, stall_ns: Parts of the time, where the connector tells them.
    """

    direction: Direction
    source: Source
    tier: Tier
    request_id: int
    step: int
    layer_group: int
    pages: list[int]
    nbytes: int
    tokens: int
    started_ns: int
    ended_ns: int
    queued_ns: int
    read_ns: int
    verify_ns: int
    copy_ns: int
    stall_ns: int
    error: str | None


class Lookup(Record, tag=41):
    """How a connector came to its offer.

    Attributes:
        stored_tokens: Longest prefix that the store holds for every layer group and rank.
        staged_tokens: Of it, what was in memory and verified when the query returned.
        group_tokens: Longest prefix by layer group.
        bounding_layer_group: The group that ended the prefix, where one did.
        reason: Why nothing, or not more, was offered; None for a full hit.
        key: Digest of the last block of the prompt that could be offered; equal keys mean equal KV.
        has_partial_blocks: The connector offers parts of blocks on purpose.
        commit_to_offer_ns: From another engine's commit of the last offered block to this offer, its first here, by both engines'
            wall clocks; 0 where it is no news.
    """

    request_id: int
    prompt_tokens: int
    computed_tokens: int
    stored_tokens: int
    staged_tokens: int
    offered_tokens: int
    group_tokens: list[int]
    bounding_layer_group: int | None
    reason: MissReason | None
    waited_ns: int
    started_ns: int
    ended_ns: int
    key: bytes | None
    has_partial_blocks: bool = False
    commit_to_offer_ns: int = 0


class StoreOperation(Record, tag=42):
    """One logical operation on a store, its attempts included.

    Attributes:
        engine: ``local``, ``s3``, ``memory`` or the URL's protocol.
        key: Digest of the object's path.
        breaker: ``closed``, ``open`` or ``half_open``.
        requests: What was asked of the server (or kernel) in all attempts: what a bill counts.
    """

    operation: Operation
    outcome: Outcome
    engine: str
    bucket: str | None
    key: bytes | None
    request_id: int | None
    layer_group: int | None
    rank: int
    blocks: int
    nbytes: int
    attempts: int
    started_ns: int
    ended_ns: int
    queued_ns: int
    transfer_ns: int
    verify_ns: int
    breaker: str
    error: str | None
    requests: int = 1


class Drop(Record, tag=43):
    """Blocks that were not saved, or were given up."""

    at_ns: int
    direction: Direction
    reason: DropReason
    request_id: int | None
    layer_group: int | None
    blocks: int
    nbytes: int


class Prefetch(Record, tag=44):
    """What became of blocks that were read ahead; ``lead_ns`` is from staged to first use."""

    at_ns: int
    request_id: int | None
    fate: PrefetchFate
    blocks: int
    nbytes: int
    lead_ns: int


class Enqueued(Record, tag=45):
    """A request entered the engine (opt-in hook), with its caller's trace context."""

    at_ns: int
    request_id: int
    client_id: int | None
    prompt_tokens: int
    traceparent: str | None


class Finding(Record, tag=50):
    """A rule was broken. Those about the engine's arguments and the connector's code (L2-L8) are written at bring-up; those of the
    contract are made by whoever reads, and go the way of any record through the views.

    Attributes:
        rule: Stable id of the rule.
        severity: ``violation`` or ``suspect``; at bring-up ``problem``, ``advice`` or ``note``.
        subject: The callback, argument or place that it is about.
        caused_by: Rule of the finding that it follows from.
    """

    at_ns: int
    rule: str
    severity: str
    subject: str
    what: str
    request_id: int | None = None
    step: int = 0
    caused_by: str | None = None


class StoreCeiling(Record, tag=46):
    """What a store was measured to give at best, beside which achieved bandwidth can be shown.

    Attributes:
        engine, bucket: As in :class:`StoreOperation`.
        block_bytes: Size of the blocks that were moved.
        bytes_per_s: Of the raw client, without checks; ``reached_bytes_per_s`` is what the backend reached in the same rounds.
    """

    at_ns: int
    engine: str
    bucket: str | None
    direction: Direction
    block_bytes: int
    bytes_per_s: int
    reached_bytes_per_s: int


class WatchGapSeen(Record):
    """A way by which bytes may move unseen: how often it was taken, and the line (``file.py:12``) that took it first."""

    reason: WatchGap
    count: int
    where: str


class WatchReport(Record, tag=60):
    """How far the ``observed`` transfers of this process can be trusted from here on: at each step that moves bytes, at each new gap.

    Attributes:
        is_complete: No gap so far: every byte that moved was seen.
        gaps: Since the caches were registered. A gap stays: an address that was taken may be used at any time.
        last_slots: ``(layer group, page slot, times)``: the pool was indexed with a negative number, which gives this page.
            An index of -1 is a block without a page, read as another request's.
    """

    at_ns: int
    step: int
    is_complete: bool
    gaps: list[WatchGapSeen]
    last_slots: list[tuple[int, int, int]]


class ReplayStart(Record, tag=61):
    """What ``tracekv replay`` needs of the engine's arguments (``TRACEKV_RECORD=replay``); None where they don't say."""

    tokens_per_block: int | None
    has_block_reuse: bool | None
    has_partial_reuse: bool | None
    is_v2: bool | None


class ReplayCaches(Record, tag=62):
    """What ``RegisterCall`` leaves out of the caches.

    Attributes:
        shape: Of the single tensor; empty where a layout was registered.
        buffers: By group and region, ``(layer, role, expansion)`` in memory order; replicated regions come last.
        replicated: How many of a group's regions are replicated ones.
    """

    shape: list[int]
    buffers: list[list[list[tuple[int, str, int]]]]
    replicated: list[int]


class ReplayPrompt(Record, tag=63):
    """A request's tokens as it was first seen, before its ``QueryCall``; equal digests mean equal tokens, within this process.

    The digests are keyed with a random key that exists in the process's memory only. A block's digest is of its own tokens,
    not of those before it, so that every equality of blocks is kept.

    Attributes:
        tokens: How many there are; more than ``prompt_tokens`` where generated ones are among them.
        block_tokens: Tokens per block.
        blocks: 8 bytes per full block.
        rest: 8 bytes for the tokens behind the last full block; empty where there are none.
        salt, images: 8 bytes each, None where the request has none. The LoRA id is its ``QueryCall``'s.
        image_places, image_lengths: Where the items lie in the prompt.
    """

    request_id: int
    prompt_tokens: int
    tokens: int
    block_tokens: int
    blocks: bytes
    rest: bytes
    salt: bytes | None
    images: bytes | None
    image_places: list[int]
    image_lengths: list[int]


class ReplayBuild(Record, tag=64):
    """What the ``BuildCall`` before it leaves out; ``new_tokens`` is parallel to its ``request_ids``.

    Attributes:
        block_hashes: ``(position in request_ids, keyed digests of the whole chain)`` where the chain grew.
        priorities: ``(position in request_ids, priorities)`` where there are any.
    """

    step: int
    new_tokens: list[int]
    block_hashes: list[tuple[int, list[int]]]
    priorities: list[tuple[int, list[int]]]


class ReplayEnd(Record, tag=65):
    """All tokens of a request that finished, generated ones included; fields as in :class:`ReplayPrompt`."""

    request_id: int
    tokens: int
    blocks: bytes
    rest: bytes


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
    if type(record) is LayerHooks and record.in_seconds:
        return LayerHooks(record.step, _in_ns(record.waits), _in_ns(record.saves))
    return record


def _in_ns(seconds: bytes) -> bytes:
    moments = memoryview(seconds)[: len(seconds) // 16 * 16].cast("d")
    return array("q", [round(1e9 * moment) for moment in moments.tolist()]).tobytes()

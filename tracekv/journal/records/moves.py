"""What a connector reports, or is planned or seen to do: lookups, transfers, and its store."""

from __future__ import annotations

from tracekv.journal.records.base import Record
from tracekv.journal.vocabulary import Direction, DropReason, MissReason, Operation, Outcome, PrefetchFate, Source, Tier


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

"""The query: which blocks can be promised. It looks in memory, waits no longer than the setting says, and does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import tracekv
from tracekv.contract.reading import (
    LayoutView,
    UnreadableRequest,
    cache_salt,
    lora_id,
    multimodal_digest,
    prompt_length,
    prompt_tokens,
)
from tracekv.journal.vocabulary import MissReason
from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, UnkeyableTokens, as_uint32, namespace_digest
from tracekv_fsspec.requests import Offer, Request
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import Stager
from tracekv_fsspec.store_errors import MISS_OF


@dataclass(frozen=True)
class Engine:
    """What the scheduler knows of its engine once it is brought up."""

    settings: Settings
    stager: Stager
    layout: LayoutView
    shards: tuple[Shard, ...]

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a page."""
        return self.layout.tokens_per_block


class Bypass(Exception):
    """A request that can't be keyed; it is neither served nor saved."""

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass
class _Lookup:
    """What a query found, for the report; tokens are counted from the prompt's beginning."""

    stored_tokens: int = 0
    staged_tokens: int = 0
    offered_tokens: int = 0
    reason: MissReason | None = None
    group_tokens: Sequence[int] = ()
    bounding_layer_group: int | None = None
    waited_ns: int = 0
    key: bytes | None = None


def new_request(engine: Engine, request: Any) -> tuple[Request, MissReason | None]:
    """A request's books with its namespace, or without a chain and with the reason for it."""
    salt = cache_salt(request)
    try:
        namespace = _namespace(engine, request, salt)
    except Bypass as bypass:
        return Request(int(request.request_id), salt, None), bypass.reason
    return Request(int(request.request_id), salt, KeyChain(namespace, engine.tokens_per_block)), None


def query(engine: Engine, request: Any, computed_tokens: int) -> Request:
    """Look a prompt up; the answer is in ``Request.offer``. Reports itself through ``tracekv.lookup``."""
    started_ns = perf_counter_ns()
    tokens = prompt_tokens(request)
    known_length = prompt_length(request)
    # One token has to be computed for its logits, so the whole prompt is never offered.
    length = len(tokens) if known_length is None else min(known_length, len(tokens))
    blocks = (length - 1) // engine.tokens_per_block if length else 0
    books, reason = new_request(engine, request)
    found = _Lookup(reason=reason)
    try:
        if books.chain is not None:
            found = _look_up(engine, books, books.chain, tokens, blocks, computed_tokens)
    except UnkeyableTokens:
        books.bypass()
        found = _Lookup(reason=MissReason.BYPASS_TOKENS)
    tracekv.lookup(
        books.request_id,
        prompt_tokens=length,
        computed_tokens=computed_tokens,
        stored_tokens=found.stored_tokens,
        staged_tokens=found.staged_tokens,
        offered_tokens=found.offered_tokens,
        started_ns=started_ns,
        reason=found.reason,
        group_tokens=found.group_tokens,
        bounding_layer_group=found.bounding_layer_group,
        waited_ns=found.waited_ns,
        key=found.key,
    )
    return books


def _namespace(engine: Engine, request: Any, salt: str | None) -> bytes:
    lora = lora_id(request)
    lora_digest = None
    if lora is not None:
        lora_digest = engine.settings.lora_digests.get(str(lora))
        if lora_digest is None:
            raise Bypass(MissReason.BYPASS_LORA)
    try:
        multimodal = multimodal_digest(request)
    except UnreadableRequest:
        raise Bypass(MissReason.BYPASS_MULTIMODAL) from None
    return namespace_digest(engine.stager.deployment, cache_salt=salt, multimodal=multimodal, lora=lora_digest)


def _look_up(
    engine: Engine, books: Request, chain: KeyChain, tokens: Sequence[int], blocks: int, computed_tokens: int
) -> _Lookup:
    size = engine.tokens_per_block
    if not blocks:
        return _Lookup(reason=MissReason.PROMPT_TOO_SHORT)
    books.queried = as_uint32(tokens[: blocks * size])
    chain.extend(books.queried)
    found = _Lookup(stored_tokens=computed_tokens, staged_tokens=computed_tokens, key=chain.keys[blocks - 1])
    if computed_tokens % size:
        found.reason = MissReason.UNALIGNED
        return found
    start = computed_tokens // size
    if start >= blocks:
        found.reason = MissReason.ON_DEVICE
        return found
    ends = {shard: engine.stager.prefix(shard, chain.keys, start) for shard in engine.shards}
    end = min(ends.values())
    found.stored_tokens = end * size
    groups = sorted({shard.layer_group for shard in engine.shards})
    by_group = {group: min(ends[shard] for shard in engine.shards if shard.layer_group == group) for group in groups}
    found.group_tokens = [by_group[group] * size for group in groups]
    if end < max(by_group.values()):
        found.bounding_layer_group = min(by_group, key=lambda group: by_group[group])
    if end < blocks:
        found.reason = _why_not_stored(engine, chain.keys[end], ends, end)
    if end > start:
        _stage(engine, books, chain.keys[start:end], start, found)
    return found


def _why_not_stored(engine: Engine, key: bytes, ends: dict[Shard, int], end: int) -> MissReason:
    for shard, stopped in ends.items():
        fault = engine.stager.index.fault(shard, key) if stopped == end else None
        if fault in MISS_OF:
            return MISS_OF[fault]
    by_group: dict[int, set[int]] = {}
    for shard, stopped in ends.items():
        by_group.setdefault(shard.layer_group, set()).add(stopped)
    if any(len(stops) > 1 for stops in by_group.values()):
        return MissReason.RANK_MISSING
    return MissReason.LAYER_GROUP_MISSING if len(set(ends.values())) > 1 else MissReason.NOT_STORED


def _stage(engine: Engine, books: Request, keys: list[bytes], start: int, found: _Lookup) -> None:
    """Begin to stage, wait if that is allowed, and promise what is verified in the arena by then."""
    reader = engine.stager.reader
    ticket = reader.stage(keys, start, request_id=books.request_id)
    if engine.settings.offer_wait_ms:
        waiting_ns = perf_counter_ns()
        reader.wait(ticket, engine.settings.offer_wait_ms / 1000)
        found.waited_ns = perf_counter_ns() - waiting_ns
    taken, reason = reader.take(ticket)
    if taken < len(keys):
        found.reason = reason
    found.staged_tokens = (start + taken) * engine.tokens_per_block
    if taken:
        books.offer = Offer(ticket, start, start + taken)
        found.offered_tokens = taken * engine.tokens_per_block

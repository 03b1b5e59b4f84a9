"""The query: which blocks can be promised. It looks in memory, waits no longer than the setting says, and does no I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter_ns, time_ns
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
    scheduled_chunk,
)
from tracekv.journal.vocabulary import MissReason
from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, UnkeyableTokens, as_uint32, namespace_digest
from tracekv_fsspec.lookup import Lookup, Prompt, Run
from tracekv_fsspec.reader import Priority
from tracekv_fsspec.requests import Offer, Request
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import Stager
from tracekv_fsspec.store_errors import MISS_OF


@dataclass(frozen=True)
class Engine:
    """What the scheduler knows of its engine once it is brought up.

    Attributes:
        said: Notices that were given once and aren't given again.
    """

    settings: Settings
    stager: Stager
    layout: LayoutView
    shards: tuple[Shard, ...]
    said: set[str] = field(default_factory=set)

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a page."""
        return self.layout.tokens_per_block

    @property
    def has_partial_blocks(self) -> bool:
        """Whether incomplete blocks are stored and offered: the setting, where the cache manager takes such offers."""
        return self.settings.partial_blocks and not self.layout.is_single_tensor

    @cached_property
    def lookup(self) -> Lookup:
        """What finds blocks."""
        windows = {group.layer_group_id: group.window_size for group in self.layout.groups}
        return Lookup(
            {shard: windows[shard.layer_group] for shard in self.shards},
            self.stager.prefix,
            self.stager.is_available,
            with_partial_blocks=self.has_partial_blocks,
        )


_log = logging.getLogger("tracekv.fsspec")


class Bypass(Exception):
    """A request that can't be keyed; it is neither served nor saved."""

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass
class _Lookup:
    """What a query found, for the report; tokens are counted from the prompt's beginning."""

    computed_tokens: int = 0
    stored_tokens: int = 0
    staged_tokens: int = 0
    offered_tokens: int = 0
    reason: MissReason | None = None
    group_tokens: Sequence[int] = ()
    bounding_layer_group: int | None = None
    waited_ns: int = 0
    key: bytes | None = None
    commit_to_offer_ns: int = 0


def new_request(engine: Engine, request: Any) -> tuple[Request, MissReason | None]:
    """A request's books with its namespace, or without a chain and with the reason for it."""
    salt = cache_salt(request)
    try:
        namespace = namespace_of(engine, request, salt)
    except Bypass as bypass:
        return Request(int(request.request_id), salt, None), bypass.reason
    return Request(int(request.request_id), salt, KeyChain(namespace, engine.tokens_per_block)), None


def query(engine: Engine, request: Any, computed_tokens: int) -> Request:
    """Look a prompt up; the answer is in ``Request.offer``. Reports itself through ``tracekv.lookup``."""
    started_ns = perf_counter_ns()
    tokens = prompt_tokens(request)
    known_length = prompt_length(request)
    length = len(tokens) if known_length is None else min(known_length, len(tokens))
    books, reason = new_request(engine, request)
    found = _Lookup(reason=reason)
    try:
        if engine.settings.role == "producer":
            found.reason = found.reason or MissReason.ROLE
        elif books.chain is not None:
            prompt = tokens if length == len(tokens) else tokens[:length]
            found = _look_up(engine, books, books.chain, prompt, computed_tokens, scheduled_chunk(request))
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
        has_partial_blocks=engine.has_partial_blocks,
        commit_to_offer_ns=found.commit_to_offer_ns,
    )
    return books


def namespace_of(engine: Engine, request: Any, salt: str | None) -> bytes:
    """The seed of a request's keys.

    Raises:
        Bypass: It has something that changes its KV and that isn't known well enough.
    """
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
    engine: Engine, books: Request, chain: KeyChain, tokens: Sequence[int], computed_tokens: int, chunk: int | None
) -> _Lookup:
    size = engine.tokens_per_block
    # One token has to be computed for its logits, so the whole prompt is never offered.
    most_tokens = len(tokens) - 1
    blocks = len(tokens) // size
    if not engine.has_partial_blocks:
        blocks = max(0, most_tokens // size)
        most_tokens = blocks * size
    if most_tokens <= 0:
        return _Lookup(reason=MissReason.PROMPT_TOO_SHORT)
    hinted = engine.stager.prefetcher.take_chain(books.request_id, chain.namespace, tokens, blocks)
    if hinted is None:
        known = as_uint32(tokens)
        books.queried = known[: blocks * size]
        chain.extend(books.queried)
    else:  # hashed when the request was enqueued
        books.is_hinted = True
        books.chain, books.queried = chain, _ = hinted
        # Tokens behind the last complete block are looked at for incomplete blocks only.
        known = books.queried
        if engine.has_partial_blocks:
            known = known + as_uint32(tokens[blocks * size :])
    found = _Lookup(
        computed_tokens,
        stored_tokens=computed_tokens,
        staged_tokens=computed_tokens,
        key=chain.keys[-1] if chain.keys else None,
    )
    if computed_tokens % size and not engine.has_partial_blocks:
        found.reason = MissReason.UNALIGNED
        return found
    if computed_tokens >= most_tokens:
        found.reason = MissReason.ON_DEVICE
        return found
    prompt = Prompt(chain, known, computed_tokens, most_tokens)
    ends = engine.lookup.ends(prompt)
    end = min(ends.values())
    groups = sorted({shard.layer_group for shard in engine.shards})
    by_group = {group: min(ends[shard] for shard in engine.shards if shard.layer_group == group) for group in groups}
    found.group_tokens = [min(by_group[group] * size, most_tokens) for group in groups]
    if end < max(by_group.values()):
        found.bounding_layer_group = min(by_group, key=lambda group: by_group[group])
    strict = engine.lookup.strict(prompt, ends)
    longer = _window_run(engine, prompt, ends, chunk)
    if longer is not None and (strict is None or longer.end_token > strict.end_token):
        found.stored_tokens = longer.end_token
        if longer.end_token < blocks * size:
            found.reason = _why_not_stored(engine, chain.keys[end], ends, end)
        if _stage(engine, books, longer, found):
            return found
    if found.reason is None and (end < blocks or strict is None):
        found.reason = _why_not_stored(engine, chain.keys[end], ends, end) if end < blocks else MissReason.NOT_STORED
    if strict is not None:
        found.stored_tokens = max(found.stored_tokens, strict.end_token)
        _stage(engine, books, strict, found)
    return found


def _window_run(engine: Engine, prompt: Prompt, ends: dict[Shard, int], chunk: int | None) -> Run | None:
    """A run that leaves out what windows have passed, where the setting wants it and the request surely gets all of its offer."""
    if engine.settings.window_lookup != "window":
        return None
    if chunk is None:
        if "no chunk" not in engine.said:
            engine.said.add("no chunk")
            _log.warning(
                "tracekv: this runtime's requests don't tell their context_chunk_size when they are asked about, so it can't be known "
                "whether an offer is honoured in full; TRACEKV_FSSPEC__WINDOW_LOOKUP=window is taken as strict (said once)"
            )
        return None
    return engine.lookup.window(prompt, ends, min(prompt.computed_tokens + chunk, len(prompt.tokens)))


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


def _stage(engine: Engine, books: Request, run: Run, found: _Lookup) -> bool:
    """Begin to stage, wait if that is allowed, and promise what is verified in the arena by then.

    Where the offer may be asynchronous, all of the run is promised, and the request is parked until it is staged.

    Returns:
        Whether something is offered. A run that leaves out what windows have passed is offered whole or not at all.
    """
    reader, stager = engine.stager.reader, engine.stager
    may_wait = bool(engine.settings.offer_wait_ms) and not found.waited_ns
    is_async = engine.settings.offer == "async"
    ticket = reader.stage(
        run.keys,
        run.start,
        request_id=books.request_id,
        priority=Priority.WAITED if may_wait or is_async else Priority.ASKED,
        skipped=run.skipped,
    )
    if is_async and ticket.staged_blocks() < len(run.keys):
        number = stager.parking.park(ticket)
        if number is not None:
            end = run.start + len(run.keys)
            found.staged_tokens = max(
                found.computed_tokens, (run.start + ticket.staged_blocks()) * engine.tokens_per_block
            )
            books.offer = Offer(ticket, run.start, end, found.computed_tokens, run.end_token, run.last_tokens, number)
            found.offered_tokens = books.offer.tokens
            found.commit_to_offer_ns = _since_commit(engine, run.keys)
            return True
    if may_wait:
        waiting_ns = perf_counter_ns()
        reader.wait(ticket, engine.settings.offer_wait_ms / 1000)
        found.waited_ns = perf_counter_ns() - waiting_ns
    taken, reason = reader.take(ticket)
    stager.prefetcher.asked(ticket)
    size, first_token = engine.tokens_per_block, found.computed_tokens
    end_token = run.end_token
    if taken < len(run.keys):
        found.reason = reason
        end_token = min(end_token, (run.start + taken) * size)
    offer = Offer(ticket, run.start, run.start + taken, first_token, end_token, run.last_tokens)
    if end_token <= first_token or (taken < len(run.keys) and any(run.skipped.values())):
        for shard, numbers in ticket.pinned(offer.start, offer.end).items():
            engine.stager.arena.unpin_run(shard, numbers)
        return False
    found.staged_tokens = end_token
    found.offered_tokens = offer.tokens
    found.commit_to_offer_ns = _since_commit(engine, run.keys[:taken])
    books.offer = offer
    return True


def _since_commit(engine: Engine, keys: Sequence[bytes]) -> int:
    """How long ago another engine committed the last of some blocks, when it is offered here for the first time; 0: it is no news.

    Across machines it is as right as their clocks agree.
    """
    committed = engine.stager.index.news_of(engine.shards[0], keys[-1])
    return max(0, time_ns() - committed) if committed else 0

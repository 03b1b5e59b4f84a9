"""What a connector tells of itself: transfers, lookups, store operations, drops and prefetches.

Each function is free to call from any thread, costs a few microseconds when the connector is traced and next to nothing when it
isn't, never raises and never blocks. Times are ``time.perf_counter_ns()``. All arguments are plain numbers, strings and digests:
no tokens, no salts. What isn't like that is left out, or put right, and said once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter_ns

from tracekv.journal.current import current
from tracekv.journal.records import Drop, Lookup, Prefetch, StoreCeiling, StoreOperation, Transfer
from tracekv.journal.vocabulary import (
    Direction,
    DropReason,
    MissReason,
    Operation,
    Outcome,
    PrefetchFate,
    Source,
    Tier,
)

_log = logging.getLogger("tracekv")
_said: set[str] = set()


def _failed(kind: str, failure: Exception) -> None:
    # Telemetry must not hurt the connector that reports.
    _say_once(kind, f"a {kind} report could not be written ({type(failure).__name__}: {failure})")


def _say_once(about: str, what: str) -> None:
    if about not in _said:
        _said.add(about)
        _log.warning("tracekv: %s", what)


def _by_our_clock(started_ns: int, ended_ns: int) -> tuple[int, int]:
    """The times of a transfer that ended in the future, by another clock: readers would wait for that to come."""
    _say_once("clock", "a transfer was reported as ended in the future; its times have to be time.perf_counter_ns()")
    now_ns = perf_counter_ns()
    return now_ns - max(0, ended_ns - started_ns), now_ns


def transfer(
    direction: Direction,
    request_id: int,
    layer_group: int,
    pages: Sequence[int],
    nbytes: int,
    tier: Tier,
    started_ns: int,
    ended_ns: int,
    *,
    tokens: int = 0,
    queued_ns: int = 0,
    read_ns: int = 0,
    verify_ns: int = 0,
    copy_ns: int = 0,
    stall_ns: int = 0,
    error: str | None = None,
) -> None:
    """Report that ``nbytes`` really moved between ``pages`` of a layer group and ``tier``.

    The parts of the time (``queued_ns`` ... ``stall_ns``) are what the connector knows; 0 where it doesn't.

    Source: DESIGN.md, capture ("bytes per layer group", source ``reported``).
    """
    journal = current.journal
    if journal is None:
        return
    try:
        if ended_ns > perf_counter_ns():
            started_ns, ended_ns = _by_our_clock(started_ns, ended_ns)
        journal.write(
            Transfer(
                direction, Source.REPORTED, tier, request_id, current.step, layer_group, list(pages), nbytes, tokens,
                started_ns, ended_ns, queued_ns, read_ns, verify_ns, copy_ns, stall_ns, error,
            )
        )  # fmt: skip
    except Exception as failure:
        _failed("Transfer", failure)


def lookup(
    request_id: int,
    *,
    prompt_tokens: int,
    computed_tokens: int,
    stored_tokens: int,
    staged_tokens: int,
    offered_tokens: int,
    started_ns: int,
    reason: MissReason | None = None,
    group_tokens: Sequence[int] = (),
    bounding_layer_group: int | None = None,
    waited_ns: int = 0,
    key: bytes | None = None,
    has_partial_blocks: bool = False,
    commit_to_offer_ns: int = 0,
) -> None:
    """Report how an offer came about: what was stored, staged and offered (in tokens), and why not more.

    Args:
        commit_to_offer_ns: From another engine's commit of the last offered block to its first offer here; 0 where that is no news.
        has_partial_blocks: Offers may begin and end inside a block; without it the rules find that suspect.
    """
    journal = current.journal
    if journal is None:
        return
    try:
        journal.write(
            Lookup(
                request_id, prompt_tokens, computed_tokens, stored_tokens, staged_tokens, offered_tokens,
                list(group_tokens), bounding_layer_group, reason, waited_ns, started_ns, perf_counter_ns(), key,
                has_partial_blocks, commit_to_offer_ns,
            )
        )  # fmt: skip
    except Exception as failure:
        _failed("Lookup", failure)


def store_operation(
    operation: Operation,
    outcome: Outcome,
    engine: str,
    *,
    started_ns: int,
    nbytes: int = 0,
    blocks: int = 0,
    attempts: int = 1,
    bucket: str | None = None,
    key: bytes | None = None,
    request_id: int | None = None,
    layer_group: int | None = None,
    rank: int = 0,
    queued_ns: int = 0,
    transfer_ns: int = 0,
    verify_ns: int = 0,
    breaker: str = "closed",
    error: str | None = None,
    requests: int = 1,
) -> None:
    """Report one logical operation on a store, with its attempts and all that was asked of the server in them.

    ``key`` is a digest of the object's path.
    """
    journal = current.journal
    if journal is None:
        return
    try:
        journal.write(
            StoreOperation(
                operation, outcome, engine, bucket, key, request_id, layer_group, rank, blocks, nbytes, attempts,
                started_ns, perf_counter_ns(), queued_ns, transfer_ns, verify_ns, breaker, error, requests,
            )
        )  # fmt: skip
    except Exception as failure:
        _failed("StoreOperation", failure)


def drop(
    reason: DropReason,
    *,
    direction: Direction = Direction.SAVE,
    blocks: int,
    nbytes: int = 0,
    request_id: int | None = None,
    layer_group: int | None = None,
) -> None:
    """Report blocks that were not saved (or were given up), with the reason."""
    journal = current.journal
    if journal is None:
        return
    try:
        journal.write(Drop(perf_counter_ns(), direction, reason, request_id, layer_group, blocks, nbytes))
    except Exception as failure:
        _failed("Drop", failure)


def prefetch(
    fate: PrefetchFate, *, blocks: int, nbytes: int = 0, lead_ns: int = 0, request_id: int | None = None
) -> None:
    """Report what became of blocks that were read ahead; ``lead_ns`` is from staged to first use."""
    journal = current.journal
    if journal is None:
        return
    try:
        journal.write(Prefetch(perf_counter_ns(), request_id, fate, blocks, nbytes, lead_ns))
    except Exception as failure:
        _failed("Prefetch", failure)


def store_ceiling(
    engine: str,
    direction: Direction,
    block_bytes: int,
    *,
    bytes_per_s: int,
    reached_bytes_per_s: int,
    bucket: str | None = None,
) -> None:
    """Report what a store gives at best, as measured (``tracekv bench store``)."""
    journal = current.journal
    if journal is None:
        return
    try:
        journal.write(
            StoreCeiling(perf_counter_ns(), engine, bucket, direction, block_bytes, bytes_per_s, reached_bytes_per_s)
        )
    except Exception as failure:
        _failed("StoreCeiling", failure)

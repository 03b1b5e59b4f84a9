"""The two exact rules of the V2 cache: how much of an offer is honoured, and which blocks have left the window.

Pure functions of numbers. Source: contract-v2.md sections 1.3 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where a first chunk runs: tokens ``[position, position + chunk)``, with pages for ``capacity`` tokens."""

    position: int
    chunk: int
    capacity: int


def place_offer(
    offered: int,
    *,
    local: int,
    prompt: int,
    chunk: int,
    tokens_per_block: int,
    capacity: int,
    resize: Callable[[int, int], bool],
    extra: int = 0,
) -> Placement:
    """Honour as much of an offer as the pages allow.

    Args:
        offered: Tokens that the connector offers beyond ``local``; may be anything.
        local: Tokens that device reuse supplies.
        prompt: Prompt tokens; the last one is always computed.
        chunk: Tokens that the scheduler chose for this pass.
        tokens_per_block: Tokens per page; a chunk that doesn't reach the prompt's end ends on a page boundary.
        capacity: Tokens that the request's pages cover.
        resize: Called with ``(capacity, position)``; answers False, changing nothing, where pages are lacking.
        extra: Extra tokens that the cache keeps per request.

    Returns:
        The placement; ``position == local`` means that nothing is honoured.

    Source: contract-v2.md section 1.3.
    """
    unserved = Placement(local, chunk, capacity)
    offered_end = min(local + offered, prompt - 1)
    if offered_end <= local:
        return unserved
    chunk_end = min(local + chunk, prompt)
    if offered_end < chunk_end:
        candidates = [(offered_end, chunk_end)]
    else:
        end = min(offered_end + chunk, prompt)
        if end < prompt:
            end -= end % tokens_per_block
        last_block = (chunk_end - 1) // tokens_per_block * tokens_per_block
        candidates = [(offered_end, end), (last_block, chunk_end)]
    for position, end in candidates:
        if position <= local or end <= position:
            continue
        wanted = max(capacity, end + extra)
        if resize(wanted, position):
            return Placement(position, end - position, wanted)
    return unserved


def stale_blocks(history: int, window: int | None, tokens_per_block: int, sink_tokens: int = 0) -> range:
    """The block ordinals that no later token of a layer group attends to.

    Args:
        history: Tokens whose KV is final; the next one sits at this position.
        window: The group's window in tokens, or None for full attention.
        tokens_per_block: Tokens per page.
        sink_tokens: Tokens at the front that stay attended to.

    Source: contract-v2.md section 2.
    """
    start = min(blocks_for(history, tokens_per_block), blocks_for(sink_tokens, tokens_per_block))
    if window is None:
        return range(start, start)
    return range(start, max(start, (history + 1 - window) // tokens_per_block))


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    """Pages that hold ``tokens``."""
    return -(-tokens // tokens_per_block)

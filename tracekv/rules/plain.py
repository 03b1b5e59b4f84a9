"""What nothing can be found in, seen at once: the rules aren't told of it.

Each of these answers True only where every rule in :data:`SPEAKS_FOR` that would be told stays silent. An event of which another
rule wants to hear is told always, until that rule is listed here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tracekv.journal.records import QueryCall, Transfer
from tracekv.journal.vocabulary import Direction
from tracekv.rules.state import MOST_TOKENS, Request, Run

# An enumeration's members are looked up in its class each time.
_LOAD = Direction.LOAD

#: ``event -> ids of the rules that stay silent where it is plain``: ``on_<event>`` is not called then.
SPEAKS_FOR: dict[str, frozenset[str]] = {
    "query": frozenset({"S1", "S1b", "S1c", "S2", "S3", "S3b"}),  # is_plain_answer
    "lookup": frozenset({"N2", "N3", "N4"}),  # is_as_looked_up; N2 is told where one layer group is the bound
    "astray": frozenset({"L1", "L1b", "L1c", "S8", "S8b", "S10b"}),  # is_plain_transfer
    "loaded": frozenset({"W2", "W2b", "N1", "P4"}),  # is_plain_load
    "left": frozenset({"S9", "S13b", "W9"}),  # is_plain_end
}


def spared(listeners: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """The events that needn't be told where they are plain; ``listeners`` are the rules' ids by event."""
    return frozenset(event for event, ids in SPEAKS_FOR.items() if ids.issuperset(listeners.get(event, ())))


def is_plain_answer(run: Run, request: Request, record: QueryCall) -> bool:
    """Whether an answer offers nothing, or whole blocks that leave a token to compute."""
    offered, block = record.offered_tokens, run.block
    if record.answer is not None or offered < 0:
        return False
    if not offered:
        return not record.is_async
    if record.prompt_tokens is not None and record.computed_tokens + offered >= record.prompt_tokens:
        return False
    if not block or (request.lookup is not None and request.lookup.has_partial_blocks):
        return True
    return not (offered % block or record.computed_tokens % block)


def is_as_looked_up(request: Request, record: QueryCall) -> bool:
    """Whether an answer is what the lookup reported, and no more than is stored; True without a lookup."""
    lookup, offered = request.lookup, record.offered_tokens
    if lookup is None or record.answer is not None:
        return True
    is_stored = offered <= 0 or record.computed_tokens + offered <= lookup.stored_tokens
    return is_stored and offered == lookup.offered_tokens


def is_plain_transfer(run: Run, request: Request | None, record: Transfer) -> bool:
    """Whether a transfer fills whole pages, or the same part of each, of its request's own and no other."""
    number, pages = record.layer_group, record.pages
    group = run.groups.get(number)
    if request is None or group is None or not pages or number >= len(request.slots):
        return False
    if record.nbytes and len(pages) * group.bytes_per_page % record.nbytes:
        return False
    if run.block and number in request.sound and request.chunks:
        # Nearly always it is what the request's last pass computes, or what was offered before.
        is_load = record.direction is _LOAD
        begin = (request.computed if is_load else request.chunks[-1][1]) // run.block
        end = begin + len(pages)
        if end <= request.sound[number] and request.pages[number][begin:end] == pages:
            first_end, last_end = request.chunks[0][2] // run.block, (request.prompt or 0) // run.block
            if not is_load and record.error is None and first_end <= begin < last_end:
                request.saves_later_chunks = True
            return True
    if len({*pages}) != len(pages) or min(pages) < 0 or max(pages) >= (group.num_slots or MOST_TOKENS):
        return False
    own = request.own(number)
    return own is not None and own.issuperset(pages)


def is_plain_load(run: Run, request: Request, promised: Mapping[int, frozenset[int]] | None) -> bool:
    """Whether nothing was promised; or the only rank loaded all of it, and began before the first layer was waited for."""
    if request.is_async or request.first_build is None:
        return False
    if promised is None:
        return True
    if len(run.sources) != 1:
        return False
    (source,) = run.sources
    ended = source.ended.get(request.first_build.step)
    if ended is None or request.loading_ns > ended.needed_ns:
        return False
    rank, loaded = source.rank or 0, request.loaded
    return all(not pages.difference(*loaded.get((rank, group), ())) for group, pages in promised.items())


def is_plain_end(request: Request) -> bool:
    """Whether nothing was kept, nothing moved afterwards, and later chunks of the prompt, if any, were saved too."""
    if request.finish is None or request.finish.keeps_pages or request.moved_ns > request.left_ns:
        return False
    return len(request.chunks) < 2 or request.saves_later_chunks

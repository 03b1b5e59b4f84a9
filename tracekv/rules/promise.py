"""Which pages a load has to fill, and on which ranks that can be judged."""

from __future__ import annotations

from tracekv.rules.state import Request, Run


def promise(run: Run, request: Request) -> dict[int, frozenset[int]] | None:
    """The pages of the honoured blocks by layer group; None where nothing was promised or the records don't tell enough.

    They tell enough when the request was seen whole, the connector reports what it moves, and the pass of the load ended.
    """
    honoured = request.honoured
    if not request.is_whole or not honoured or honoured < 0 or not run.block or not run.tells_moves:
        return None
    if request.is_async:
        if not request.returned_ns:
            return None
    elif request.first_build is None or not any(request.first_build.step in source.ended for source in run.sources):
        return None
    lists = request.alloc.pages if request.is_async and request.alloc is not None else request.pages
    begin = request.computed // run.block
    end = run.blocks(request.computed + honoured)
    return {group: frozenset(page for page in slots[begin:end] if page >= 0) for group, slots in enumerate(lists)}


def loaded_ranks(request: Request) -> list[int]:
    """The ranks that reported a load of this request: on the others nothing is known."""
    return sorted({rank for rank, _ in request.loaded})

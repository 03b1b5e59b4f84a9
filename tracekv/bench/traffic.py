"""A stream as a busy engine writes it: decoding requests, long prompts that come in chunks, hooks of 61 layers, transfers."""

from __future__ import annotations

from typing import Any

from tracekv.journal.vocabulary import Callback, Direction
from tracekv.testing.corpus.tape import BLOCK, Tape

LAYERS = 61
PROMPT = 2048
CHUNK = 1024
OUTPUT = 200


def busy(steps: int = 1000, *, decoding: int = 64) -> Tape:
    """A tape of ``steps`` passes with about ``decoding`` requests in each, once enough have come.

    Prompts of 2048 tokens in two chunks, an eighth of every other one loaded; 200 tokens are generated. A request comes as often
    as one ends, but no more than one a pass.
    """
    pages = PROMPT // BLOCK + OUTPUT // BLOCK + 2
    slots = (decoding + 8) * pages
    tape = Tape(slots=slots, layers=LAYERS)
    free = list(range(slots))
    running: dict[int, list[Any]] = {}
    chunked: tuple[int, list[int]] | None = None
    next_id, every = 1, max(1, OUTPUT // decoding)
    for step in range(steps):
        new: list[tuple[int, int, int, int, list[list[int]]]] = []
        cached: list[tuple[int, int, int, list[list[int]]]] = []
        saved: list[tuple[int, list[int]]] = []
        if chunked is not None:
            request, mine = chunked
            cached.append((request, CHUNK, PROMPT - CHUNK, [[]]))
            running[request] = [PROMPT, mine]
            saved.append((request, mine[CHUNK // BLOCK :]))
            chunked = None
        for request, (position, mine) in list(running.items()):
            if cached and cached[0][0] == request:
                continue
            more: list[int] = []
            if position >= len(mine) * BLOCK:
                more = [free.pop()]
                mine += more
            cached.append((request, position, 1, [more]))
            running[request][0] += 1
        if step % every == 0 and len(running) < decoding:
            request, next_id = next_id, next_id + 1
            mine = [free.pop() for _ in range(PROMPT // BLOCK)]
            offered = BLOCK * 8 if request % 2 else 0
            tape.lookup(request, PROMPT, 0, offered, key=request.to_bytes(16, "little"))
            tape.query(request, PROMPT, 0, offered)
            tape.alloc(request, offered, [list(mine)])
            new.append((request, 0, CHUNK - offered, PROMPT, [list(mine)]))
            chunked = (request, mine)
            saved.append((request, mine[offered // BLOCK : CHUNK // BLOCK]))
        tape.build(new, cached)
        tape.bind()
        for request, *_ in new:
            if request % 2 and chunked is not None:
                tape.transfer(Direction.LOAD, request, chunked[1][:8])
        tape.worker(Callback.START_LOAD_KV)
        now = tape.now
        pairs = [(now + 10 * layer + 1, now + 10 * layer + 2) for layer in range(LAYERS)]
        tape.hooks(pairs, [(start + 5, end + 5) for start, end in pairs])
        tape.after(20)
        for request, blocks in saved:
            tape.transfer(Direction.SAVE, request, blocks)
        tape.worker(Callback.WAIT_FOR_SAVE)
        for request, (position, mine) in list(running.items()):
            if position >= PROMPT + OUTPUT:
                del running[request]
                tape.finish(request, pages=[list(mine)])
                free += mine
        tape.idle(ms=0.1, count=1)
    return tape

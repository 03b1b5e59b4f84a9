"""The limits of a connector, read from the kit's results: what it does not do, without being wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekv.testing.cells import Cell, Submit
from tracekv.testing.wrappers import IoCounts

if TYPE_CHECKING:
    from tracekv.testing.verdicts import CellResult

#: Less than this is what a metadata look-up costs, not a block.
_WORTH_TELLING = 4096
BLOCKING_IO = "blocking I/O"


@dataclass
class IoNotes:
    """Says which callbacks made the engine wait for files."""

    counts: IoCounts

    def notes(self) -> list[str]:
        """A line per callback that read or wrote files on the engine's thread."""
        lines = []
        for name, io in sorted(self.counts.of.items()):
            for verb, nbytes, calls in (("read", io.read_bytes, io.reads), ("wrote", io.written_bytes, io.writes)):
                if nbytes >= _WORTH_TELLING:
                    lines.append(
                        f"{BLOCKING_IO}: {name} {verb} {nbytes} bytes of files in {calls} system calls while the engine waited"
                    )
        return lines


def limits(results: Sequence[CellResult], cells: Sequence[Cell], block: int) -> list[str]:
    """What the results say that the connector doesn't do.

    Args:
        results: Of ``cells``, in their order.
        cells: What was played.
        block: Tokens per block.
    """
    return [*_blocking(results), *_full_blocks(results, cells, block), *_later_chunks(results, cells)]


def _blocking(results: Sequence[CellResult]) -> list[str]:
    found: dict[str, int] = {}
    for result in results:
        for note in result.notes:
            if note.startswith(BLOCKING_IO):
                callback = note.removeprefix(f"{BLOCKING_IO}: ").split(" ")[0]
                found[callback] = found.get(callback, 0) + 1
    if not found:
        return []
    told = ", ".join(f"{callback} (in {count} cells)" for callback, count in sorted(found.items()))
    return [f"{BLOCKING_IO}: files are read or written on the engine's thread, inside {told}"]


def _full_blocks(results: Sequence[CellResult], cells: Sequence[Cell], block: int) -> list[str]:
    """Prompts that were stored before and don't end with a block: was any of them served past its last whole block?"""
    whole, past = 0, 0
    for result, cell in zip(results, cells, strict=True):
        asks = [move.ask for move in cell.moves if isinstance(move, Submit)]
        for ask, line in zip(asks, result.requests, strict=False):
            if line.honoured_tokens and (ask.prompt_tokens - 1) % block:
                end = line.device_tokens + line.honoured_tokens
                whole += end % block == 0
                past += end % block != 0
    if whole and not past:
        return [
            f"full blocks only: of {whole} served prompts that end inside a block, none was served past its last full block"
        ]
    return []


def _later_chunks(results: Sequence[CellResult], cells: Sequence[Cell]) -> list[str]:
    """A prompt that ran in chunks, asked for again: how much of it is served?"""
    worst: tuple[int, int] | None = None
    for result, cell in zip(results, cells, strict=True):
        chunk = cell.options.get("chunk_tokens")
        if cell.story != "chunked" or not chunk or len(result.requests) < 2:
            continue
        again = result.requests[1]
        if again.honoured_tokens <= chunk < again.prompt_tokens - chunk:
            worst = (again.honoured_tokens, again.prompt_tokens)
    if worst is None:
        return []
    served, prompt = worst
    told = f"of a prompt of {prompt} tokens that was computed in chunks, {served} were served again"
    return [f"later chunks unplanned: {told}; read cached_requests too"]

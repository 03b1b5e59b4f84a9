"""Which blocks of a prompt can be had, and how far an offer of them would reach. It looks in memory and does no I/O."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, partial_keys


@dataclass(frozen=True)
class Prompt:
    """What is looked up.

    Attributes:
        tokens: The whole prompt; without incomplete blocks its complete blocks do.
        computed_tokens: What the device has.
        most_tokens: Where an offer has to end, counted from the prompt's beginning.
    """

    chain: KeyChain
    tokens: array[int]
    computed_tokens: int
    most_tokens: int

    @property
    def first_block(self) -> int:
        """The block in which the first token lies that the device lacks."""
        return self.computed_tokens // self.chain.tokens_per_block


@dataclass(frozen=True)
class Run:
    """Blocks of which an offer could be made.

    Attributes:
        start: Ordinal of the first one.
        end_token: Where the offer would end, counted from the prompt's beginning.
        last_tokens: Tokens of the last block: fewer than a block has where it is a prompt's stored tail.
        skipped: How many of the first blocks a shard doesn't need, since its window has passed them when ``end_token`` is
            honoured in full.
    """

    start: int
    keys: list[bytes]
    end_token: int
    last_tokens: int
    skipped: Mapping[Shard, int] = field(default_factory=dict)


def blocks_passed(history_tokens: int, window: int, tokens_per_block: int) -> int:
    """How many blocks a window has passed for good: a request that goes on behind ``history_tokens`` never looks at them.

    Source: contract-v2.md section 2, the stale range.
    """
    return max(0, (history_tokens + 1 - window) // tokens_per_block)


class Lookup:
    """Looks prompts up.

    Args:
        windows: Attention window of every shard; None: all of the prompt.
        prefix: ``(shard, keys, start)`` -> ordinal of the first key from ``start`` on that can't be had, or ``len(keys)``.
        is_available: Whether a shard's block can be had.
        with_partial_blocks: Whether tails of prompts are blocks, too.
    """

    def __init__(
        self,
        windows: Mapping[Shard, int | None],
        prefix: Callable[[Shard, list[bytes], int], int],
        is_available: Callable[[Shard, bytes], bool],
        *,
        with_partial_blocks: bool,
    ) -> None:
        self._windows = windows
        self._prefix = prefix
        self._is_available = is_available
        self._with_partial_blocks = with_partial_blocks

    def ends(self, prompt: Prompt) -> dict[Shard, int]:
        """By shard, the ordinal of the first block that it lacks."""
        return {shard: self._prefix(shard, prompt.chain.keys, prompt.first_block) for shard in self._windows}

    def strict(self, prompt: Prompt, ends: Mapping[Shard, int]) -> Run | None:
        """The longest run that every shard has without a gap: any shorter offer could be honoured, too."""
        return self._run(prompt, min(ends.values()), self._with_partial_blocks)

    def window(self, prompt: Prompt, ends: Mapping[Shard, int], chunk_end: int) -> Run | None:
        """A longer run, of which a sliding group has its live window only; None where there is none.

        Args:
            chunk_end: Where the pass's chunk ends. An offer that ends before it is honoured in full (contract-v2.md 1.3, step
                3); one that doesn't may be honoured in part, and then blocks would be needed that nobody has.
        """
        size = prompt.chain.tokens_per_block
        start, shortest = prompt.first_block, min(ends.values())
        whole = [ends[shard] for shard, window in self._windows.items() if window is None]
        longest = min([*whole, len(prompt.chain.keys), (chunk_end - 1) // size])
        sliding = {shard: window for shard, window in self._windows.items() if window is not None}
        keys = prompt.chain.keys
        gaps = {
            shard: [n for n in range(shortest, longest) if not self._is_available(shard, keys[n])] for shard in sliding
        }
        end = longest
        while end > shortest:
            behind = []
            for shard, window in sliding.items():
                passed = max(start, blocks_passed(min(end * size, prompt.most_tokens), window, size))
                number = bisect_left(gaps[shard], end) - 1
                if number >= 0 and gaps[shard][number] >= passed:
                    behind.append(gaps[shard][number])
            if not behind:
                break
            # Every shorter run that reaches this block needs it, too.
            end = min(behind)
        if end <= shortest:
            return None
        run = self._run(prompt, end, self._with_partial_blocks)
        if run is not None and run.end_token >= chunk_end:
            run = self._run(prompt, end, False)
        if run is None:
            return None
        skipped = {
            shard: min(len(run.keys), max(0, blocks_passed(run.end_token, window, size) - start))
            for shard, window in sliding.items()
        }
        return Run(run.start, run.keys, run.end_token, run.last_tokens, skipped)

    def _run(self, prompt: Prompt, end: int, may_have_tail: bool) -> Run | None:
        size, start = prompt.chain.tokens_per_block, prompt.first_block
        keys = prompt.chain.keys[start:end]
        end_token, last_tokens = min(end * size, prompt.most_tokens), size
        tail = self._tail(prompt, end) if may_have_tail and end_token < prompt.most_tokens else None
        if tail is not None:
            last_tokens, key = tail
            keys.append(key)
            end_token = min(end * size + last_tokens, prompt.most_tokens)
        if end_token <= prompt.computed_tokens:
            return None
        return Run(start, keys, end_token, last_tokens)

    def _tail(self, prompt: Prompt, ordinal: int) -> tuple[int, bytes] | None:
        """The longest incomplete block at this ordinal that every shard has: its tokens and key."""
        size = prompt.chain.tokens_per_block
        first = ordinal * size
        keys = partial_keys(prompt.chain.link_before(ordinal), prompt.tokens[first : first + size - 1])
        for count in range(len(keys), max(0, prompt.computed_tokens - first), -1):
            if all(self._is_available(shard, keys[count - 1]) for shard in self._windows):
                return count, keys[count - 1]
        return None

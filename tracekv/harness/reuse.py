"""The device's memory of prefixes: a tree of token blocks, each naming the pages that hold its KV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tracekv.contract.reading import UnreadableRequest, multimodal_digest
from tracekv.harness.requests import Request


class Block:
    """A block of tokens behind a prefix.

    Attributes:
        pages: ``[g]`` is its page slot in layer group g, or None.
        followed: Requests that hold pages and whose known prefix ends with it: they may add blocks behind it.
    """

    def __init__(self, parent: Block | None, tokens: tuple[int, ...], groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages: list[int | None] = [None] * groups
        self.children: dict[tuple[int, ...], Block] = {}
        self.followed = 0

    def child(self, tokens: tuple[int, ...]) -> Block:
        """The block of ``tokens`` behind this one, made if need be."""
        if tokens not in self.children:
            self.children[tokens] = Block(self, tokens, len(self.pages))
        return self.children[tokens]

    def lost(self, group: int) -> None:
        """Forget an evicted page, and blocks that lead nowhere."""
        self.pages[group] = None
        self._leave()

    def follow(self) -> None:
        """A request's known prefix ends here now."""
        self.followed += 1

    def unfollow(self) -> None:
        """It ends elsewhere, or the request gave its pages back."""
        self.followed -= 1
        self._leave()

    def _leave(self) -> None:
        block = self
        while block.parent is not None and not (
            block.children or block.followed or any(page is not None for page in block.pages)
        ):
            del block.parent.children[block.tokens]
            block = block.parent


@dataclass(frozen=True)
class Match:
    """A known prefix: whole blocks, then perhaps ``extra`` tokens of one more, whose page has to be copied."""

    blocks: list[Block]
    partial: Block | None = None
    extra: int = 0


class ReuseTree:
    """All known prefixes. Requests that differ in anything but tokens that changes KV share nothing.

    Args:
        groups: Number of layer groups.
        tokens_per_block: Tokens per page.
    """

    def __init__(self, groups: int, tokens_per_block: int) -> None:
        self._groups = groups
        self._block = tokens_per_block
        self._roots: dict[Hashable, Block] = {}

    def root(self, request: Request) -> Block:
        """The empty prefix of the request's salt, LoRA and images."""
        try:
            digest = multimodal_digest(request)
        except UnreadableRequest:
            return Block(None, (), self._groups)  # unknown images: shares nothing, not even with itself
        key = (request.cache_salt, request.lora_task_id, digest)
        return self._roots.setdefault(key, Block(None, (), self._groups))

    def find(self, request: Request, limit: int) -> Match:
        """The longest known prefix of at most ``limit`` tokens, whether or not its pages are still there."""
        tokens = request.tokens_between(0, limit)
        blocks: list[Block] = []
        here = self.root(request)
        while (end := (len(blocks) + 1) * self._block) <= limit:
            following = here.children.get(tuple(tokens[end - self._block : end]))
            if following is None:
                break
            blocks.append(following)
            here = following
        rest = tokens[len(blocks) * self._block :]
        best, shared = None, 0
        for candidate in here.children.values():
            common = _common(candidate.tokens, rest)
            if common > shared:
                best, shared = candidate, common
        return Match(blocks, best, shared)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common front."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))

"""Recording for ``tracekv replay`` (``TRACEKV_RECORD=replay``): what the other records leave out, and no token of it.

Tokens are kept as one keyed digest per block (BLAKE2b, 8 bytes). The key is drawn when the process begins to record and lives in its
memory only: whoever has the journal can see which blocks are equal, and no more. Without the key a digest can't be tried against
guessed tokens, as a bare hash of a block could (a block of a known system prompt has few candidates); and two recordings share no
digest, so they can't be joined. Salts, images and the runtime's block hashes go through the same key.

A digest is of a block's own tokens, so that every equality of whole blocks is kept, wherever in a prompt they lie. Equality within a
block is kept for the rest of a prompt behind its last full block, and not otherwise.

What it costs is a hash per block of each prompt at its query, and again when it finishes.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tracekv.capture.observers import Observer
from tracekv.contract import reading
from tracekv.journal.current import current
from tracekv.journal.records import ReplayBuild, ReplayCaches, ReplayEnd, ReplayPrompt, ReplayStart
from tracekv.journal.vocabulary import Side

if TYPE_CHECKING:
    from tracekv.capture.session import Session

DIGEST_BYTES = 8
#: Where neither the engine's arguments nor a layout say how many tokens a block has.
DEFAULT_BLOCK_TOKENS = 32


class ReplayRecording(Observer):
    """One per process; observes the scheduler's callbacks and the registration of the caches."""

    #: Cancelled requests are never announced, so what is known of requests is bounded.
    MAX_REQUESTS = 65536

    def __init__(self, session: Session) -> None:
        self._journal = session.journal
        self._key = os.urandom(32)
        self._block_tokens = DEFAULT_BLOCK_TOKENS
        self._known: set[int] = set()
        self._chains: dict[int, int] = {}

    def begins(self, side: Side, llm_args: Any) -> None:
        """An instance is about to be constructed; with a scheduler an engine's life begins."""
        if side is not Side.SCHEDULER:
            return
        self._known.clear()
        self._chains.clear()
        config = getattr(llm_args, "kv_cache_config", None)
        block_tokens = reading.tokens_per_block(llm_args)
        self._block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
        self._journal.write(
            ReplayStart(
                block_tokens,
                _flag(config, "enable_block_reuse"),
                _flag(config, "enable_partial_reuse"),
                _flag(config, "use_kv_cache_manager_v2"),
            )
        )

    def queried(self, request: Any) -> None:
        """The prompt, at each query: a replay has generated tokens in it too."""
        self._tell_prompt(request)

    def allocated(self, request: Any, pages: list[list[int]]) -> None:
        """The prompt of a request that was never queried."""
        if request.request_id not in self._known:
            self._tell_prompt(request)

    def built(self, scheduler_output: Any) -> None:
        """How many tokens each request brought, and the runtime's hashes."""
        requests = [*scheduler_output.new_requests, *scheduler_output.cached_requests]
        hashes, priorities = [], []
        for position, data in enumerate(requests):
            chain = getattr(data, "block_hashes", None) or []
            if len(chain) > self._chains.get(data.request_id, 0):
                self._chains[data.request_id] = len(chain)
                hashes.append((position, [self._number(link) for link in chain]))
            given = getattr(data, "priorities", None)
            if given:
                priorities.append((position, [int(priority) for priority in given]))
        counts = [len(data.new_tokens) for data in requests]
        self._journal.write(ReplayBuild(current.step, counts, hashes, priorities))

    def finished(self, request: Any, pages: list[list[int]], answer: Any) -> None:
        """All its tokens."""
        tokens = reading.prompt_tokens(request)
        blocks, rest = self._digests(tokens)
        self._journal.write(ReplayEnd(request.request_id, len(tokens), blocks, rest))
        self._known.discard(request.request_id)
        self._chains.pop(request.request_id, None)

    def hand_out(self, caches: Any) -> Any:
        """What the caches look like; they are handed out as they are."""
        if hasattr(caches, "groups"):
            buffers, replicated = [], []
            for group in caches.groups:
                more = tuple(getattr(group, "replicated_regions", None) or ())
                buffers.append([[_buffer(each) for each in region.buffers] for region in (*group.regions, *more)])
                replicated.append(len(more))
            self._block_tokens = int(caches.tokens_per_block)
            self._journal.write(ReplayCaches([], buffers, replicated))
        else:
            self._journal.write(ReplayCaches(list(caches.shape), [], []))
        return caches

    def _tell_prompt(self, request: Any) -> None:
        if len(self._known) >= self.MAX_REQUESTS:
            self._known.clear()
            self._chains.clear()
        self._known.add(request.request_id)
        tokens = reading.prompt_tokens(request)
        blocks, rest = self._digests(tokens)
        salt = reading.cache_salt(request)
        try:
            images = reading.multimodal_digest(request)
        except reading.UnreadableRequest:
            images = None
        length = reading.prompt_length(request)
        self._journal.write(
            ReplayPrompt(
                request_id=request.request_id,
                prompt_tokens=len(tokens) if length is None else length,
                tokens=len(tokens),
                block_tokens=self._block_tokens,
                blocks=blocks,
                rest=rest,
                salt=None if salt is None else self._digest(b"salt", salt.encode()),
                images=None if images is None else self._digest(b"images", images.encode()),
                image_places=_numbers(getattr(request, "multimodal_positions", None)),
                image_lengths=_numbers(getattr(request, "multimodal_lengths", None)),
            )
        )

    def _digests(self, tokens: Sequence[int]) -> tuple[bytes, bytes]:
        size = self._block_tokens
        bounds = range(0, len(tokens) - len(tokens) % size + 1, size)
        blocks = b"".join(self._digest(b"block", _packed(tokens[start:end])) for start, end in pairwise(bounds))
        rest = tokens[len(tokens) - len(tokens) % size :]
        return blocks, self._digest(b"rest", _packed(rest)) if len(rest) else b""

    def _digest(self, kind: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=self._key, person=kind).digest()

    def _number(self, link: Any) -> int:
        return int.from_bytes(self._digest(b"hash", repr(link).encode()), "little") >> 1


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return array("q", tokens).tobytes()
    except (OverflowError, TypeError):  # ids that no model has, but some runtime may put in place of an image
        return repr(list(tokens)).encode()


def _flag(config: Any, name: str) -> bool | None:
    value = getattr(config, name, None)
    return value if isinstance(value, bool) else None


def _buffer(buffer: Any) -> tuple[int, str, int]:
    if hasattr(buffer, "layer_id"):
        return int(buffer.layer_id), str(buffer.role), int(getattr(buffer, "expansion", 1))
    layer, role, *expansion = buffer
    return int(layer), str(role), int(expansion[0]) if expansion else 1


def _numbers(values: Any) -> list[int]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    return [int(value) for value in values or () if isinstance(value, int)]

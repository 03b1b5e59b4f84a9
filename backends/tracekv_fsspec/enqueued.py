"""A request's enqueue as a hint: its prompt is hashed and staged before its first query (``TRACEKV_ENQUEUE_HOOK``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracekv.contract.enqueue import Enqueue
from tracekv.contract.reading import cache_salt
from tracekv_fsspec import offers
from tracekv_fsspec.keys import UnkeyableTokens, as_uint32

#: What a front process's request has of an adapter or of images, under names of its own. What isn't understood isn't hinted.
_NOT_PLAIN = ("lora_request", "prompt_adapter_request", "multimodal_params")


class EnqueueHints:
    """Subscribes to enqueues (``contract.enqueue.subscribe_tokens``), on the thread that enqueues. It never waits.

    The tokens are copied, as the query's are, and kept until the request's first report at the latest.
    """

    def __init__(self, engine: offers.Engine) -> None:
        self._engine = engine

    def __call__(self, enqueue: Enqueue, tokens: Sequence[int], request: Any) -> None:
        """Hint a request."""
        if any(getattr(request, name, None) is not None for name in _NOT_PLAIN):
            return
        try:
            namespace = offers.namespace_of(self._engine, request, cache_salt(request))
            known = as_uint32(tokens)
        except (offers.Bypass, UnkeyableTokens):
            return
        size = self._engine.tokens_per_block
        last = len(known) if self._engine.has_partial_blocks else len(known) - 1
        blocks = max(0, last // size)
        if blocks:
            prefetcher = self._engine.stager.prefetcher
            tail = known[blocks * size :][: size - 1] if self._engine.has_partial_blocks else None
            prefetcher.hint_prompt(enqueue.request_id, known[: blocks * size], len(known), namespace, tail)

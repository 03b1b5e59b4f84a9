"""The forward of one pass: the batch's tokens through the model, the connector's hooks around, greedy sampling behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tracekv.harness.attention import Segment
from tracekv.harness.cache import PagedCache
from tracekv.harness.requests import Batch, Request
from tracekv.harness.runner import LayerHook, ModelRunner
from tracekv.harness.stream import Streams


@dataclass(frozen=True)
class Sample:
    """A request's next token, and the logits it was chosen from, ``[vocabulary]``."""

    request: Request
    token: int
    logits: torch.Tensor


@dataclass(frozen=True)
class Launched:
    """A batch whose forward has run; in the overlap loop the host doesn't know its tokens before the next one has run too."""

    batch: Batch
    samples: list[Sample] = field(default_factory=list)


class ForwardStep:
    """Runs batches.

    Args:
        runner: The model.
        cache: Where the requests' pages are looked up.
        streams: ``current`` is joined again when a forward is done.
        graph_replay: Passes that only generate run as a replayed graph would: no per-layer hook is called in them.

    Attributes:
        hooks: Called before and after each decoder layer; None before they are installed.
        after_forward: The connector's forward callable; it runs after replayed graphs and the warm-up too.
        before_leaving: Called when the forward is done and joined, as a part of it: ``wait_for_save``.
        passes: Forwards run, the warm-up aside.

    Source: contract.md section 4.4; contract-v2.md section 5.
    """

    def __init__(self, runner: ModelRunner, cache: PagedCache, streams: Streams, *, graph_replay: bool = False) -> None:
        self._runner = runner
        self._cache = cache
        self._streams = streams
        self._graph_replay = graph_replay
        self.hooks: tuple[LayerHook, LayerHook] | None = None
        self.after_forward: Callable[[], None] | None = None
        self.before_leaving: Callable[[], None] | None = None
        self.passes = 0

    def run(self, batch: Batch, *, is_padded: bool = False) -> Launched:
        """Compute a batch. ``is_padded``: with a row of no request, which is all there is if the batch is empty."""
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        sampled: list[Request] = []
        for request in batch.context:
            start = request.context_current_position
            request.passes.append((start, request.context_chunk_size))
            end = start + request.context_chunk_size
            segments.append(Segment(len(tokens), start, end, self._cache.slots(request)))
            tokens += request.tokens_between(start, end)
            if request.is_last_context_chunk:
                rows.append(len(tokens) - 1)
                sampled.append(request)
        for request in batch.generation:
            end = request.num_device_tokens
            segments.append(Segment(len(tokens), end - 1, end, self._cache.slots(request)))
            tokens.append(request.last_token)
            rows.append(len(tokens) - 1)
            sampled.append(request)
        hooks = None if self._graph_replay and not batch.context else self.hooks
        padding = self._padding() if is_padded else []
        if padding:
            segments.append(Segment(len(tokens), 0, 1, padding))
            tokens.append(0)
        try:
            with self._streams.on_execution():
                logits = self._runner.forward(tokens, segments, rows, hooks)
                if self.after_forward is not None:
                    self.after_forward()
        finally:
            self._give_back(padding)
        self._streams.join()
        if self.before_leaving is not None:
            self.before_leaving()
        self.passes += 1
        chosen = logits.argmax(dim=-1).tolist()
        return Launched(batch, [Sample(*each) for each in zip(sampled, chosen, logits, strict=True)])

    def warm_up(self) -> None:
        """A forward of a dummy before the caches are registered; the connector's callable runs after it, as after any."""
        slots = self._padding()
        self._runner.forward([0], [Segment(0, 0, 1, slots)], [])
        if self.after_forward is not None:
            self.after_forward()
        self._give_back(slots)

    def _padding(self) -> list[list[int]]:
        """A page of each layer group for a row of no request."""
        return [[pool.take()] for pool in self._cache.pools]

    def _give_back(self, slots: list[list[int]]) -> None:
        for pool, taken in zip(self._cache.pools, slots, strict=False):
            pool.drop(taken[0])

"""A small engine for tests: pages whose content follows from the tokens before them, and the runtime's calls in their order.

(This folder has no ``__init__.py``: a package of its name beside the tests would hide the real fsspec.)
"""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from tracekv.contract import (
    KvCacheBufferRef,
    KvCacheLayerGroupLayout,
    KvCacheLayout,
    KvCacheRegion,
    RequestData,
    SchedulerOutput,
)
from tracekv_fsspec import Scheduler, Worker

B = 4
LAYERS = 2
ROW = 64
POISON = 7.0


class Stream:
    """A stream of the CPU's: work is done when it is issued."""

    def __init__(self):
        self.events = 0

    def record_event(self):
        self.events += 1
        return SimpleNamespace(synchronize=lambda: None)


class LlmArgs:
    """Engine arguments; each engine has its own."""

    def __init__(self, tokens_per_block=B):
        self.kv_cache_config = SimpleNamespace(tokens_per_block=tokens_per_block)


def request(request_id, tokens, **more):
    return SimpleNamespace(request_id=request_id, prompt_len=len(tokens), get_tokens=lambda beam: list(tokens), **more)


@dataclass
class Running:
    """A request in the engine: its object, its tokens and pages by layer group, and where its next pass begins."""

    request: object
    tokens: list[int]
    pages: list[list[int]]
    position: int = 0
    offered: int = 0
    honoured: int = 0
    is_parked: bool = False
    is_reported: bool = False
    reported_blocks: int = 0
    extra: dict = field(default_factory=dict)


class Engine:
    """One connector pair with its pools.

    Args:
        windows: Attention window of each layer group; a single None goes through ``register_kv_caches``.
    """

    def __init__(self, windows=(None,), slots=64, scheduler=Scheduler, worker=Worker, llm_args=None, start=True):
        self.args = llm_args or LlmArgs()
        self.windows = windows
        self.worker = worker(self.args)
        self.scheduler = scheduler(self.args)
        self.free = [list(range(slots)) for _ in windows]
        self.stream = Stream()
        self.plans = []
        self.pools = [torch.full((slots, LAYERS, 2, ROW * (number + 1)), POISON) for number in range(len(windows))]
        if start:
            self.start()

    def start(self):
        if self.windows == (None,):
            self.worker.register_kv_caches(self.pools[0])
        else:
            self.worker.register_kv_cache_layout(self._layout())
        self.scheduler.wait_for_initialization()

    def _layout(self):
        groups = []
        for number, (window, pool) in enumerate(zip(self.windows, self.pools, strict=True)):
            size = pool[0].numel() * pool.element_size()
            layers = tuple(range(number * LAYERS, (number + 1) * LAYERS))
            buffers = tuple(KvCacheBufferRef(layer, role) for layer in layers for role in ("key", "value"))
            half = len(buffers) // 2
            # Two regions per page, side by side in the pool.
            regions = tuple(
                KvCacheRegion(pool.data_ptr() + at, size // 2, size, len(pool), part, device="cpu")
                for at, part in ((0, buffers[:half]), (size // 2, buffers[half:]))
            )
            groups.append(KvCacheLayerGroupLayout(number, layers, window, regions))
        return KvCacheLayout(B, tuple(groups), torch.float32)

    def admit(
        self,
        request_id,
        tokens,
        *,
        computed=0,
        honour=None,
        tells_honoured=True,
        capacity=None,
        may_park=False,
        **more,
    ):
        """Query, commit, alloc callback. ``honour`` caps what is taken of the offer."""
        running = Running(request(request_id, tokens, **more), list(tokens), [[] for _ in self.windows])
        running.offered, running.is_parked = self.scheduler.get_num_new_matched_tokens(running.request, computed)
        assert running.is_parked in (False, may_park)
        running.honoured = running.offered if honour is None else min(honour, running.offered)
        running.position = computed + running.honoured
        self.grow(running, len(tokens) if capacity is None else max(capacity, running.position))
        if tells_honoured:
            running.request.py_num_connector_matched_tokens = running.honoured
        if self.windows == (None,):
            self.scheduler.update_state_after_alloc(running.request, list(running.pages[0]))
        else:
            self.scheduler.update_state_after_alloc_by_layer_group(running.request, [list(p) for p in running.pages])
        return running

    def grow(self, running, tokens):
        """Pages for so many tokens; none where the window has passed already."""
        for group, window in enumerate(self.windows):
            while len(running.pages[group]) * B < tokens:
                ordinal = len(running.pages[group])
                is_stale = window is not None and running.position >= (ordinal + 1) * B + window - 1
                running.pages[group].append(-1 if is_stale else self.free[group].pop())

    def run_pass(self, *scheduled, forward=True, as_cached=False):
        """One pass over ``(running, tokens to compute)`` pairs: metadata, loads, forward, saves.

        Args:
            as_cached: First reports are among the cached requests.
        """
        new, cached = [], []
        for running, count in scheduled:
            self.grow(running, running.position + count)
            added = [pages[running.reported_blocks :] for pages in running.pages]
            known = 0 if not running.is_reported else running.extra.get("known", len(running.tokens))
            data = RequestData(
                request_id=running.request.request_id,
                new_tokens=running.tokens[known:],
                new_block_ids=added[0] if len(added) == 1 else [],
                computed_position=running.position
                - (0 if running.is_reported or running.is_parked else running.honoured),
                num_scheduled_tokens=count,
                cache_salt=getattr(running.request, "cache_salt", None),
                new_block_ids_by_layer_group=added,
            )
            (cached if running.is_reported or as_cached else new).append(data)
            running.is_reported = True
            running.extra["known"] = len(running.tokens)
            running.reported_blocks = len(running.pages[0])
        plan = self.scheduler.build_connector_meta(SchedulerOutput(new, cached))
        self.plans.append(plan)
        self.worker.bind_connector_meta(pickle.loads(pickle.dumps(plan)))
        self.worker.start_load_kv(self.stream)
        if not forward:
            return plan
        for running, count in scheduled:
            self._compute(running, running.position, running.position + count)
            running.position += count
        self.worker.wait_for_save(self.stream)
        self.poll()
        return plan

    def poll(self):
        """The end of a pass."""
        assert self.worker.get_finished([], []) == ([], [])

    def _compute(self, running, start, end):
        for group, pages in enumerate(running.pages):
            for ordinal in range(start // B, -(-end // B)):
                if pages[ordinal] >= 0:
                    self.pools[group][pages[ordinal]] = content(
                        running.tokens, ordinal, group, self.pools[group][0].shape
                    )

    def prefill(self, request_id, tokens, *, chunk=None, **more):
        """Run a prompt to its end."""
        running = self.admit(request_id, tokens, **more)
        while running.position < len(tokens):
            self.run_pass((running, min(chunk or len(tokens), len(tokens) - running.position)))
        return running

    def finish(self, running):
        """End a request; its pages go back."""
        if self.windows == (None,):
            kept = self.scheduler.request_finished(running.request, list(running.pages[0]))
        else:
            kept = self.scheduler.request_finished_by_layer_group(running.request, [list(p) for p in running.pages])
        assert kept is False
        for group, pages in enumerate(running.pages):
            self.free[group] += [page for page in pages if page >= 0]

    def holds_its_kv(self, running, first=0, end=None):
        """Whether each page of blocks [first, end) holds what computing would have left there."""
        end = len(running.tokens) // B if end is None else end
        return all(
            torch.equal(self.pools[group][page], content(running.tokens, ordinal, group, self.pools[group][0].shape))
            for group, pages in enumerate(running.pages)
            for ordinal, page in list(enumerate(pages))[first:end]
            if page >= 0
        )

    def stop(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def content(tokens, ordinal, group, shape):
    """The KV of a block: a function of every token up to its end, and of nothing else."""
    seed = hashlib.sha256(repr((group, list(tokens[: (ordinal + 1) * B]))).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "little"))
    return torch.randn(shape, generator=generator)


def prompt(blocks, seed=0, extra=1):
    """Token ids that fill so many blocks and ``extra`` more."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50_000, (blocks * B + extra,), generator=generator).tolist()

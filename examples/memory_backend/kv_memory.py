"""A backend of your own: KV blocks in a dictionary of the engine's process, with a setting, and telling what it does.

``TRACEKV_CONNECTOR=memory`` finds it by the entry point in ``pyproject.toml``; ``TRACEKV_MEMORY__MAX_BLOCKS`` is its setting, parsed
and checked as tracekv's own are.

It is for one rank, one layer group (flat callbacks) and whole blocks of prompts that aren't chunked. Requests with a LoRA adapter or
images are left alone.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from time import perf_counter_ns
from typing import Annotated, Any

import msgspec
import torch

import tracekv
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, reading, valid_page_slots
from tracekv.journal.vocabulary import Direction, DropReason, MissReason, Tier
from tracekv.settings import load_section

_LAYER_GROUP = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the backend can be told."""

    #: Most blocks that are kept; later ones are dropped.
    max_blocks: Annotated[int, msgspec.Meta(ge=1)] = 4096


class Store:
    """Key of a block -> its page. Both halves of the connector are in one process here."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, torch.Tensor] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> torch.Tensor:
        return self._blocks[key]

    def put(self, key: bytes, page: torch.Tensor, max_blocks: int) -> bool:
        """Keep a copy; False where there is no room."""
        with self._lock:
            if key not in self._blocks and len(self._blocks) < max_blocks:
                self._blocks[key] = page.to("cpu", copy=True)
            return key in self._blocks


store = Store()


class Move(msgspec.Struct):
    """A block and its page; ``key`` is a digest of its tokens and all before it."""

    request_id: int
    key: bytes
    page: int


class Metadata(msgspec.Struct):
    """What the leader tells the worker of one pass."""

    load: list[Move]
    save: list[Move]


class Prompt(msgspec.Struct):
    """What is known of a request between its query and its first pass."""

    keys: list[bytes]
    first: int = 0
    offered: int = 0


class Scheduler(KvCacheConnectorScheduler):
    """Decides what is loaded and saved."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._block = reading.tokens_per_block(llm_args) or 32
        self._prompts: dict[int, Prompt] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        started = perf_counter_ns()
        tokens = reading.prompt_tokens(request)
        prompt = self._prompts[request.request_id] = Prompt(self._keys(request, tokens))
        prompt.first, is_unaligned = divmod(num_computed_tokens, self._block)
        most = (len(tokens) - 1) // self._block  # one token is left to compute
        end = prompt.first
        while not is_unaligned and end < min(most, len(prompt.keys)) and prompt.keys[end] in store:
            end += 1
        prompt.offered = end - prompt.first
        tracekv.lookup(
            request.request_id,
            prompt_tokens=len(tokens),
            computed_tokens=num_computed_tokens,
            stored_tokens=end * self._block,
            staged_tokens=end * self._block,
            offered_tokens=prompt.offered * self._block,
            started_ns=started,
            reason=None if end >= most else MissReason.UNALIGNED if is_unaligned else MissReason.NOT_STORED,
        )
        return prompt.offered * self._block, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        prompt = self._prompts.get(request.request_id)
        honoured = reading.honoured_tokens(request)
        if prompt is not None and honoured is not None:
            prompt.offered = honoured // self._block

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        metadata = Metadata([], [])
        for data in scheduler_output.new_requests:
            prompt = self._prompts.pop(data.request_id, None)
            if prompt is None:
                continue
            pages = dict(valid_page_slots(reading.new_block_ids(data)[_LAYER_GROUP]))
            loaded = prompt.first + prompt.offered
            complete = loaded + data.num_scheduled_tokens // self._block
            for ordinal, key in enumerate(prompt.keys[:complete]):
                if ordinal >= prompt.first and ordinal in pages:
                    moves = metadata.load if ordinal < loaded else metadata.save
                    moves.append(Move(data.request_id, key, pages[ordinal]))
        return metadata

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self._prompts.pop(request.request_id, None)
        return False  # nothing is under way, so the pages may go

    def _keys(self, request: Any, tokens: Any) -> list[bytes]:
        if reading.lora_id(request) is not None or getattr(request, "multimodal_positions", None):
            return []
        chain = hashlib.sha256(repr(reading.cache_salt(request)).encode()).digest()
        keys = []
        for end in range(self._block, len(tokens) + 1, self._block):
            chain = hashlib.sha256(chain + array("q", tokens[end - self._block : end]).tobytes()).digest()
            keys.append(chain)
        return keys


class Worker(KvCacheConnectorWorker):
    """Copies between pages and the dictionary, on the engine's thread."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._settings = load_section("memory", Settings)
        self._pages = torch.empty(0)

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._pages = kv_cache_tensor

    def start_load_kv(self, stream: Any) -> None:
        for move in self.get_connector_meta().load:
            started = perf_counter_ns()
            self._pages[move.page].copy_(store.get(move.key))
            self._tell(Direction.LOAD, move, started)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Everything is loaded already."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A block is saved whole, when the pass is over."""

    def wait_for_save(self, stream: Any) -> None:
        for move in self.get_connector_meta().save:
            started = perf_counter_ns()
            if store.put(move.key, self._pages[move.page], self._settings.max_blocks):
                self._tell(Direction.SAVE, move, started)
            else:
                tracekv.drop(DropReason.QUEUE_FULL, blocks=1, request_id=move.request_id)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []  # nothing is asynchronous

    def _tell(self, direction: Direction, move: Move, started_ns: int) -> None:
        page = self._pages[move.page]
        nbytes = page.numel() * page.element_size()
        tracekv.transfer(
            direction, move.request_id, _LAYER_GROUP, [move.page], nbytes, Tier.HOST, started_ns, perf_counter_ns()
        )

"""The smallest connector that keeps the contract and reports what it moves. Every fault of the corpus is a variation of it.

Blocks lie whole in a dictionary that both halves share. Keys chain over the prefix and begin with what else changes KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple

import tracekv
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, reading, valid_page_slots
from tracekv.journal.vocabulary import Direction, MissReason, Tier


class Move(NamedTuple):
    """One page of one request, and the block that it holds."""

    request_id: int
    layer_group: int
    page: int
    key: bytes


@dataclass
class Live:
    """What the leader knows of a request."""

    keys: list[bytes]
    computed: int
    honoured: int = 0
    prompt: int = 0
    pages: list[list[int]] = field(default_factory=list)
    saved: int = 0


class Leader(KvCacheConnectorScheduler):
    """Offers whole blocks that the dictionary holds for every layer group; both request lists are read."""

    store: ClassVar[dict[tuple[bytes, int], Any]] = {}
    is_async = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.block = reading.tokens_per_block(llm_args) or 32
        self.live: dict[int, Live] = {}

    # -- keys ---------------------------------------------------------------------------------------------------------

    def seed(self, request: Any) -> bytes:
        """What changes a request's KV beside its tokens."""
        parts = (reading.cache_salt(request), reading.lora_id(request), reading.multimodal_digest(request))
        return hashlib.sha256(repr(parts).encode()).digest()

    def keys(self, request: Any) -> list[bytes]:
        """One digest per whole block, over everything up to its end."""
        tokens, digest, found = reading.prompt_tokens(request), self.seed(request), []
        for begin in range(0, len(tokens) // self.block * self.block, self.block):
            digest = hashlib.sha256(digest + repr(tokens[begin : begin + self.block]).encode()).digest()[:16]
            found.append(digest)
        return found

    # -- callbacks ----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Whole blocks, one token short of the prompt's end."""
        started = perf_counter_ns()
        live = self.live[request.request_id] = Live(self.keys(request), num_computed_tokens)
        live.prompt = request.prompt_len
        blocks = (request.prompt_len - 1) // self.block
        groups = {group for _, group in self.store} or {0}
        end = num_computed_tokens // self.block
        if num_computed_tokens % self.block == 0:
            while end < blocks and all((live.keys[end], group) in self.store for group in groups):
                end += 1
        offered = max(0, end * self.block - num_computed_tokens)
        if offered < live.prompt - 1 - num_computed_tokens and blocks:
            reason = MissReason.NOT_STORED if end < blocks else None
        else:
            reason = None if blocks else MissReason.PROMPT_TOO_SHORT
        tracekv.lookup(
            request.request_id,
            prompt_tokens=request.prompt_len,
            computed_tokens=num_computed_tokens,
            stored_tokens=num_computed_tokens + offered,
            staged_tokens=num_computed_tokens + offered,
            offered_tokens=offered,
            started_ns=started,
            reason=reason,
            key=live.keys[blocks - 1] if blocks else None,
        )
        return offered, self.is_async and offered > 0

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """One group is a list of one."""
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """Note what was honoured; the pages come with the first report."""
        live = self.live.get(request.request_id)
        if live is not None:
            live.honoured = reading.honoured_tokens(request) or 0

    def build_connector_meta(self, scheduler_output: Any) -> object:
        """The pass's loads and saves."""
        loads: list[Move] = []
        saves: list[Move] = []
        for data in scheduler_output.new_requests:
            live = self.live.get(data.request_id)
            if live is not None:
                self.note_pages(live, data)
                begin = live.computed // self.block
                end = (live.computed + live.honoured) // self.block
                loads += self.moves(data.request_id, live, begin, end)
                live.saved = end
                # Where the load begins is what is reported: what was honoured comes on top.
                saves += self.completed(data, live, data.computed_position + live.honoured)
        for data in scheduler_output.cached_requests:
            live = self.live.get(data.request_id)
            if live is not None:
                self.note_pages(live, data)
                saves += self.completed(data, live, data.computed_position)
        return {"loads": loads, "saves": saves}

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Forget it; no copy outlives the pass that names it. May come twice, and for requests that never were asked."""
        self.live.pop(request.request_id, None)
        return False

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """As :meth:`request_finished`."""
        return self.request_finished(request, [])

    # -- planning -----------------------------------------------------------------------------------------------------

    def note_pages(self, live: Live, data: Any) -> None:
        """Append a report's page slots."""
        new = reading.new_block_ids(data)
        live.pages += [[] for _ in range(len(new) - len(live.pages))]
        for slots, more in zip(live.pages, new, strict=False):
            slots += more

    def completed(self, data: Any, live: Live, position: int) -> list[Move]:
        """The prompt blocks that the pass completes and that are not stored yet; it computes from ``position`` on."""
        end = min(position + data.num_scheduled_tokens, live.prompt) // self.block
        begin, live.saved = live.saved, max(live.saved, end)
        moves = self.moves(data.request_id, live, begin, end)
        return [move for move in moves if (move.key, move.layer_group) not in self.store]

    def moves(self, request_id: int, live: Live, begin: int, end: int) -> Iterator[Move]:
        """The pages of blocks ``[begin, end)``, for every layer group."""
        for group, slots in enumerate(live.pages):
            for ordinal, page in valid_page_slots(slots):
                if begin <= ordinal < min(end, len(live.keys)):
                    yield Move(request_id, group, page, live.keys[ordinal])


class Follower(KvCacheConnectorWorker):
    """Copies between pages and the dictionary: loads before the forward, saves after it."""

    store: ClassVar[dict[tuple[bytes, int], Any]] = {}

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """One group."""
        self.groups = {0: reading.layout_of_tensor(kv_cache_tensor).groups[0]}

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Groups by id."""
        self.groups = {group.layer_group_id: group for group in reading.layout_of(layout).groups}

    def start_load_kv(self, stream: Any) -> None:
        """All loads of the pass."""
        self.load(self.plan("loads"))

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: everything was loaded before the forward."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: blocks are saved whole, after the forward."""

    def wait_for_save(self, stream: Any) -> None:
        """All saves of the pass."""
        self.save(self.plan("saves"))

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[Any, Any]:
        """Nothing outlives a pass."""
        return [], []

    # -- copying ------------------------------------------------------------------------------------------------------

    def plan(self, which: str) -> list[Move]:
        """This pass's moves of a kind."""
        plan: Any = self.get_connector_meta()
        return list(plan[which]) if plan else []

    def load(self, moves: Sequence[Move]) -> None:
        """Dictionary -> pages."""
        for request_id, group, of_group in _grouped(moves):
            started = perf_counter_ns()
            for move in of_group:
                self.page(group, move.page).copy_(self.store[move.key, group])
            self.tell(Direction.LOAD, request_id, group, of_group, started)

    def save(self, moves: Sequence[Move]) -> None:
        """Pages -> dictionary."""
        for request_id, group, of_group in _grouped(moves):
            started = perf_counter_ns()
            for move in of_group:
                self.store[move.key, group] = self.page(group, move.page).clone()
            self.tell(Direction.SAVE, request_id, group, of_group, started)

    def page(self, group: int, page: int) -> Any:
        """``[bytes_per_page]`` uint8 of a page slot."""
        (region,) = self.groups[group].regions
        return region.slots()[page]

    def tell(
        self, direction: Direction, request_id: int, group: int, moves: Sequence[Move], started_ns: int, **more: Any
    ) -> None:
        """Report a transfer."""
        pages = [move.page for move in moves]
        nbytes = self.groups[group].bytes_per_page * len(pages)
        tracekv.transfer(direction, request_id, group, pages, nbytes, Tier.HOST, started_ns, perf_counter_ns(), **more)


def _grouped(moves: Sequence[Move]) -> Iterator[tuple[int, int, list[Move]]]:
    """``(request, layer group, its moves)`` in the order of the plan."""
    by_place: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        by_place.setdefault((move.request_id, move.layer_group), []).append(move)
    for (request_id, group), of_group in by_place.items():
        yield request_id, group, of_group


class KeepingLeader(Leader):
    """Keeps the pages of a finished request until its worker has saved them (asynchronous saving)."""

    #: Both halves live in this process: a real one would send it over a queue of its own.
    handed: ClassVar[dict[int, list[Move]]] = {}

    def completed(self, data: Any, live: Live, position: int) -> list[Move]:
        """Nothing during the passes."""
        return []

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """One group is a list of one."""
        return self.request_finished_by_layer_group(request, [cache_block_ids])

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """True where there is something to save."""
        live = self.live.pop(request.request_id, None)
        if live is None or not any(cache_block_ids_by_layer_group):
            return False
        live.pages = cache_block_ids_by_layer_group
        moves = list(self.moves(request.request_id, live, 0, live.prompt // self.block))
        self.handed.update({request.request_id: moves})
        return bool(moves)


class KeepingFollower(Follower):
    """Saves when it is told that requests have finished, and gives their ids back."""

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[Any, Any]:
        """Save what is named, then return it."""
        for request_id in finished_gen_req_ids:
            self.save(KeepingLeader.handed.pop(request_id, []))
        return list(finished_gen_req_ids), []


class ParkingLeader(Leader):
    """Loads asynchronously: the request is parked, and its pages are known from the alloc callback."""

    is_async = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.started: list[Move] = []

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """Start the load from our own state: a parked request is in no scheduler output."""
        live = self.live.get(request.request_id)
        if live is None:
            return
        honoured = reading.honoured_tokens(request) or 0
        live.pages = [list(slots) for slots in block_ids_by_layer_group]
        begin, end = live.computed // self.block, (live.computed + honoured) // self.block
        self.started += self.moves(request.request_id, live, begin, end)
        live.pages, live.computed = [], live.computed + honoured

    def build_connector_meta(self, scheduler_output: Any) -> object:
        """The loads that were started, beside the pass's own moves."""
        plan: Any = super().build_connector_meta(scheduler_output)
        started, self.started = self.started, []
        return {"loads": started + plan["loads"], "saves": plan["saves"]}


class ParkingFollower(Follower):
    """Its loads are done when it is polled."""

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> tuple[Any, Any]:
        """Every load that was started."""
        return [], list(started_loading_req_ids)

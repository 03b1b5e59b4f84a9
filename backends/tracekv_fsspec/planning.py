"""What a pass loads and saves, from the runtime's records and the books of its requests."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tracekv
from tracekv.contract import valid_page_slots
from tracekv.contract.reading import GroupView, cache_salt, new_block_ids
from tracekv.journal.vocabulary import Direction, DropReason, Tier
from tracekv_fsspec.arena import Slot
from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain
from tracekv_fsspec.offers import Engine
from tracekv_fsspec.plan import Copy, StepPlan
from tracekv_fsspec.requests import Offer, Request, Requests
from tracekv_fsspec.writer import SaveBlock

_log = logging.getLogger("tracekv.fsspec")

#: How long a load may be looked for again whose pins were given back, before the engine is stopped.
_RECOVER_S = 10.0


class OfferLost(RuntimeError):
    """Tokens that count as computed can't be loaded any more. To go on would serve wrong KV, so the engine stops."""


class Planner:
    """Plans one pass after another. On the executor's thread; no I/O.

    Args:
        requests: The books, which the query fills.
    """

    def __init__(self, engine: Engine, requests: Requests) -> None:
        self._engine = engine
        self._requests = requests
        self._groups = {group.layer_group_id: group for group in engine.layout.groups}
        self._offered: dict[int, Request] = {}

    def offered(self, request: Request) -> None:
        """Note an offer, whose pins are kept for the next plan only."""
        self._offered[request.request_id] = request

    def plan(self, step: int, output: Any) -> StepPlan:
        """The plan of the pass that ``output`` (a ``SchedulerOutput``) schedules."""
        # First, so that blocks whose pass raised can be saved by this one.
        self._engine.stager.copies.expire()
        plan = StepPlan(step, [], [])
        loaded: list[Slot] = []
        saved: list[SaveBlock] = []
        for data in output.new_requests:
            self._plan_request(data, True, plan, loaded, saved)
        for data in output.cached_requests:
            self._plan_request(data, False, plan, loaded, saved)
        self._drop_unused_offers()
        self._engine.stager.copies.plan(step, loaded, saved)
        return plan

    def release(self, request: Request) -> None:
        """Give an offer's pins back."""
        offer, request.offer = request.offer, None
        self._offered.pop(request.request_id, None)
        if offer is not None:
            self._engine.stager.release(list(offer.pinned(offer.start, offer.end)))

    def _drop_unused_offers(self) -> None:
        size = self._engine.tokens_per_block
        for request in list(self._offered.values()):
            offer = request.offer
            self.release(request)
            if offer is not None and offer.is_allocated and offer.honoured_tokens != 0:
                # The runtime counts these tokens as computed. Should it come back for them, they are looked for again.
                taken = offer.end if offer.honoured_tokens is None else offer.start + -(-offer.honoured_tokens // size)
                request.owed = (offer.start, min(taken, offer.end))

    def _plan_request(
        self, data: Any, is_new: bool, plan: StepPlan, loaded: list[Slot], saved: list[SaveBlock]
    ) -> None:
        request = self._requests.get(int(data.request_id))
        if request is None:
            return
        if is_new:
            if request.is_reported:
                self.release(request)
                request.start_afresh()
            request.report_first(data.new_tokens)
        else:
            request.report_more(data.new_tokens)
        request.add_pages(tuple(self._groups), new_block_ids(data))
        position = int(data.computed_position)
        if is_new:
            position += self._plan_loads(request, data, plan, loaded)
            salt = cache_salt(data)
            if salt is not None and salt != request.cache_salt and request.chain is not None:
                _log.warning("tracekv: the object of a query lacked the salt of its record; the request isn't saved")
                request.bypass()
        request.is_reported = True
        if request.chain is not None:
            self._plan_saves(request, request.chain, position, int(data.num_scheduled_tokens), is_new, plan, saved)

    def _plan_loads(self, request: Request, data: Any, plan: StepPlan, loaded: list[Slot]) -> int:
        """Name the slots and pages of what was honoured. Returns the tokens that surely lie before this pass's begin."""
        size = self._engine.tokens_per_block
        if request.owed is not None:
            # Its record counts the load as computed already, so nothing is added to its position.
            self._name_loads(request, self._recovered(request, request.owed), request.owed[1], plan, loaded)
            request.owed = None
            return 0
        offer = request.offer
        if offer is None:
            return 0
        offered = (offer.end - offer.start) * size
        honoured = offer.honoured_tokens
        if honoured is None:
            # Never less than what was honoured: exact without chunking, too much with it. To load too much is harmless
            # (it is the right KV), to save too early would not be: so nothing is added to the position.
            bound = len(data.new_tokens) - int(data.computed_position) - int(data.num_scheduled_tokens)
            self._name_loads(request, offer, offer.start + -(-min(offered, max(bound, 0)) // size), plan, loaded)
            return 0
        honoured = min(max(honoured, 0), offered)
        self._name_loads(request, offer, offer.start + -(-honoured // size), plan, loaded)
        return honoured

    def _name_loads(self, request: Request, offer: Offer, end: int, plan: StepPlan, loaded: list[Slot]) -> None:
        """Blocks ``[offer.start, end)`` go to their pages; the other pins are given back."""
        request.offer = None
        self._offered.pop(request.request_id, None)
        size = self._engine.tokens_per_block
        named: set[Slot] = set()
        for shard in self._engine.shards:
            by_tier: dict[Tier, Copy] = {}
            for number, page in valid_page_slots(request.pages.get(shard.layer_group, [])[offer.start : end]):
                slot, was_read = offer.slot(shard, offer.start + number)
                tier = self._engine.stager.store.tier if was_read else Tier.HOST
                if tier not in by_tier:
                    by_tier[tier] = Copy(request.request_id, *shard, tier)
                by_tier[tier].add(page, slot, size)
                if was_read:
                    times = offer.ticket.times[shard]
                    by_tier[tier].queued_ns = times.queued_ns
                    by_tier[tier].read_ns = times.read_ns
                    by_tier[tier].verify_ns = times.verify_ns
                named.add(slot)
            plan.loads.extend(by_tier.values())
        unused: list[Slot] = []
        for slot in offer.pinned(offer.start, offer.end):
            (loaded if slot in named else unused).append(slot)
        self._engine.stager.release(unused)

    def _recovered(self, request: Request, owed: tuple[int, int]) -> Offer:
        """Pin again what was offered, taken, and given back since the request wasn't scheduled with its query."""
        start, end = owed
        keys = request.chain.keys[start:end] if request.chain else []
        reader = self._engine.stager.reader
        ticket = reader.stage(keys, start, request_id=request.request_id)
        reader.wait(ticket, _RECOVER_S)
        taken, reason = reader.take(ticket)
        if start + taken < end:
            request.offer = Offer(ticket, start, start + taken)
            self.release(request)
            raise OfferLost(
                f"tracekv: request {request.request_id} comes back for {end - start} blocks that were offered in an earlier "
                f"pass, and {end - start - taken} of them are gone ({reason.value if reason else 'unknown'}). They count as "
                "computed, so going on would serve wrong KV. Give TRACEKV_FSSPEC__ARENA_BYTES more room."
            )
        return Offer(ticket, start, end)

    def _plan_saves(
        self,
        request: Request,
        chain: KeyChain,
        position: int,
        scheduled: int,
        is_new: bool,
        plan: StepPlan,
        saved: list[SaveBlock],
    ) -> None:
        """Save each block whose tokens are complete when this pass is over and that is neither stored nor on its way.

        What was just loaded is stored, so it is not saved again. A prefix that the device had kept is looked at with the
        first record: if its save was dropped once, it is made good here.
        """
        size = self._engine.tokens_per_block
        end = min(position + scheduled, chain.tokens) // size
        saves: dict[Shard, Copy] = {}
        dropped: dict[Shard, int] = defaultdict(int)
        for ordinal in range(request.next_save, end):
            pages = self._pages_to_save(request, chain.keys[ordinal], ordinal, None if is_new else position)
            blocks = self._reserve(request, chain, ordinal, list(pages))
            if blocks is None:
                for shard in pages:
                    dropped[shard] += 1
                continue
            for block in blocks:
                if block.shard not in saves:
                    saves[block.shard] = Copy(request.request_id, *block.shard, Tier.HOST)
                saves[block.shard].add(pages[block.shard], block.slot, size)
            saved += blocks
        request.next_save = max(request.next_save, end)
        request.is_being_saved |= bool(saves)
        plan.saves.extend(saves.values())
        for shard, count in dropped.items():
            tracekv.drop(
                request.broken_by or DropReason.ERROR,
                direction=Direction.SAVE,
                blocks=count,
                nbytes=count * self._engine.stager.arena.page_bytes(shard),
                request_id=request.request_id,
                layer_group=shard.layer_group,
            )

    def _pages_to_save(self, request: Request, key: bytes, ordinal: int, position: int | None) -> dict[Shard, int]:
        """The pages of a block that the store lacks. ``position`` is None where the page list was reported just now."""
        found = {}
        for shard in self._engine.shards:
            pages = request.pages.get(shard.layer_group, [])
            page = pages[ordinal] if ordinal < len(pages) else -1
            if page < 0 or self._engine.stager.writer.is_known(shard, key):
                continue
            if position is not None and not self._is_live(self._groups[shard.layer_group], ordinal, position):
                continue
            found[shard] = page
        return found

    def _is_live(self, group: GroupView, ordinal: int, position: int) -> bool:
        """Whether a page that was reported earlier is still the block's own.

        A window that has passed a block gives its page to somebody else, and no record says so (contract-v2.md section 2:
        block i is gone when history >= (i + 1) * B + W - 1). One token is left for loops whose records lag by one.
        """
        if group.window_size is None:
            return True
        return position + 1 < (ordinal + 1) * self._engine.tokens_per_block + group.window_size - 1

    def _reserve(
        self, request: Request, chain: KeyChain, ordinal: int, shards: Sequence[Shard]
    ) -> list[SaveBlock] | None:
        """Slots for a block's shards: all of them, or None where one can't be had."""
        writer = self._engine.stager.writer
        blocks: list[SaveBlock] = []
        if not shards:
            return blocks
        for shard in shards:
            slot = request.broken_by or writer.reserve(
                shard, chain.keys[ordinal], is_new_chain=not request.is_being_saved
            )
            if isinstance(slot, DropReason):
                # A block behind a gap can never be found, so the rest of this chain is dropped with it.
                request.broken_by = slot
                writer.cancel(blocks)
                return None
            blocks.append(
                SaveBlock(
                    request.request_id,
                    chain.namespace,
                    chain.keys[ordinal],
                    ordinal,
                    self._engine.tokens_per_block,
                    slot,
                )
            )
        return blocks

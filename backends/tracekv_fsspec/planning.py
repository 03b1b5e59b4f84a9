"""What a pass loads and saves, from the runtime's records and the books of its requests."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from tracekv.contract import valid_page_slots
from tracekv.contract.reading import cache_salt, has_new_blocks, new_block_ids
from tracekv.journal.vocabulary import Tier
from tracekv_fsspec.arena import Slot
from tracekv_fsspec.keys import UnkeyableTokens
from tracekv_fsspec.lookup import blocks_passed
from tracekv_fsspec.offers import Engine
from tracekv_fsspec.plan import Copy, StepPlan
from tracekv_fsspec.requests import MAX_REQUESTS, Offer, Request, Requests
from tracekv_fsspec.saving import SavePlanner
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
        self._saves = SavePlanner(engine)
        self._offered: dict[int, Request] = {}
        self._parked: list[tuple[int, int]] = []

    def offered(self, request: Request) -> None:
        """Note an offer. Its pins are kept for the next plan only; those of a parked request, until it is reported."""
        if request.offer is not None and request.offer.parked is not None:
            self._parked.append((request.request_id, request.offer.parked))
        else:
            self._offered[request.request_id] = request

    def plan(self, step: int, output: Any) -> StepPlan:
        """The plan of the pass that ``output`` (a ``SchedulerOutput``) schedules."""
        # First, so that blocks whose pass raised can be saved by this one.
        self._engine.stager.copies.expire()
        plan = StepPlan(step, [], [], self._parked)
        self._parked = []
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
        if offer is not None and offer.parked is not None:
            self._engine.stager.parking.forget(offer.parked)
        elif offer is not None:
            self._unpin(offer)

    def _drop_unused_offers(self) -> None:
        size = self._engine.tokens_per_block
        for request in list(self._offered.values()):
            offer = request.offer
            self.release(request)
            if offer is not None and offer.is_allocated and offer.honoured_tokens != 0:
                # The runtime counts these tokens as computed. Should it come back for them, they are looked for again.
                taken = offer.tokens if offer.honoured_tokens is None else min(offer.honoured_tokens, offer.tokens)
                request.owed = replace(offer, end=offer.block_of(taken, size), end_token=offer.first_token + taken)

    def _only_generates(self, request: Request, data: Any) -> bool:
        """Take up a record of one token that needs no page and completes no block: almost every record of a request that generates."""
        if not request.is_reported or request.chain is None:
            return False
        tokens = data.new_tokens
        if len(tokens) != 1 or has_new_blocks(data):
            return False
        if not self._saves.has_nothing(request, int(data.computed_position) + int(data.num_scheduled_tokens)):
            return False
        try:
            return request.chain.append(tokens[0])
        except UnkeyableTokens:
            return False

    def _plan_request(
        self, data: Any, is_new: bool, plan: StepPlan, loaded: list[Slot], saved: list[SaveBlock]
    ) -> None:
        request = self._requests.get(int(data.request_id))
        if request is None:
            if self._requests.was_promised(int(data.request_id)):
                raise OfferLost(
                    f"tracekv: request {data.request_id} comes back for blocks that were promised so long ago that more than "
                    f"{MAX_REQUESTS} requests came since, and nothing is known of it any more. Going on would serve wrong KV."
                )
            return
        if not is_new and self._only_generates(request, data):
            return
        # Most first reports are in new_requests, not all of them (contract-v2.md section 11, 10).
        is_first = is_new or not request.is_reported
        if is_new and request.is_reported:
            self.release(request)
            request.start_afresh()
        if is_new or (is_first and data.new_tokens):
            request.report_first(data.new_tokens, with_tail=self._engine.has_partial_blocks)
        else:
            request.report_more(data.new_tokens)
        appended = new_block_ids(data)
        if any(appended):
            request.add_pages(tuple(self._groups), appended)
        position = int(data.computed_position)
        if is_first:
            honoured = self._plan_loads(request, data, plan, loaded)
            position += honoured if is_new else 0
        if is_new:
            salt = cache_salt(data)
            if salt is not None and salt != request.cache_salt and request.chain is not None:
                _log.warning("tracekv: the object of a query lacked the salt of its record; the request isn't saved")
                request.bypass()
        request.is_reported = True
        self._saves.plan(request, position, int(data.num_scheduled_tokens), is_new, plan, saved)

    def _plan_loads(self, request: Request, data: Any, plan: StepPlan, loaded: list[Slot]) -> int:
        """Name the slots and pages of what was honoured. Returns the tokens that surely lie before this pass's begin."""
        owed, request.owed = request.owed, None
        if owed is not None:
            # Its record counts the load as computed already, so nothing is added to its position.
            self._name_loads(request, self._recovered(request, owed), owed.tokens, plan, loaded)
            return 0
        offer = request.offer
        if offer is None:
            return 0
        if offer.parked is not None:
            self._plan_parked(request, offer, int(data.computed_position), plan, loaded)
            return 0
        honoured = offer.honoured_tokens
        if honoured is None:
            # Never less than what was honoured: exact without chunking, too much with it. To load too much is harmless
            # (it is the right KV), to save too early would not be: so nothing is added to the position.
            bound = len(data.new_tokens) - int(data.computed_position) - int(data.num_scheduled_tokens)
            self._name_loads(request, offer, min(offer.tokens, max(bound, 0)), plan, loaded)
            return 0
        honoured = min(max(honoured, 0), offer.tokens)
        self._name_loads(request, offer, honoured, plan, loaded)
        return honoured

    def _plan_parked(self, request: Request, offer: Offer, position: int, plan: StepPlan, loaded: list[Slot]) -> None:
        """Name the loads of a request that was parked and is reported now.

        Its record's position includes the load, or the load is going to be computed once more (contract.md 1.3, contract-v2.md 1.4);
        so where the runtime doesn't tell what it honoured, it is what lies before the position.
        """
        honoured = position - offer.first_token if offer.honoured_tokens is None else offer.honoured_tokens
        honoured = min(max(honoured, 0), offer.tokens)
        if not honoured or offer.parked is None:
            self.release(request)
            return
        ticket = self._engine.stager.parking.claim(offer.parked)
        request.offer = None
        if ticket is None:
            end = offer.block_of(honoured, self._engine.tokens_per_block)
            offer = self._recovered(request, replace(offer, parked=None, end=end))
        else:
            offer = replace(offer, ticket=ticket, parked=None)
        self._name_loads(request, offer, honoured, plan, loaded)

    def _name_loads(self, request: Request, offer: Offer, honoured: int, plan: StepPlan, loaded: list[Slot]) -> None:
        """The blocks of the first ``honoured`` tokens go to their pages; the other pins are given back."""
        request.offer = None
        self._offered.pop(request.request_id, None)
        size = self._engine.tokens_per_block
        end = offer.block_of(honoured, size)
        self._check_windows(request, offer, honoured, end)
        # Where what was honoured isn't told, end is no less than that, and may be more than there are pages for.
        if offer.honoured_tokens is not None and any(len(request.pages.get(group, ())) < end for group in self._groups):
            self._unpin(offer)
            raise OfferLost(
                f"tracekv: the runtime honoured {honoured} tokens of the offer to request {request.request_id}, and its record has no "
                "pages to load all of them to. They count as computed, so going on would serve wrong KV."
            )
        pinned = offer.ticket.pinned(offer.start, offer.end)
        for shard in self._engine.shards:
            named: dict[int, Slot] = {}
            by_tier: dict[Tier, Copy] = {}
            for number, page in valid_page_slots(request.pages.get(shard.layer_group, [])[offer.start : end]):
                ordinal = offer.start + number
                slot, was_read = offer.slot(shard, ordinal)
                tier = self._engine.stager.store.tier if was_read else Tier.HOST
                if tier not in by_tier:
                    by_tier[tier] = Copy(request.request_id, *shard, tier)
                by_tier[tier].add(page, slot, offer.tokens_of(ordinal, size))
                if was_read:
                    times = offer.ticket.times[shard]
                    by_tier[tier].queued_ns = times.queued_ns
                    by_tier[tier].read_ns = times.read_ns
                    by_tier[tier].verify_ns = times.verify_ns
                named[slot.number] = slot
            plan.loads.extend(by_tier.values())
            loaded += reversed(named.values())  # the end of the chain first, as pins are given back
            self._engine.stager.arena.unpin_run(shard, [number for number in pinned[shard] if number not in named])

    def _check_windows(self, request: Request, offer: Offer, honoured: int, end: int) -> None:
        """Blocks that were left out of an offer must not be needed now.

        They are, if less was honoured than offered (an earlier window begins earlier), or if one of them has a page: it would go
        on as this request's, be read by whoever reuses it, and holds somebody else's KV.

        Raises:
            OfferLost: They are needed, and nobody has them.
        """
        if not honoured or not any(offer.ticket.skipped.values()):
            return
        for shard, skipped in offer.ticket.skipped.items():
            window = self._groups[shard.layer_group].window_size
            first = offer.start + skipped
            passed = first
            if window is not None:
                passed = blocks_passed(offer.first_token + honoured, window, self._engine.tokens_per_block)
            pages = request.pages.get(shard.layer_group, [])[offer.start : min(first, end)]
            if passed >= min(first, end) and all(page < 0 for page in pages):
                continue
            self._unpin(offer)
            raise OfferLost(
                f"tracekv: request {request.request_id} was offered {offer.tokens} tokens without the blocks that the window of "
                f"layer group {shard.layer_group} has passed; the runtime took {honoured} of them and "
                f"{sum(page >= 0 for page in pages)} of those blocks have pages. Going on would serve wrong KV. "
                "Set TRACEKV_FSSPEC__WINDOW_LOOKUP=strict for this runtime."
            )

    def _unpin(self, offer: Offer) -> None:
        for shard, numbers in offer.ticket.pinned(offer.start, offer.end).items():
            self._engine.stager.arena.unpin_run(shard, numbers)

    def _recovered(self, request: Request, owed: Offer) -> Offer:
        """Pin again what was offered, taken, and given back since the request wasn't scheduled with its query."""
        wanted = owed.end - owed.start
        reader = self._engine.stager.reader
        skipped = owed.ticket.skipped
        # All of its keys: the last one tells which block of it may be incomplete.
        ticket = reader.stage(owed.ticket.keys, owed.start, request_id=request.request_id, skipped=skipped)
        reader.wait(ticket, _RECOVER_S)
        taken, reason = reader.take(ticket)
        offer = replace(owed, ticket=ticket, end=owed.start + taken)
        if taken < wanted:
            request.offer = offer
            self.release(request)
            raise OfferLost(
                f"tracekv: request {request.request_id} comes back for {wanted} blocks that were offered in an earlier pass, "
                f"and {wanted - taken} of them are gone ({reason.value if reason else 'unknown'}). They count as computed, so "
                "going on would serve wrong KV. Give TRACEKV_FSSPEC__ARENA_BYTES more room."
            )
        return offer

"""Which pages a request has, and which ones a connector touches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tracekv.journal.vocabulary import Direction, Source
from tracekv.rules.events import Build, Claim, Finish, Listed, Moved, Watched
from tracekv.rules.model import By, Hit, Rule, Severity

_MOST_NAMED = 16


class NegativePage(Rule):
    """-1 never reaches an address.

    Contract: a block without a page is listed as -1, and -1 is a valid subscript (the connector document, "Blocks with no
        page"; contract.md 10 L1).
    Runtime: the pool's last page is read or written: another request's KV.
    Fix: build every target with ``valid_page_slots``.
    """

    id = "L1"

    def on_astray(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        record = event.record
        if record.pages and min(record.pages) < 0 and record.error is None:
            group = event.run.groups.get(record.layer_group)
            negative = sum(page < 0 for page in record.pages)
            # A list may name blocks without a page as long as nothing is moved for them.
            if group is None or record.nbytes > (len(record.pages) - negative) * group.bytes_per_page:
                yield self.finding(record, pages=negative, layer_group=record.layer_group)

    def on_watched(self, event: Watched) -> Iterator[Hit]:
        """A pool was indexed with a negative number."""
        group, page, times = event.record.last_slots[0]
        yield self.finding(event.record, layer_group=group, read_instead=page, times=times)


class UnknownLayerGroup(Rule):
    """A layer group's id comes from the layout.

    Contract: ``KvCacheLayerGroupLayout.layer_group_id``, looked up by id: positions may differ (contract.md 2, 10 L1).
    Runtime: none; the pages counted there are of no pool.
    Fix: use ``group.layer_group_id``, not the window or an index of your own.
    """

    id = "L1b"

    def on_astray(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        if event.run.groups and event.record.layer_group not in event.run.groups:
            yield self.finding(event.record, layer_group=event.record.layer_group, known=sorted(event.run.groups))


class BytesDoNotFit(Rule):
    """The bytes of a transfer are its pages times the bytes of all regions of a page.

    Contract: a page is the sum of its group's regions, replicated ones included (contract.md 2, 10 L1).
    Runtime: none; a region that is left out keeps another request's bytes.
    Fix: walk ``group.regions`` (and ``replicated_regions`` where there are any) for each page; compressed bytes are the
        store's business (``store_operation``).
    """

    id = "L1c"
    severity = Severity.SUSPECT
    follows = frozenset({"L1", "L1b", "S8b", "S3", "S3b", "S2"})

    def on_astray(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        record = event.record
        group = event.run.groups.get(record.layer_group)
        if group is None or record.error is not None or not record.pages or record.source is not Source.REPORTED:
            return
        valid = sum(page >= 0 for page in record.pages)
        expected = valid * group.bytes_per_page
        # A whole fraction is a layer's part: some connectors report layer by layer.
        if record.nbytes > expected or (record.nbytes and expected % record.nbytes):
            yield self.finding(
                record, nbytes=record.nbytes, expected=valid * group.bytes_per_page, pages=valid,
                bytes_per_page=group.bytes_per_page,
            )  # fmt: skip


class PagePastThePool(Rule):
    """A page slot is below the group's number of slots.

    Contract: 0 <= slot < num_slots of its layer group (contract.md 10 S8).
    Runtime: none; the address is outside of the pool.
    Fix: check that slots of one group are not used with another's pool.
    """

    id = "S8b"
    follows = frozenset({"L1b"})

    def on_astray(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        record = event.record
        group = event.run.groups.get(record.layer_group)
        if group is not None and group.num_slots and record.pages and max(record.pages) >= group.num_slots:
            yield self.finding(record, page=max(record.pages), slots=group.num_slots, layer_group=record.layer_group)


class PageOfAnother(Rule):
    """A transfer touches its request's pages only.

    Contract: page slots come from the request's own lists (contract.md 10 S8).
    Runtime: none; another request computes on what was written, or its KV is stored under this one's key.
    Fix: keep lists by request and layer group, append what is new, and forget them when the request is told anew.
    """

    id = "S8"
    follows = frozenset({"L1", "L1b", "S8b", "W2c"})

    def on_astray(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        record, request = event.record, event.request
        if record.request_id < 0 and _is_seen_astray(event):
            yield self.finding(record, pages=record.pages[:_MOST_NAMED], layer_group=record.layer_group, owner="nobody")
        own = None if request is None else request.own(record.layer_group)
        if request is None or own is None or not request.is_whole:
            return
        strange = [page for page in record.pages if page >= 0 and page not in own]
        if strange:
            yield self.finding(
                record, request.alloc, pages=strange[:_MOST_NAMED], layer_group=record.layer_group,
                direction=record.direction.value,
            )  # fmt: skip


def _is_seen_astray(event: Moved) -> bool:
    """The watch, which knows the owners in the leader's process only, saw a load into a page of no request."""
    record, source = event.record, event.source
    is_load = record.source is Source.OBSERVED and record.direction is Direction.LOAD
    return is_load and source.has_scheduler and source is event.run.leader and bool(record.pages)


class TwoOwners(Rule):
    """A page belongs to one request, but for what the device shares at the front.

    Contract: no page slot is live in two requests of a pass (contract.md 9 item 5, 10 S10).
    Runtime: it broke this itself (a list that shrank, a page freed too early): two requests compute on one page.
    Fix: save nothing from these requests; tell the runtime's authors.
    """

    id = "S10"
    by = By.RUNTIME
    follows = frozenset({"S11", "S11c"})

    def on_claim(self, event: Claim) -> Iterator[Hit]:
        """A page that another request of the pass holds."""
        # Under a window a page that the other one's window has passed is free, and no list says so.
        group = event.run.groups.get(event.group)
        if event.request.is_whole and event.other.is_whole and group is not None and group.window_size is None:
            yield self.finding(
                event.record,
                event.other.alloc,
                request=event.request.request_id,
                page=event.page,
                layer_group=event.group,
                other_request=event.other.request_id,
            )


class SamePageTwice(Rule):
    """A page occurs once: in a request's list, and in a transfer.

    Contract: one page per block (contract.md 10 S8, S10).
    Runtime: none; the later block overwrites the earlier one.
    Fix: for a transfer, look for an index that is read after its loop; for a list, tell the runtime's authors.
    """

    id = "S10b"
    follows = frozenset({"L1"})

    def on_listed(self, event: Listed) -> Iterator[Hit]:
        """Pages of a request."""
        twice = _repeated(event.slots)
        if twice:
            yield self.finding(
                event.record, request=event.request.request_id, pages=twice[:_MOST_NAMED], layer_group=event.group
            )

    def on_astray(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        twice = _repeated(event.record.pages)
        if twice:
            yield self.finding(event.record, pages=twice[:_MOST_NAMED], layer_group=event.record.layer_group)


class ListShrinks(Rule):
    """A request's list of pages does not shrink.

    Contract: lists only grow while a request lives; the delta protocol can't tell otherwise (contract.md 9 item 5, 10 S11;
        contract-v2.md 11, 14).
    Runtime: rejected drafts take their tail block along; speculative decoding is refused on V2 for that.
    Fix: turn speculative decoding off, or save no block before the pass after it is full.
    """

    id = "S11"
    by = By.RUNTIME

    def on_finish(self, event: Finish) -> Iterator[Hit]:
        """The end, with the list as it is then."""
        request, lists = event.request, event.record.pages
        if not request.is_whole or request.is_parked:
            return
        for group, slots in enumerate(lists):
            known = request.pages[group] if group < len(request.pages) else []
            if slots and len(slots) < len(known):
                yield self.finding(
                    event.record, request.first_build, layer_group=group, listed=len(slots), told=len(known)
                )
                return


class PageMoved(Rule):
    """A block stays on its page.

    Contract: ordinals that were told are never restated; only -1 may take a page's place (contract-v2.md 2, 11).
    Runtime: a block that moves is told to nobody: what is saved afterwards is another block.
    Fix: as for a list that shrinks; compare with the list that ``request_finished`` is given before a late save.
    """

    id = "S11c"
    by = By.RUNTIME
    follows = frozenset({"S11"})

    def on_finish(self, event: Finish) -> Iterator[Hit]:
        """The end, with the list as it is then."""
        request = event.request
        if not request.is_whole or request.is_parked:
            return
        for group, slots in enumerate(event.record.pages):
            known = request.pages[group] if group < len(request.pages) else []
            if slots[: len(known)] == known[: len(slots)]:
                continue
            moved = [
                ordinal
                for ordinal, (now, then) in enumerate(zip(slots, known, strict=False))
                if now != then and now >= 0 and then >= 0
            ]
            if moved:
                yield self.finding(event.record, request.first_build, layer_group=group, blocks=moved[:_MOST_NAMED])
                return


class TooFewPages(Rule):
    """The pages that were told hold the tokens that are scheduled.

    Contract: ceil((computed + scheduled) / block) <= pages in each layer group (contract.md 9 item 2, 10 S11).
    Runtime: it broke this itself; connectors have hung or panicked on it.
    Fix: save only blocks whose pages you know; tell the runtime's authors.
    """

    id = "S11b"
    by = By.RUNTIME
    follows = frozenset({"S11", "S1", "S1b"})

    def on_build(self, event: Build) -> Iterator[Hit]:
        """A pass."""
        for request, end in event.short:
            if request.is_whole:
                yield self.finding(
                    event.record,
                    request.first_build,
                    request=request.request_id,
                    tokens=end,
                    pages=[len(slots) for slots in request.pages],
                    tokens_per_block=event.run.block,
                )


def _repeated(slots: Sequence[int]) -> list[int]:
    seen: set[int] = set()
    found: set[int] = set()
    for slot in slots:
        if slot >= 0 and slot in seen:
            found.add(slot)
        seen.add(slot)
    return sorted(found)

"""What the scheduler knows of each request: its keys, its pages, what it was offered, and how far it is saved."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tracekv.journal.vocabulary import DropReason
from tracekv_fsspec.arena import Slot
from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, UnkeyableTokens, as_uint32
from tracekv_fsspec.reader import Ticket

#: Cancelled requests are never announced (contract.md section 1.8), so the books are bounded: the request that was
#: seen least recently goes first. It would only lose its saves.
MAX_REQUESTS = 4096


@dataclass
class Offer:
    """Blocks ``[start, end)`` of a request that were promised. Their slots are pinned until the loads are over.

    Attributes:
        is_allocated: Whether the alloc callback came: from then on the runtime may count on it.
        honoured_tokens: What the runtime took, where it said so.
    """

    ticket: Ticket
    start: int
    end: int
    is_allocated: bool = False
    honoured_tokens: int | None = None

    def pinned(self, first: int, end: int) -> Iterator[Slot]:
        """Slots of blocks ``[first, end)``, the end of the chain first."""
        for slots in self.ticket.slots.values():
            for ordinal in range(end - 1, first - 1, -1):
                slot = slots[ordinal - self.start]
                if slot is not None:
                    yield slot

    def slot(self, shard: Shard, ordinal: int) -> tuple[Slot, bool]:
        """A block's slot, and whether it was read from the store for this offer."""
        number = ordinal - self.start
        slot = self.ticket.slots[shard][number]
        if slot is None:
            raise LookupError(f"block {ordinal} of {shard} was offered but isn't pinned")
        return slot, bool(self.ticket.is_read[shard][number])


@dataclass
class Request:
    """One request, from its query (or alloc callback) on.

    Attributes:
        cache_salt: As the query saw it; a record that says otherwise is not served.
        chain: None where the request bypasses the store.
        queried: The tokens that were hashed for the query, until the first report has confirmed them.
        pages: By layer group, one page slot per block ordinal.
        owed: Blocks ``[a, b)`` of an offer that the runtime took but didn't schedule at once.
        is_reported: Whether it was in ``new_requests`` already.
        next_save: Ordinal of the first block that was not considered for saving yet.
        is_being_saved: Whether blocks of it were taken for saving in an earlier pass.
        broken_by: Why a block of this chain was dropped; the ones behind it could never be found.
    """

    request_id: int
    cache_salt: str | None
    chain: KeyChain | None
    queried: array[int] | None = None
    offer: Offer | None = None
    owed: tuple[int, int] | None = None
    pages: dict[int, list[int]] = field(default_factory=dict)
    is_reported: bool = False
    next_save: int = 0
    is_being_saved: bool = False
    broken_by: DropReason | None = None

    def bypass(self) -> None:
        """Neither offer nor save anything for this request from here on."""
        self.chain = None
        self.queried = None

    def report_first(self, tokens: Sequence[int]) -> None:
        """Take the first report's tokens: the whole prompt."""
        chain, queried, self.queried = self.chain, self.queried, None
        if chain is None:
            return
        try:
            known = as_uint32(tokens)
            if queried is None or known[: len(queried)] != queried:
                # No query, or of other tokens: nothing that was hashed for it is taken over.
                chain = KeyChain(chain.namespace, chain.tokens_per_block)
            chain.extend(known[chain.tokens :])
            self.chain = chain
        except UnkeyableTokens:
            self.bypass()

    def report_more(self, tokens: Sequence[int]) -> None:
        """Take a later report's new tokens."""
        if self.chain is None or not tokens:
            return
        try:
            self.chain.extend(tokens)
        except UnkeyableTokens:
            self.bypass()

    def add_pages(self, layer_groups: Sequence[int], appended: Sequence[Sequence[int]]) -> None:
        """Append page slots; ``appended[layer_group_id]`` are a group's new ones."""
        for layer_group in layer_groups:
            if layer_group < len(appended):
                self.pages.setdefault(layer_group, []).extend(appended[layer_group])

    def start_afresh(self) -> None:
        """A replay: other pages, to be loaded and saved anew."""
        self.pages = {}
        self.owed = None
        self.next_save = 0
        self.is_being_saved = False
        self.is_reported = False
        self.broken_by = None
        if self.chain is not None:
            self.chain = KeyChain(self.chain.namespace, self.chain.tokens_per_block)


class Requests:
    """The requests, bounded.

    Args:
        forgotten: Called with a request that goes, so that its offer's pins are given back.
    """

    def __init__(self, forgotten: Callable[[Request], None]) -> None:
        self._by_id: OrderedDict[int, Request] = OrderedDict()
        self._forgotten = forgotten

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> Request:
        """Keep a request in place of an older one of the same id."""
        self.forget(request.request_id)
        self._by_id[request.request_id] = request
        while len(self._by_id) > MAX_REQUESTS:
            _, oldest = self._by_id.popitem(last=False)
            self._forgotten(oldest)
        return request

    def get(self, request_id: int) -> Request | None:
        """A request that is known, now the one seen last."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._by_id.move_to_end(request_id)
        return request

    def forget(self, request_id: int) -> None:
        """Let a request go; unknown ones are none of ours."""
        request = self._by_id.pop(request_id, None)
        if request is not None:
            self._forgotten(request)

"""What the scheduler knows of each request: its keys, its pages, what it was offered, and how far it is saved."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tracekv.journal.vocabulary import DropReason
from tracekv_fsspec.arena import Slot
from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, UnkeyableTokens, as_uint32, partial_keys
from tracekv_fsspec.tickets import Ticket

#: Cancelled requests are never announced (contract.md section 1.8), so the books are bounded: the request that was
#: seen least recently goes first. It would only lose its saves.
MAX_REQUESTS = 4096
#: Of so many requests that went so it is known that something was promised to them: cancelled ones never come back.
MAX_PROMISED = 65_536


class OtherPrompt(RuntimeError):
    """What a request was hinted to be isn't what it is. To go on would serve wrong KV, so the engine stops."""


@dataclass
class Offer:
    """Tokens ``[first_token, end_token)`` of a request that were promised, and blocks ``[start, end)`` that hold them.

    The blocks' slots are pinned until the loads are over.

    Attributes:
        last_tokens: Tokens of the last block of the ticket; any other block is whole.
        parked: Number of the parked ticket, where the blocks are still on their way and the request is held until they are there.
        is_allocated: Whether the alloc callback came: from then on the runtime may count on it.
        honoured_tokens: What the runtime took, where it said so.
    """

    ticket: Ticket
    start: int
    end: int
    first_token: int
    end_token: int
    last_tokens: int
    parked: int | None = None
    is_allocated: bool = False
    honoured_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Offered tokens."""
        return self.end_token - self.first_token

    def block_of(self, tokens: int, tokens_per_block: int) -> int:
        """The end of the blocks that the first so many of the offered tokens lie in."""
        return min(self.end, -(-(self.first_token + tokens) // tokens_per_block)) if tokens > 0 else self.start

    def tokens_of(self, ordinal: int, tokens_per_block: int) -> int:
        """How many tokens a block's slot holds."""
        return self.last_tokens if ordinal == self.start + len(self.ticket.keys) - 1 else tokens_per_block

    def slot(self, shard: Shard, ordinal: int) -> tuple[Slot, bool]:
        """A block's slot, and whether it was read from the store for this offer."""
        slot = self.ticket.slot(shard, ordinal)
        if slot is None:
            raise LookupError(f"block {ordinal} of layer group {shard.layer_group} was not part of the offer")
        return slot, bool(self.ticket.is_read[shard][ordinal - self.start])


@dataclass
class Request:
    """One request, from its query (or alloc callback) on.

    Attributes:
        cache_salt: As the query saw it; a record that says otherwise is not served.
        chain: None where the request bypasses the store.
        queried: The tokens that were hashed for the query, until the first report has confirmed them.
        is_hinted: They were told when the request was enqueued, and the query compared some of them only.
        pages: By layer group, one page slot per block ordinal.
        owed: An offer that the runtime took but didn't schedule at once, as far as it took it. Its pins are given back.
        tail: Ordinal, key and tokens of the prompt's incomplete last block, until it was considered for saving.
        is_reported: Whether it was in ``new_requests`` already.
        next_save: Ordinal of the first block that was not considered for saving yet.
        is_being_saved: Whether blocks of it were taken for saving in an earlier pass.
        broken_by: Why a block of this chain was dropped; the ones behind it could never be found.
    """

    request_id: int
    cache_salt: str | None
    chain: KeyChain | None
    queried: array[int] | None = None
    is_hinted: bool = False
    offer: Offer | None = None
    owed: Offer | None = None
    tail: tuple[int, bytes, int] | None = None
    pages: dict[int, list[int]] = field(default_factory=dict)
    is_reported: bool = False
    next_save: int = 0
    is_being_saved: bool = False
    broken_by: DropReason | None = None

    def bypass(self) -> None:
        """Neither offer nor save anything for this request from here on."""
        self.chain = None
        self.queried = None
        self.tail = None

    def report_first(self, tokens: Sequence[int], *, with_tail: bool) -> None:
        """Take the first report's tokens: the whole prompt.

        Args:
            with_tail: The incomplete last block is going to be saved.
        """
        chain, queried, self.queried = self.chain, self.queried, None
        if chain is None:
            return
        try:
            known = as_uint32(tokens)
            if queried is None or known[: len(queried)] != queried:
                if self.is_hinted and (self.offer or self.owed):
                    raise OtherPrompt(
                        f"tracekv: request {self.request_id} was enqueued with one prompt and is run with another, and blocks of the "
                        "first are promised to it. Going on would serve wrong KV. Unset TRACEKV_ENQUEUE_HOOK: this runtime's "
                        "request ids don't hold from enqueue to query."
                    )
                # No query, or of other tokens: nothing that was hashed for it is taken over.
                chain = KeyChain(chain.namespace, chain.tokens_per_block)
            chain.extend(known[chain.tokens :])
            self.chain = chain
            if with_tail and chain.tail:
                ordinal = len(chain.keys)
                key = partial_keys(chain.link_before(ordinal), chain.tail)[-1]
                self.tail = (ordinal, key, len(chain.tail))
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
        self.tail = None
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
        #: Ordered by when they went; a dictionary as an ordered set.
        self._promised: dict[int, None] = {}
        self._forgotten = forgotten

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> Request:
        """Keep a request in place of an older one of the same id."""
        self.forget(request.request_id)
        self._by_id[request.request_id] = request
        self._promised.pop(request.request_id, None)
        while len(self._by_id) > MAX_REQUESTS:
            _, oldest = self._by_id.popitem(last=False)
            if oldest.owed is not None or (oldest.offer is not None and oldest.offer.parked is not None):
                self._promised[oldest.request_id] = None
                if len(self._promised) > MAX_PROMISED:
                    del self._promised[next(iter(self._promised))]
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
        self._promised.pop(request_id, None)
        if request is not None:
            self._forgotten(request)

    def was_promised(self, request_id: int) -> bool:
        """Whether a request went for want of room while something was promised to it: it must not be run as if nothing had been."""
        return request_id in self._promised

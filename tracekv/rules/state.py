"""What the rules share: requests, their pages, passes, ranks and caches, as far as the records tell. All of it is bounded."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    FinishCall,
    GroupFacts,
    LayerHooks,
    Lookup,
    QueryCall,
    Record,
    RegisterCall,
    StoreOperation,
    Transfer,
)
from tracekv.rules.room import Room

K = TypeVar("K")
V = TypeVar("V")

#: More tokens than a request has.
MOST_TOKENS = 1 << 62
#: Requests that are remembered; an engine runs a few hundred at a time.
MOST_REQUESTS = 8192
#: Ids that were returned, keys, objects.
MOST_IDS = 8192
#: Lists of moved pages that are kept as they came.
_MOST_LISTS = 16
#: Lookups that one layer group brought to nothing, the last of them.
MOST_BOUNDED = 1024
#: Transfers of one request that are remembered one by one.
MOST_TRANSFERS = 256


_set = dict.__setitem__


class Recent(dict[K, V]):
    """A dictionary that forgets its oldest entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        _set(self, key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


#: ``(rank, layer group) -> lists of page slots``.
Moved = dict[tuple[int, int], list[Collection[int]]]


class Request:
    """A request of a run.

    Attributes:
        is_whole: Everything since its query was seen; else nothing is concluded from what is absent.
        computed: Prompt tokens that the device supplied, at the query.
        pages: Page slots by layer group and block ordinal, as reported; :meth:`own` has them as a set.
        lost_pages: Some of them were given to another request.
        queries: Queries since the last allocation. ``replaces``: what the same id was before, if it had pages then.
        chunks: Prefill passes ``(step, begin, end)``.
        loaded, saved: ``(rank, layer group) -> lists of page slots``, of successful transfers only; ``transfers`` the last of
            these, with the process that told them.
        loading_ns, moved_ns: When the last of the loads began, and when the last transfer ended.
        saves_later_chunks: A transfer saved whole blocks that aren't of the prompt's first chunk.
        held: Tokens that its reported pages hold, None where that isn't known; ``full_at`` the pass built in which it may need more.
        shared: Blocks at the front that the device supplied: others may hold their pages too.
        sound: By layer group, ordinals ``[0, n)`` whose pages are different ones of the pool.
        left_ns: When its pages were the runtime's again, 0 while they are its own.
        is_parked: An asynchronous load was promised and isn't reported done.
    """

    __slots__ = (
        "alloc",
        "chunks",
        "computed",
        "counted",
        "finish",
        "finishes",
        "first_build",
        "full_at",
        "held",
        "honoured",
        "is_async",
        "is_parked",
        "is_whole",
        "left_ns",
        "loaded",
        "loading_ns",
        "lookup",
        "lost_pages",
        "moved_ns",
        "offered",
        "pages",
        "parked_ns",
        "prompt",
        "queries",
        "query",
        "replaces",
        "request_id",
        "returned_ns",
        "saved",
        "saves_later_chunks",
        "seen_ns",
        "shared",
        "slots",
        "sound",
        "transfers",
    )  # fmt: skip

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.is_whole = False
        self.queries = 1
        self.replaces: Request | None = None
        self.query: QueryCall | None = None
        self.lookup: Lookup | None = None
        self.alloc: AllocCall | None = None
        self.finish: FinishCall | None = None
        self.finishes = 0
        self.first_build: BuildCall | None = None
        self.computed = 0
        self.offered = 0
        self.honoured: int | None = None
        self.is_async = False
        self.is_parked = False
        self.parked_ns = 0
        self.prompt: int | None = None
        self.pages: list[list[int]] = []
        self.slots: list[set[int]] = []
        self.counted: list[int] = []
        self.lost_pages = False
        self.held: int | None = None
        self.full_at = 0
        self.shared = 0
        self.sound: dict[int, int] = {}
        self.chunks: list[tuple[int, int, int]] = []
        self.loaded: Moved = {}
        self.saved: Moved = {}
        self.transfers: deque[tuple[Source, Transfer]] = deque(maxlen=MOST_TRANSFERS)
        self.loading_ns = 0
        self.moved_ns = 0
        self.saves_later_chunks = False
        self.left_ns = 0
        self.returned_ns = 0
        self.seen_ns = 0

    def start_lists(self, lists: Sequence[Sequence[int]], *, are_own: bool) -> None:
        """Begin its lists anew; with ``are_own`` False nothing is its own before more of them comes."""
        for group in range(len(self.slots)):
            self.own(group)
        self.pages = [[*slots] for slots in lists]
        self.counted = [0 if are_own else len(slots) for slots in lists]

    def widen(self, groups: int) -> None:
        """Have lists, and own pages, in so many layer groups."""
        while len(self.pages) < groups:
            self.pages.append([])
            self.counted.append(0)
        while len(self.slots) < groups:
            self.slots.append(set())

    def own(self, group: int) -> set[int] | None:
        """The page slots of a layer group that are its own: put together when they are asked for. None before there are any."""
        if not 0 <= group < len(self.slots):
            return None
        slots = self.slots[group]
        if group < len(self.pages) and self.counted[group] < len(self.pages[group]):
            slots.update(self.pages[group][self.counted[group] :])
            self.counted[group] = len(self.pages[group])
        return slots

    @staticmethod
    def note(moved: Moved, where: tuple[int, int], pages: Collection[int]) -> None:
        """Add pages to :attr:`loaded` or :attr:`saved`."""
        lists = moved.get(where)
        if lists is None:
            moved[where] = [pages]
        elif len(lists) < _MOST_LISTS:
            lists.append(pages)
        else:
            moved[where] = [{*pages}.union(*lists)]

    def trim(self) -> None:
        """Forget what only its own settling needed; its pages stay, for transfers that come too late."""
        self.transfers.clear()
        self.loaded.clear()
        self.saved.clear()
        self.chunks.clear()


class Keyed(NamedTuple):
    """Whose KV a key stands for: that of the last whole block of a query's prompt."""

    run: bytes
    salt: bytes | None
    image: bytes | None
    adapter: int | None
    layout: tuple[Any, ...] | None
    block: int
    record: QueryCall
    lookup: Lookup


#: Who holds a page, since when. A tuple: there is one for every page that a request gets while it decodes.
Hold = tuple[Request, int]


class Ended(NamedTuple):
    """A forward that has ended on a rank: when its first layer had been waited for, and each layer's wait, as recorded."""

    record: Call
    needed_ns: int
    waits: bytes = b""

    def needed_by(self, group: GroupFacts) -> int:
        """When a layer group's pages had to be whole: its first layer's own wait is the last chance to load them."""
        for layer in sorted(group.layer_ids):
            if left_ns := int.from_bytes(self.waits[16 * layer + 8 : 16 * layer + 16], "little"):
                return left_ns
        return self.record.started_ns


class Source:
    """One process's journal.

    Attributes:
        rank, world: None while unknown.
        saving, loading: Ids given to ``get_finished`` and not returned: ``id -> (time, record)``.
        returned: Ids that were returned: ``(kind, id) -> record``.
        now_ns: The latest time in a record.
        shift_ns: What makes this process's times comparable with its leader's.
        trusts_ids_from: From when on an unknown id is one that was never given.
        is_bound: Metadata was bound since the last ``start_load_kv``; None while that isn't known.
        is_blind: Calls are only counted.
        saw_start, saw_worker: Everything since the process's, or the worker's, beginning was seen.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank: int | None = None
        self.world: int | None = None
        self.run: Run | None = None
        self.boot_id = ""
        self.wall_offset_ns = 0
        self.shift_ns = 0
        self.now_ns = 0
        self.has_scheduler = False
        self.worker_class = ""
        self.register: RegisterCall | None = None
        self.is_blind = False
        self.trusts_ids_from = 0
        self.saw_start = False
        self.saw_worker = False
        self.forget()

    def forget(self) -> None:
        """What a gap, or another worker, makes uncertain."""
        self.saving: dict[int, tuple[int, Record]] = {}
        self.loading: dict[int, tuple[int, Record]] = {}
        self.returned: Recent[tuple[str, int], Record] = Recent(MOST_IDS)
        self.is_bound: bool | None = None
        self.start: Call | None = None
        self.hooks: LayerHooks | None = None
        self.ended: Recent[int, Ended] = Recent(64)
        self.operations: deque[StoreOperation] = deque(maxlen=64)


class Run:
    """One engine: its leader and its other ranks.

    Attributes:
        groups: Registered layer groups by id; ``block`` tokens per block, 0 while it isn't told.
        claims: ``layer group -> page slot -> who holds it``; a page that the device shares is its first owner's.
        room: In which pass a request may reach past its pages.
        ticked_ns: When time was told last, on the leader's clock; ``ticks_ns`` from when on it is told again.
        builds: Passes built that were seen.
        is_known_from: Passes built when everything that belongs together was first seen whole.
        reports: Whether its worker's class reports transfers.
        is_watched, has_watch_gaps: Whether copies are observed, and whether some may go unseen.
        waiting: Parked requests by id.
        bounded: The last lookups, none of which came to an offer although some layer group has more than the device.
        due: ``(at builds, event, request)``.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.sources: list[Source] = []
        self.leader: Source | None = None
        self.groups: dict[int, GroupFacts] = {}
        self.block = 0
        self.layers: frozenset[int] = frozenset()
        self.layout: tuple[Any, ...] | None = None
        self.world: int | None = None
        self.ticked_ns = self.ticks_ns = 0
        self.builds = 0
        self.is_known_from = 0
        self.reports = False
        self.is_watched = False
        self.has_watch_gaps = False
        self.saved_bytes = 0
        self.hooked_prefills = 0
        self.hooked_loads = 0
        self.prefill_ns_per_token = 0.0
        self.dropped: Recent[int, bool] = Recent(MOST_IDS)
        self.bounded: deque[Lookup] = deque(maxlen=MOST_BOUNDED)
        self.forget()

    def forget(self) -> None:
        """What a gap makes uncertain: every request. The caches, ranks and classes stay known."""
        self.requests: dict[int, Request] = {}
        self.claims: defaultdict[int, dict[int, Hold]] = defaultdict(dict)
        self.room = Room()
        self.lookups: Recent[int, Lookup] = Recent(256)
        self.last_build: BuildCall | None = None
        self.last_step = 0
        self.due: deque[tuple[int, str, Request]] = deque()
        self.bound: Recent[int, list[tuple[Source, BindCall]]] = Recent(64)
        self.content: Recent[int, BuildCall] = Recent(64)
        self.completions: Recent[tuple[str, int], dict[int, tuple[int, Record]]] = Recent(MOST_IDS)
        self.waiting: dict[int, Request] = {}
        self.prefilling: dict[int, Request] = {}
        self.asked_again: dict[int, Request] = {}
        self.prefilled: Recent[int, tuple[int, int]] = Recent(64)

    @property
    def tells_moves(self) -> bool:
        """Whether everything that moves is told: only then does an absent transfer say something."""
        return self.reports or (self.is_watched and not self.has_watch_gaps)

    @property
    def is_known(self) -> bool:
        """Whether a pass has gone by since the beginning, or since the last gap."""
        return self.builds >= self.is_known_from

    def remember(self, request: Request) -> None:
        """Keep a request under its id; the oldest go."""
        if request.request_id in self.requests:
            self.drop(request.request_id)
        self.requests[request.request_id] = request
        while len(self.requests) > MOST_REQUESTS:
            self.drop(next(iter(self.requests)))

    def request(self, request_id: int) -> Request:
        """The request's state; a new one is not whole."""
        found = self.requests.get(request_id)
        if found is None:
            found = Request(request_id)
            self.remember(found)
        return found

    def drop(self, request_id: int) -> None:
        """Forget a request."""
        self.requests.pop(request_id, None)
        self.room.forget(request_id)
        self.waiting.pop(request_id, None)
        self.prefilling.pop(request_id, None)
        self.asked_again.pop(request_id, None)

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block)

"""Records written by hand: what a journal would hold of runs that can't be had here (several ranks, an odd runtime)."""

from __future__ import annotations

from collections.abc import Sequence

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    ConnectorWrapped,
    FinishCall,
    FinishedCall,
    GroupFacts,
    IdlePolls,
    LayerHooks,
    Lookup,
    ProcessStarted,
    QueryCall,
    Record,
    RegionFacts,
    RegisterCall,
    RunJoined,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome, Side, Source, Tier

BLOCK = 32
PAGE_BYTES = 4096
_MS = 1_000_000
_Head = tuple[int, int, int, int, str | None]


class Tape:
    """The journals of one run's ranks, with a clock of its own. Rank 0 leads.

    Attributes:
        records: ``(source, record)`` in the order in which they were made; a source is ``"rank0"`` and so on.
        now: Monotonic nanoseconds; every callback takes 10 us.
        step: The pass.
    """

    def __init__(
        self, *, ranks: int = 1, groups: int = 1, tokens_per_block: int = BLOCK, slots: int = 64, layers: int = 1
    ) -> None:
        self.records: list[tuple[str, Record]] = []
        self.now = 1_000 * _MS
        self.step = 0
        self._ranks = ranks
        self._groups = groups
        run = bytes(range(16))
        region = RegionFacts(PAGE_BYTES, PAGE_BYTES, slots)
        facts = [
            GroupFacts(g, None, list(range(g * layers, (g + 1) * layers)), slots, PAGE_BYTES, [region])
            for g in range(groups)
        ]
        for rank in range(ranks):
            self.add(ProcessStarted(100 + rank, bytes([rank]) * 16, "host", "boot", self.now, self.now, "0"), rank)
            self.add(ConnectorWrapped(Side.WORKER, "corpus.Worker", [], []), rank)
            if rank == 0:
                self.add(ConnectorWrapped(Side.SCHEDULER, "corpus.Scheduler", [], []), rank)
            self.add(RunJoined(run, rank, ranks), rank)
            self.add(
                RegisterCall(*self.call(Callback.REGISTER_KV_CACHE_LAYOUT), tokens_per_block, "uint8", facts), rank
            )

    def add(self, record: Record, rank: int = 0) -> None:
        """Append a record to a rank's journal."""
        self.records.append((f"rank{rank}", record))

    def after(self, ms: float) -> None:
        """Let time pass."""
        self.now += int(ms * _MS)

    def call(self, callback: Callback, *, took_us: int = 10, error: str | None = None) -> _Head:
        """The head of a call's record, made now."""
        started, self.now = self.now, self.now + took_us * 1000
        return int(callback), started, self.now, self.step, error

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def query(
        self, request: int, prompt: int, computed: int = 0, offered: int = 0, *, is_async: bool = False, took_us: int = 10,
        salt: bytes | None = None, lora: int | None = None,
    ) -> None:  # fmt: skip
        """``get_num_new_matched_tokens``."""
        head = self.call(Callback.GET_NUM_NEW_MATCHED_TOKENS, took_us=took_us)
        self.add(QueryCall(*head, request, None, prompt, computed, offered, is_async, None, salt, None, lora))

    def lookup(
        self, request: int, prompt: int, computed: int = 0, offered: int = 0, *, key: bytes | None = None,
        stored: int | None = None, group_tokens: Sequence[int] = (), bounding: int | None = None,
        reason: MissReason | None = None,
    ) -> None:  # fmt: skip
        """A connector's report of its query, which comes before the query's own record."""
        end = computed + offered if stored is None else stored
        groups, now = list(group_tokens), self.now
        self.add(Lookup(request, prompt, computed, end, end, offered, groups, bounding, reason, 0, now, now, key))

    def alloc(
        self, request: int, honoured: int | None, pages: list[list[int]], *, flat: bool = False,
        is_never_asked: bool | None = False,
    ) -> None:  # fmt: skip
        """``update_state_after_alloc_by_layer_group``, or the flat form."""
        form = Callback.UPDATE_STATE_AFTER_ALLOC
        code = form if flat else Callback.UPDATE_STATE_AFTER_ALLOC_BY_LAYER_GROUP
        self.add(AllocCall(*self.call(code), request, honoured, pages, is_never_asked))

    def build(
        self,
        new: Sequence[tuple[int, int, int, int, list[list[int]]]] = (),
        cached: Sequence[tuple[int, int, int, list[list[int]]]] = (),
        *,
        has_metadata: bool = True,
    ) -> None:
        """``build_connector_meta``: new ``(request, computed, scheduled, prompt, pages)``, cached without ``prompt``."""
        self.step += 1
        ids = [entry[0] for entry in new] + [entry[0] for entry in cached]
        computed = [entry[1] for entry in new] + [entry[1] for entry in cached]
        scheduled = [entry[2] for entry in new] + [entry[2] for entry in cached]
        lists = [entry[4] for entry in new] + [entry[3] for entry in cached]
        pages = [(at, entry) for at, entry in enumerate(lists) if any(entry)]
        head = self.call(Callback.BUILD_CONNECTOR_META)
        prompts = [entry[3] for entry in new]
        self.add(BuildCall(*head, len(new), ids, computed, scheduled, prompts, pages, has_metadata))

    def finish(self, request: int, *, keeps: bool = False, pages: list[list[int]] | None = None) -> None:
        """``request_finished_by_layer_group``."""
        head = self.call(Callback.REQUEST_FINISHED_BY_LAYER_GROUP)
        self.add(FinishCall(*head, request, keeps, None, pages or [[]] * self._groups))

    # -- worker -------------------------------------------------------------------------------------------------------

    def bind(self, rank: int = 0, *, digest: bytes = b"same", nbytes: int = 400) -> None:
        """``bind_connector_meta`` with an envelope."""
        self.add(BindCall(*self.call(Callback.BIND_CONNECTOR_META), True, nbytes, digest), rank)

    def worker(self, callback: Callback, rank: int = 0, *, took_us: int = 10, error: str | None = None) -> None:
        """A worker's callback that carries nothing."""
        self.add(Call(*self.call(callback, took_us=took_us, error=error)), rank)

    def forward(self, rank: int = 0) -> None:
        """``bind``, ``start_load_kv``, a millisecond of computing, ``wait_for_save``."""
        self.bind(rank)
        self.worker(Callback.START_LOAD_KV, rank)
        self.after(1)
        self.worker(Callback.WAIT_FOR_SAVE, rank)

    def hooks(self, waits: Sequence[tuple[int, int]], saves: Sequence[tuple[int, int]], rank: int = 0) -> None:
        """The per-layer hooks of a pass."""
        encoded = [
            b"".join(number.to_bytes(8, "little") for pair in pairs for number in pair) for pairs in (waits, saves)
        ]
        self.add(LayerHooks(self.step, encoded[0], encoded[1]), rank)

    def polled(
        self, rank: int = 0, *, saving: Sequence[int] = (), loading: Sequence[int] = (), saved: Sequence[int] = (),
        loaded: Sequence[int] = (), answer: str | None = None,
    ) -> None:  # fmt: skip
        """``get_finished`` with ids in or out."""
        head = self.call(Callback.GET_FINISHED)
        self.add(FinishedCall(*head, list(saving), list(loading), list(saved), list(loaded), answer), rank)

    def idle(self, rank: int = 0, *, ms: float = 1.0, count: int = 10) -> None:
        """Empty polls for a while."""
        started = self.now
        self.after(ms)
        self.add(IdlePolls(self.step, count, count * 1000, 1000, started, self.now), rank)

    def transfer(
        self, direction: Direction, request: int, pages: list[int], *, rank: int = 0, group: int = 0,
        started: int | None = None, ended: int | None = None, nbytes: int | None = None, queued_ns: int = 0,
    ) -> None:  # fmt: skip
        """A connector's report of what it moved."""
        begin = self.now if started is None else started
        size = PAGE_BYTES * len(pages) if nbytes is None else nbytes
        end = begin if ended is None else ended
        tokens = BLOCK * len(pages)
        self.add(
            Transfer(
                direction, Source.REPORTED, Tier.HOST, request, self.step, group, pages, size, tokens, begin, end,
                queued_ns, 0, 0, 0, 0, None,
            ),
            rank,
        )  # fmt: skip

    def stored(self, key: bytes, *, rank: int = 0, group: int | None = 0, operation: Operation = Operation.PUT) -> None:
        """A connector's report of a store operation."""
        self.add(
            StoreOperation(
                operation, Outcome.OK, "local", None, key, None, group, rank, 1, PAGE_BYTES, 1, self.now, self.now, 0, 0, 0,
                "closed", None,
            ),
            rank,
        )  # fmt: skip

    # -- whole passes ---------------------------------------------------------------------------------------------------

    def prefill(self, request: int, prompt: int, pages: list[list[int]], *, offered: int = 0) -> None:
        """Query, alloc and the pass of an unchunked prompt; what is offered is honoured and loaded by rank 0."""
        self.query(request, prompt, 0, offered)
        self.alloc(request, offered, pages)
        self.build([(request, 0, prompt - offered, prompt, pages)])
        for rank in range(self._ranks):
            self.bind(rank)
            if offered and rank == 0:
                for group, slots in enumerate(pages):
                    self.transfer(Direction.LOAD, request, slots[: offered // BLOCK], group=group)
            self.worker(Callback.START_LOAD_KV, rank)
            self.after(1)
            self.worker(Callback.WAIT_FOR_SAVE, rank)

    def decode(self, request: int, position: int, pages: list[list[int]] | None = None) -> None:
        """A generation step."""
        self.build(cached=[(request, position, 1, pages or [[]])])
        for rank in range(self._ranks):
            self.forward(rank)

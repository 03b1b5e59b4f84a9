"""Records of a small run, written by hand: one request that is queried, loaded, computed, saved and finished in step 1."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CallbackSource,
    ConnectorWrapped,
    Drop,
    FinishCall,
    FinishedCall,
    ForwardCallableCall,
    GroupFacts,
    IdlePolls,
    LayerHooks,
    Lookup,
    ProcessStarted,
    QueryCall,
    Record,
    RegisterCall,
    RunJoined,
    StoreOperation,
    Transfer,
)
from tracekv.journal.vocabulary import (
    Callback,
    Direction,
    DropReason,
    MissReason,
    Operation,
    Outcome,
    Side,
    Source,
    Tier,
)
from tracekv.views.model import Span
from tracekv.views.spans import SpanView

RUN = b"run-run-run-run-"
PROCESS = b"process-process-"
#: Unix time of monotonic 0.
EPOCH = 1_800_000_000_000_000_000
REQUEST = 7


def started(process_id: bytes = PROCESS, epoch: int = EPOCH) -> ProcessStarted:
    return ProcessStarted(4711, process_id, "node-1", "boot", 0, epoch, "0.1.0")


def wrapped(side: Side, not_implemented: Sequence[str] = ()) -> ConnectorWrapped:
    name = "pkg.mod.Leader" if side is Side.SCHEDULER else "pkg.mod.Worker"
    return ConnectorWrapped(side, name, [CallbackSource("__init__", "/src/mod.py", 10)], list(not_implemented))


def joined(rank: int = 0, world: int = 1, run_id: bytes = RUN) -> RunJoined:
    return RunJoined(run_id, rank, world)


def registered() -> RegisterCall:
    """Group 0: layers 0 and 1, full attention, 100 bytes a page; group 1: layers 2 and 3, window 64, 40 bytes a page."""
    groups = [GroupFacts(0, None, [0, 1], 50, 100, []), GroupFacts(1, 64, [2, 3], 60, 40, [])]
    return RegisterCall(
        Callback.REGISTER_KV_CACHE_LAYOUT, 100, 200, 0, None, tokens_per_block=32, dtype="torch.bfloat16", groups=groups
    )


def call(callback: Callback, start: int, end: int, step: int = 1, error: str | None = None) -> Call:
    return Call(callback, start, end, step, error)


def queried(start: int = 1000, end: int = 1100, request_id: int = REQUEST, **facts: object) -> QueryCall:
    told = {
        "client_id": 70, "prompt_tokens": 1024, "computed_tokens": 64, "offered_tokens": 512, "is_async": False,
        "answer": None, "salt_digest": None, "multimodal_digest": None, "lora_id": None,
    } | facts  # fmt: skip
    return QueryCall(Callback.GET_NUM_NEW_MATCHED_TOKENS, start, end, 0, None, request_id, **told)


def looked_up(start: int = 1010, end: int = 1090, request_id: int = REQUEST, **facts: object) -> Lookup:
    told = {
        "prompt_tokens": 1024, "computed_tokens": 64, "stored_tokens": 960, "staged_tokens": 512, "offered_tokens": 512,
        "group_tokens": [960, 1024], "bounding_layer_group": 0, "reason": MissReason.NOT_STAGED, "waited_ns": 20,
    } | facts  # fmt: skip
    return Lookup(request_id, **told, started_ns=start, ended_ns=end, key=b"\xab\xcd")


def allocated(start: int = 1200, end: int = 1230, request_id: int = REQUEST, honoured: int | None = 480) -> AllocCall:
    pages = [[3, 4, 5], [-1, 8, 9]]
    return AllocCall(Callback.UPDATE_STATE_AFTER_ALLOC_BY_LAYER_GROUP, start, end, 0, None, request_id, honoured, pages)


def built(
    step: int = 1, start: int = 1300, end: int = 1350, request_ids: Sequence[int] = (REQUEST,), new: int = 1
) -> BuildCall:
    ids = list(request_ids)
    return BuildCall(
        Callback.BUILD_CONNECTOR_META, start, end, step, None,
        new_requests=new, request_ids=ids, computed_positions=[64] * len(ids), scheduled_tokens=[480] * len(ids),
        prompt_tokens=[1024] * new, pages=[(0, [[3, 4, 5], [-1, 8, 9]])], has_metadata=True,
    )  # fmt: skip


def bound(step: int = 1, start: int = 1400, end: int = 1410, *, has_envelope: bool = True) -> BindCall:
    return BindCall(Callback.BIND_CONNECTOR_META, start, end, step, None, has_envelope, 99, b"\x01\x02")


def transferred(
    direction: Direction, group: int, pages: list[int], nbytes: int, start: int, end: int, **facts: object
) -> Transfer:
    told = {
        "source": Source.REPORTED, "tier": Tier.HOST, "request_id": REQUEST, "step": 1, "tokens": 96, "queued_ns": 1,
        "read_ns": 2, "verify_ns": 3, "copy_ns": 4, "stall_ns": 5, "error": None,
    } | facts  # fmt: skip
    return Transfer(direction, layer_group=group, pages=pages, nbytes=nbytes, started_ns=start, ended_ns=end, **told)


def hooks(
    step: int = 1,
    waits: Sequence[tuple[int, int]] = ((1600, 1610), (1700, 1730), (1800, 1805), (1900, 1920)),
    saves: Sequence[tuple[int, int]] = ((1650, 1651), (1750, 1752), (1850, 1853), (1950, 1954)),
) -> LayerHooks:
    return LayerHooks(step, _pairs(waits), _pairs(saves))


def _pairs(times: Iterable[tuple[int, int]]) -> bytes:
    return array("q", [moment for pair in times for moment in pair]).tobytes()


def finished(start: int = 2200, end: int = 2250, request_id: int = REQUEST, *, keeps_pages: bool = False) -> FinishCall:
    pages = [[3, 4, 5], [-1, -1, 9]]
    return FinishCall(
        Callback.REQUEST_FINISHED_BY_LAYER_GROUP, start, end, 1, None, request_id, keeps_pages, None, pages
    )


def polled(start: int, end: int, step: int = 1, **ids: list[int]) -> FinishedCall:
    told = {
        "saving_given": [],
        "loading_given": [],
        "saving_returned": [],
        "loading_returned": [],
        "answer": None,
    } | ids
    return FinishedCall(Callback.GET_FINISHED, start, end, step, None, **told)


def idle(step: int = 1, count: int = 1, first: int = 2300, last: int = 2310, longest: int = 10) -> IdlePolls:
    return IdlePolls(step, count, count * longest if count == 1 else count * longest - 5, longest, first, last)


def stored(start: int = 2050, end: int = 2060, **facts: object) -> StoreOperation:
    told = {
        "operation": Operation.PUT, "outcome": Outcome.OK, "engine": "s3", "bucket": "kv", "key": b"\xee",
        "request_id": REQUEST, "layer_group": 1, "rank": 0, "blocks": 2, "nbytes": 80, "attempts": 2, "queued_ns": 6,
        "transfer_ns": 3, "verify_ns": 1, "breaker": "closed", "error": None,
    } | facts  # fmt: skip
    return StoreOperation(**told, started_ns=start, ended_ns=end)


def dropped(at: int = 2070, request_id: int | None = REQUEST) -> Drop:
    return Drop(at, Direction.SAVE, DropReason.QUEUE_FULL, request_id, 0, 3, 300)


def bring_up() -> list[Record]:
    return [
        started(),
        wrapped(Side.SCHEDULER),
        call(Callback.SCHEDULER_INIT, 10, 20, 0),
        wrapped(Side.WORKER, ["get_finished"]),
        call(Callback.WORKER_INIT, 15, 40, 0),
        ForwardCallableCall(Callback.REGISTER_FORWARD_PASS_CALLABLE, 50, 60, 0, None, has_callable=True),
        registered(),
        call(Callback.WAIT_FOR_INITIALIZATION, 300, 310, 0),
        joined(),
    ]


def the_run() -> list[Record]:
    """Everything, in the order in which it is written."""
    return [
        *bring_up(),
        looked_up(),
        queried(),
        allocated(),
        built(),
        bound(),
        transferred(Direction.LOAD, 0, [3, 4], 200, 1500, 1540),
        transferred(Direction.LOAD, 1, [-1, 8], 40, 1540, 1560, tier=Tier.OBJECT),
        call(Callback.START_LOAD_KV, 1490, 1570),
        hooks(),
        call(Callback.FORWARD_PASS_CALLABLE, 1990, 1995),
        transferred(Direction.SAVE, 0, [5], 100, 2010, 2020, tokens=32),
        call(Callback.WAIT_FOR_SAVE, 2000, 2040),
        stored(),
        dropped(),
        finished(),
        idle(),
        call(Callback.WORKER_SHUTDOWN, 5000, 5100),
    ]


def spans_of(records: Iterable[Record], view: SpanView | None = None, *, is_closed: bool = True) -> list[Span]:
    view = view or SpanView(detail="full")
    spans = [span for record in records for span in view.feed(record)]
    return spans + view.close() if is_closed else spans


def named(spans: Iterable[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def only(spans: Iterable[Span], name: str) -> Span:
    (span,) = named(spans, name)
    return span

"""One request explained: the facts of its story on every rank, and where its time went. A plain struct, for a screen or as JSON."""

from __future__ import annotations

import msgspec

from tracekv.journal.records import Call, FinishedCall, IdlePolls, Record
from tracekv.journal.vocabulary import Callback, Direction, Operation, Source
from tracekv.views import ids, timing
from tracekv.views.runs import Run, Segment, clock_of
from tracekv.views.sampling import Callers
from tracekv.views.spent import SLACK, Spent, ended_ns
from tracekv.views.story import Moved, Stored, Story


class RankStory(msgspec.Struct):
    """A request on one rank.

    Attributes:
        loaded_ns, saved_ns: When ``get_finished`` named it, on the leader's clock; None where it didn't.
    """

    rank: int | None
    host: str
    pid: int
    story: Story
    loaded_ns: int | None = None
    saved_ns: int | None = None


class Broken(msgspec.Struct):
    """A rule that was broken, as the screen shows it.

    Attributes:
        about: ``request``, or ``pass`` and ``engine`` where it isn't one request's.
        caused_by: Rule of the finding that it follows from.
    """

    rule: str
    severity: str
    by: str
    what: str
    fix: str
    about: str
    callback: str = ""
    rank: int | None = None
    step: int = 0
    numbers: str = ""
    caused_by: str | None = None


class Explanation(msgspec.Struct):
    """Everything that the records say of one request. Times are nanoseconds of the leader's monotonic clock, or durations.

    Attributes:
        request, run: How they are named; ``run_key`` is what their ids are made of.
        ranks: The leader's first.
        parts: Of ``whole_ns``, by name (module docstring); they add up to it.
        load_ns: How long its KV was on the way to the device, on whichever rank; ``load_hidden_ns`` of it behind computing.
        inside: What its engine was inside of when the journal ended: a callback, for an unfinished request.
        is_running: The engine may write more.
        now_ns: The last moment that is known of the leader.
        holding: Ranks that haven't given kept pages back; empty where none are kept, or all have.
    """

    request: str
    request_id: int
    run: str
    ranks: list[RankStory]
    started_unix_ns: int
    whole_ns: int
    parts: dict[str, int]
    load_ns: int
    load_hidden_ns: int
    trace_id: str
    now_ns: int
    is_running: bool = False
    inside: str | None = None
    holding: list[int | None] = []
    windows: dict[int, int] = {}
    tokens_per_block: int = 0
    broken: list[Broken] = []
    records: int = 0
    records_lost: int = 0
    notes: list[str] = []

    @property
    def story(self) -> Story:
        """The leader's."""
        return self.ranks[0].story

    @property
    def is_finished(self) -> bool:
        """The end was announced, and every rank has given back what was kept."""
        return self.story.finished_ns is not None and not self.holding

    @property
    def held_ns(self) -> int | None:
        """How long pages were kept, until the last rank gave them back; None while they are, or where none were."""
        since, ends = self.story.held_since_ns, [each.saved_ns for each in self.ranks if each.saved_ns is not None]
        return None if since is None or self.holding or not ends else max(0, max(ends) - since)

    def tokens(self, direction: Direction) -> int:
        """Tokens that moved: the most of any rank, since each moves its part of the same."""
        return max((each.story.tokens(direction) for each in self.ranks), default=0)

    def estimated_tokens(self, direction: Direction) -> int | None:
        """What the pages that moved hold at the most, where a connector reports its transfers without their tokens; else None."""
        if self.tokens(direction) or not self.tokens_per_block:
            return None
        pages = [each.story.pages(direction, group) for each in self.ranks for group in each.story.layer_groups()]
        return max(pages, default=0) * self.tokens_per_block or None

    def nbytes(self, direction: Direction) -> int:
        """Bytes that moved, on all ranks."""
        return sum(each.story.nbytes(direction) for each in self.ranks)

    def moved(self) -> list[tuple[int | None, Moved]]:
        """What moved, with the rank, loads first."""
        found = [
            (each.rank, moved)
            for each in self.ranks
            for moved in each.story.moved
            if moved.source is not Source.PLANNED
        ]
        return sorted(found, key=lambda each: (each[1].direction is Direction.SAVE, each[1].layer_group, each[0] or 0))

    def stored(self) -> dict[Operation, Stored]:
        """What the store was asked for it by all ranks' processes; kinds of which there is any."""
        found = {Operation.READ: Stored(), Operation.PUT: Stored()}
        for each in self.ranks:
            found[Operation.READ].merge(each.story.store_reads)
            found[Operation.PUT].merge(each.story.store_puts)
        return {operation: stored for operation, stored in found.items() if stored.operations}

    def last_rank(self, direction: Direction) -> tuple[int | None, int] | None:
        """Which rank named the request last in ``get_finished``, and how long after the first; None with fewer than two."""
        times = [
            (at, each.rank)
            for each in self.ranks
            if (at := each.loaded_ns if direction is Direction.LOAD else each.saved_ns) is not None
        ]
        return (max(times)[1], max(times)[0] - min(times)[0]) if len(times) > 1 else None


def explain(run: Run, request_id: int, *, hashed: bool = False) -> Explanation | None:
    """What a run's records say of a request; None where none names it."""
    leader = run.leader
    spent = Spent()
    callers = Callers()
    ranks: list[RankStory] = []
    records = 0
    for segment in run.segments:
        found = [record for _, record in segment.of_request(request_id)]
        records += len(found)
        if not found and segment is not leader:
            continue
        clock = clock_of(segment, leader)
        first = min((_began(record) for record in found), default=0)
        story = Story(request_id, first, first)
        for record in found:
            story.feed(record)
            if getattr(record, "traceparent", None):
                callers.learn(run.key, record)  # type: ignore[arg-type]  # only Enqueued has one
        facts = segment.process.facts
        rank = RankStory(segment.facts.rank, facts.host, facts.pid, story)
        rank.loaded_ns = None if story.loaded_at_ns is None else clock(story.loaded_at_ns)
        rank.saved_ns = None if story.saved_at_ns is None else clock(story.saved_at_ns)
        ranks.append(rank)
        spent.take(found, clock)
    if not records:
        return None
    told = [rank for rank in ranks if rank.story.last_ns]
    if not ranks[0].story.last_ns:  # the leader knows nothing of it: a lost beginning, or an id out of the blue
        ranks = told or ranks
    story = ranks[0].story
    for segment in run.segments:
        spent.take_passes(segment, clock_of(segment, leader), story)
    begin, end = spent.whole(story)
    parts = spent.parts(begin, end, story)
    moving = spent.moving(Direction.LOAD)
    derived = ids.trace_id(run.key, "request", request_id)
    caller = callers.of(run.key, request_id)
    result = Explanation(
        run.request_label(request_id, hashed=hashed), request_id, run.label, ranks, begin + leader.offset_ns, max(0, end - begin),
        parts, timing.length(timing.merged(moving)), timing.length(timing.overlap(moving, spent.computing())),
        (derived if caller is None else caller.trace_id).hex(), _now(leader, end),
    )  # fmt: skip
    result.is_running = any(segment.is_latest and segment.process.is_alive() for segment in run.segments)
    if story.held_since_ns is not None:
        result.holding = [each.facts.rank for each in run.segments if _holds(each, request_id)]
    result.records = records
    result.records_lost = sum(segment.process.lost for segment in run.segments)
    result.windows = {group: each.window_size or 0 for group, each in leader.facts.groups.items()}
    result.tokens_per_block = leader.facts.tokens_per_block
    if parts["untold"]:
        result.notes.append(
            "tracing took more than TRACEKV_BUDGET_PCT of the engine thread meanwhile: calls were only counted"
        )
    if not result.is_finished:
        result.inside = next((inside for segment in run.segments if (inside := _inside(segment))), None)
    return result


def _holds(segment: Segment, request_id: int) -> bool:
    """Whether a rank has yet to give a request's pages back; not where the record that tells may be lost."""
    found = [record for _, record in segment.of_request(request_id) if isinstance(record, FinishedCall)]
    is_back = any(request_id in record.saving_returned for record in found)
    return segment.facts.has_worker and not is_back and (bool(found) or not segment.process.lost)


def _began(record: Record) -> int:
    return int(getattr(record, "started_ns", 0) or getattr(record, "at_ns", 0))


def _now(leader: Segment, end: int) -> int:
    """The last moment of the leader that is known; of a live one that is an idle one, some seconds may have gone by since."""
    last = [ended_ns(record) for record in leader.select(Call, IdlePolls, first=leader.last - SLACK)]
    return max([end, leader.process.anchors()[-1].monotonic_ns, *last])


def _inside(segment: Segment) -> str | None:
    """The callback that a process was in when it was looked at, if this run is its last."""
    state = segment.process.state()
    if not state.callback or not segment.is_latest:
        return None
    try:
        callback = Callback(state.callback)
    except ValueError:
        return None
    layers = [hook.layer for hook in (*state.waits, *state.saves) if not hook.ended_ns]
    layer = f" of layer {layers[0]}" if layers else ""
    rank = "" if segment.facts.rank is None else f" on rank {segment.facts.rank}"
    return f"{callback.side.value}.{callback.method}{layer}{rank}"

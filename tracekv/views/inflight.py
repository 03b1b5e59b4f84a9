"""What a process was in the middle of: open requests and what they wait for, loads and saves that had begun and not ended.

Derived from what callbacks were handed (``eligible``), less what the connector reported as moved: what a dead process leaves, and
what a live one is doing now. A leader's records name requests and pages; the other ranks of its run move their shards of the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    Enqueued,
    FinishCall,
    FinishedCall,
    QueryCall,
    Record,
    RequestResetCall,
    Transfer,
)
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.views.facts import Facts

#: Requests kept; beyond it the oldest goes.
_MAX_REQUESTS = 4096
#: Passes without a running request after which it counts as gone: cancelled requests are never announced.
_GONE_AFTER = 16

WAITS_FOR_QUERY = "first query"
WAITS_FOR_PAGES = "pages"
WAITS_FOR_PASS = "a pass"  # noqa: S105  # a forward pass
WAITS_FOR_LOAD = "its load (get_finished)"
WAITS_FOR_SAVE = "its save (get_finished)"
IN_PASS = "pass in progress"  # noqa: S105
BETWEEN_PASSES = "next pass"


class OpenRequest(msgspec.Struct):
    """A request that the engine isn't done with. Times are monotonic nanoseconds.

    Attributes:
        waits_for: What has to happen next.
        since_ns: Since when it waits for that.
        pages: Pages that hold KV, by layer group.
        step: The pass that it was in last; 0 before the first.
        is_held: It has finished, and its pages are kept for a save.
    """

    request_id: int
    waits_for: str
    since_ns: int
    prompt_tokens: int | None = None
    computed_tokens: int = 0
    offered_tokens: int = 0
    honoured_tokens: int | None = None
    is_async: bool = False
    pages: list[list[int]] = []
    step: int = 0
    is_held: bool = False


class InFlightMove(msgspec.Struct, frozen=True):
    """KV that was to be moved and isn't told as moved.

    Attributes:
        pages: Page slots still to move; ``nbytes`` is None where the layout doesn't tell a page's size.
        since_ns: When it could begin.
        step: The pass that it belongs to, 0 where it goes on beside the passes.
    """

    request_id: int
    direction: Direction
    layer_group: int
    pages: list[int]
    nbytes: int | None
    since_ns: int
    step: int


class _Plan(msgspec.Struct, frozen=True):
    """What a leader's records say is to be moved, on every rank."""

    request_id: int
    direction: Direction
    layer_group: int
    pages: list[int]
    since_ns: int
    step: int


class InFlightView:
    """Consumes the records of one journal.

    Attributes:
        facts: The process.
        requests: Open requests by id; only a process with the scheduler has any.
        last_ns: When something was told last.
        step: The pass of the process's last engine.
    """

    def __init__(self) -> None:
        self.facts = Facts()
        self.last_ns = 0
        self._begin()

    def _begin(self) -> None:
        """An engine begins."""
        self.requests: dict[int, OpenRequest] = {}
        self._plans: list[_Plan] = []
        self._moved: dict[tuple[int, Direction, int], set[int]] = {}
        #: What ``get_finished`` has named, the oldest first.
        self._returned: dict[tuple[int, Direction], None] = {}
        #: Held requests that this rank has given back, and perhaps others have not.
        self._elsewhere: dict[int, None] = {}
        self._ended_step = 0
        self.step = 0

    def feed(self, record: Record) -> None:
        """Take one record."""
        engines = self.facts.engines
        self.facts.observe(record)
        if self.facts.engines != engines:
            self._begin()
        self.step = max(self.step, getattr(record, "step", 0))
        self.last_ns = max(self.last_ns, getattr(record, "ended_ns", 0), getattr(record, "at_ns", 0))
        match record:
            case Enqueued():
                self._open(record.request_id, WAITS_FOR_QUERY, record.at_ns).prompt_tokens = record.prompt_tokens
            case QueryCall():
                self._queried(record)
            case AllocCall():
                self._allocated(record)
            case BuildCall():
                self._built(record)
            case FinishCall():
                self._finished(record)
            case FinishedCall():
                self._polled(record)
            case RequestResetCall():
                self._open(record.request_id, WAITS_FOR_QUERY, record.ended_ns)
            case Transfer() if record.error is None:
                key = (record.request_id, record.direction, record.layer_group)
                self._moved.setdefault(key, set()).update(record.pages)
            case Call(callback=Callback.WAIT_FOR_SAVE):
                self._pass_ended(record)

    def moves(self, leader: InFlightView | None = None) -> list[InFlightMove]:
        """What this process was to move and hasn't told as moved.

        Args:
            leader: The process of the same run that has the scheduler, where this isn't it.
        """
        found = []
        for plan in (leader or self)._plans:
            if (plan.step and plan.step <= self._ended_step) or (plan.request_id, plan.direction) in self._returned:
                continue
            moved = self._moved.get((plan.request_id, plan.direction, plan.layer_group), set())
            pages = [slot for slot in plan.pages if slot not in moved]
            if pages:
                size = self.facts.bytes_per_page(plan.layer_group)
                nbytes = None if size is None else size * len(pages)
                found.append(
                    InFlightMove(
                        plan.request_id, plan.direction, plan.layer_group, pages, nbytes, plan.since_ns, plan.step
                    )
                )
        return found

    def _open(self, request_id: int, waits_for: str, since_ns: int) -> OpenRequest:
        known = self.requests.get(request_id)
        if known is None:
            known = self.requests[request_id] = OpenRequest(request_id, waits_for, since_ns)
            if len(self.requests) - len(self._elsewhere) > _MAX_REQUESTS:
                self._forget(next(known for known in self.requests if known not in self._elsewhere))
        known.waits_for, known.since_ns = waits_for, since_ns
        return known

    def _forget(self, request_id: int) -> None:
        self.requests.pop(request_id, None)
        self._elsewhere.pop(request_id, None)
        self._plans = [plan for plan in self._plans if plan.request_id != request_id]
        for key in [key for key in self._moved if key[0] == request_id]:
            del self._moved[key]
        for way in Direction:
            self._returned.pop((request_id, way), None)

    def _queried(self, record: QueryCall) -> None:
        known = self._open(record.request_id, WAITS_FOR_PAGES, record.ended_ns)
        known.prompt_tokens = record.prompt_tokens
        known.computed_tokens = record.computed_tokens
        known.offered_tokens = record.offered_tokens
        known.is_async = record.is_async

    def _allocated(self, record: AllocCall) -> None:
        known = self._open(record.request_id, WAITS_FOR_PASS, record.ended_ns)
        known.honoured_tokens = record.honoured_tokens
        known.pages = record.pages
        if known.is_async and known.offered_tokens:
            known.waits_for = WAITS_FOR_LOAD
            self._plans += self._loads(known, record.ended_ns, 0)

    def _built(self, record: BuildCall) -> None:
        new_pages = dict(record.pages)
        scheduled = zip(record.request_ids, record.computed_positions, record.scheduled_tokens, strict=False)
        for position, (request_id, computed, tokens) in enumerate(scheduled):
            known = self.requests.get(request_id)
            if known is None:  # its beginning is lost
                known = self._open(request_id, IN_PASS, record.ended_ns)
            is_first = known.step == 0
            known.waits_for, known.since_ns, known.step = IN_PASS, record.ended_ns, record.step
            for group, slots in enumerate(new_pages.get(position, [])):
                known.pages = [*known.pages, *([[]] * (group + 1 - len(known.pages)))]
                fresh = [slot for slot in slots if slot < 0 or slot not in known.pages[group]]
                known.pages[group] = [*known.pages[group], *fresh]
            if is_first and not known.is_async:
                self._plans += self._loads(known, record.ended_ns, record.step)
            self._plans += self._blocks(
                known, Direction.SAVE, computed, computed + tokens, record.ended_ns, record.step, whole=True
            )
        gone = [i for i, known in self.requests.items() if known.step and known.step < record.step - _GONE_AFTER]
        for request_id in gone:
            if self.requests[request_id].waits_for in (IN_PASS, BETWEEN_PASSES):
                self._forget(request_id)

    def _finished(self, record: FinishCall) -> None:
        if not record.keeps_pages:
            self._forget(record.request_id)
            return
        known = self._open(record.request_id, WAITS_FOR_SAVE, record.ended_ns)
        known.pages, known.is_held = record.pages, True
        self._plans += [
            _Plan(record.request_id, Direction.SAVE, group, pages, record.ended_ns, 0)
            for group, slots in enumerate(record.pages)
            if (pages := [slot for slot in slots if slot >= 0])
        ]

    def _polled(self, record: FinishedCall) -> None:
        for request_id in record.loading_returned:
            self._returned[request_id, Direction.LOAD] = None
            if request_id in self.requests:
                self._open(request_id, WAITS_FOR_PASS, record.ended_ns)
        for request_id in record.saving_returned:
            if request_id in self.requests and (self.facts.world or 1) > 1:
                self._elsewhere[request_id] = None
                if len(self._elsewhere) > _MAX_REQUESTS:
                    self._forget(next(iter(self._elsewhere)))
            elif request_id in self.requests:
                self._forget(request_id)
            self._returned[request_id, Direction.SAVE] = None
        while len(self._returned) > _MAX_REQUESTS:
            del self._returned[next(iter(self._returned))]

    def _pass_ended(self, record: Call) -> None:
        self._ended_step = max(self._ended_step, record.step)
        self._plans = [plan for plan in self._plans if plan.step == 0 or plan.step > record.step - 2]
        for known in self.requests.values():
            if known.waits_for == IN_PASS and known.step <= record.step:
                known.waits_for, known.since_ns = BETWEEN_PASSES, record.ended_ns
        if not self.facts.has_scheduler:
            while len(self._moved) > _MAX_REQUESTS:
                del self._moved[next(iter(self._moved))]

    def _loads(self, known: OpenRequest, since_ns: int, step: int) -> list[_Plan]:
        tokens = known.offered_tokens if known.honoured_tokens is None else known.honoured_tokens
        end = known.computed_tokens + tokens
        return self._blocks(known, Direction.LOAD, known.computed_tokens, end, since_ns, step) if tokens else []

    def _blocks(
        self, known: OpenRequest, way: Direction, begin: int, end: int, since_ns: int, step: int, *, whole: bool = False
    ) -> list[_Plan]:
        """Plans for the blocks of tokens ``[begin, end)``; ``whole``: only those that are complete at ``end``."""
        size = self.facts.tokens_per_block
        if size > 0:
            first, last = begin // size, (end if whole else end + size - 1) // size
        elif way is Direction.LOAD:
            first, last = (
                0,
                1 << 62,
            )  # the layout doesn't tell a block's size: any page that was handed over may be meant
        else:
            return []
        return [
            _Plan(known.request_id, way, group, pages, since_ns, step)
            for group, slots in enumerate(known.pages)
            if (pages := [slot for slot in slots[first:last] if slot >= 0])
        ]


def leader_of(view: InFlightView, views: Iterable[InFlightView]) -> InFlightView | None:
    """The process with the scheduler in the run of ``view``: itself, another, or none that is known."""
    if view.facts.has_scheduler:
        return view
    run = view.facts.run_id
    return next((other for other in views if run and other.facts.has_scheduler and other.facts.run_id == run), None)


def settle(views: Sequence[InFlightView]) -> None:
    """Let held requests go that every rank whose journal is here has given back; of the others, say who has not."""
    for leader in views:
        if not leader.facts.has_scheduler:
            continue
        workers = [view for view in views if view.facts.run == leader.facts.run and view.facts.has_worker]
        for request_id in list(leader._elsewhere):
            late = [view for view in workers if (request_id, Direction.SAVE) not in view._returned]
            if late:
                ranks = ", ".join(str(view.facts.rank) for view in late)
                leader.requests[request_id].waits_for = f"its save on rank {ranks} (get_finished)"
            else:
                leader._forget(request_id)


def all_moves(views: Sequence[InFlightView]) -> list[list[InFlightMove]]:
    """For each process what it was to move, in the order of ``views``."""
    return [view.moves(leader) if (leader := leader_of(view, views)) is not None else [] for view in views]

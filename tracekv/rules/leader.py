"""What the leader's records change: requests, their pages, and passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter

from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    Call,
    CancelLoadCall,
    FinishCall,
    Lookup,
    QueryCall,
    RequestResetCall,
)
from tracekv.journal.vocabulary import Callback
from tracekv.rules import events
from tracekv.rules.core import Core, Tell
from tracekv.rules.model import Limits
from tracekv.rules.plain import is_as_looked_up, is_plain_answer
from tracekv.rules.state import MOST_IDS, MOST_TOKENS, Keyed, Recent, Request, Run, Source

_FLAT_ALLOC = int(Callback.UPDATE_STATE_AFTER_ALLOC)


class LeaderRecords(Core):
    """Takes the scheduler's callbacks."""

    def __init__(self, limits: Limits, tell: Tell, spared: Collection[str]) -> None:
        super().__init__(limits, tell, spared)
        self._slow_query_ns = min(limits.io_in_query_ns, limits.query_ns)
        self._keys: Recent[bytes, Keyed] = Recent(MOST_IDS)

    def _scheduled(self, run: Run, source: Source, record: Call) -> bool:
        """Whether the record is the leader's."""
        if run.leader is source or run.leader is None:
            return True
        self._tell("scheduled", events.Scheduled(run, source, record))
        return False

    def _looked_up(self, source: Source, record: Lookup) -> None:
        self._run(source).lookups[record.request_id] = record

    def _query(self, source: Source, record: QueryCall) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        if not self._scheduled(run, source, record):
            return
        before = run.requests.get(record.request_id)
        request = Request(record.request_id)
        request.is_whole = True
        if before is not None and before.query is not None and not before.finishes:
            if before.alloc is None:
                request.queries = before.queries + 1
            request.replaces = before if before.alloc is not None else before.replaces
            if request.replaces is not None:
                request.replaces.replaces = None  # a chain of them would never be forgotten
        run.remember(request)
        if request.replaces is not None:
            run.asked_again[request.request_id] = request
        request.query = record
        request.prompt = record.prompt_tokens
        request.computed = record.computed_tokens
        request.offered = record.offered_tokens
        request.is_async = record.is_async
        request.seen_ns = record.ended_ns
        lookup = run.lookups.pop(record.request_id, None)
        is_bounded = False
        if lookup is not None and lookup.started_ns >= record.started_ns:
            request.lookup = lookup
            if lookup.offered_tokens > 0:
                run.bounded.clear()
            elif (
                lookup.bounding_layer_group is not None and max(lookup.group_tokens, default=0) > lookup.computed_tokens
            ):
                run.bounded.append(lookup)
                is_bounded = True
        query = events.Query(run, source, request, record)
        if not (self._spares_query and is_plain_answer(run, request, record)):
            self._tell("query", query)
        if request.lookup is not None and request.lookup.key is not None:
            self._keyed(run, source, request, record, request.lookup, request.lookup.key)
        if record.ended_ns - record.started_ns >= self._slow_query_ns:
            self._tell("slow_query", query)
        if is_bounded or not (self._spares_lookup and is_as_looked_up(request, record)):
            self._tell("lookup", query)

    def _keyed(self, run: Run, source: Source, request: Request, record: QueryCall, lookup: Lookup, key: bytes) -> None:
        """Compare what the key of the prompt's last block stands for with what it stood for."""
        # One token has to be computed; who offers parts of blocks keys the last block all the same.
        least = 0 if lookup.has_partial_blocks else 1
        block = (lookup.prompt_tokens - least) // run.block if run.block else -1
        now = Keyed(
            run.key, record.salt_digest, record.multimodal_digest, record.lora_id, run.layout, block, record, lookup
        )
        before = self._keys.get(key)
        self._keys[key] = now
        if before is not None:
            self._tell("rekeyed", events.Rekeyed(run, source, request, record, before, now))

    def _alloc(self, source: Source, record: AllocCall) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        if not self._scheduled(run, source, record):
            return
        request = run.requests.get(record.request_id)
        is_flat = record.callback == _FLAT_ALLOC and len(run.groups) > 1
        if request is None or request.queries > 1 or is_flat:
            self._tell("alloc", events.Alloc(run, source, request, record))
        if request is None:
            return
        request.alloc = record
        request.queries = 0
        request.honoured = record.honoured_tokens
        request.start_lists(record.pages, are_own=request.is_async)
        request.shared = request.computed // run.block if run.block else 0
        if request.is_async:
            request.is_parked = True
            request.parked_ns = record.ended_ns
            run.waiting[request.request_id] = request
            request.widen(len(record.pages))
            self._list_pages(run, source, record, request, record.pages, 0, ())

    def _build(self, source: Source, record: BuildCall) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        if not self._scheduled(run, source, record):
            return
        if run.last_step and record.step != run.last_step + 1:
            self._forget(run)
        run.last_step = record.step
        run.builds += 1
        if record.has_metadata:
            run.content[record.step] = record
        prompt_tokens = loaded = 0
        prompts: dict[int, int] = {}
        for index in range(record.new_requests):
            honoured = self._first_report(run, record, index)
            prompt_tokens += record.scheduled_tokens[index]
            loaded += honoured
            prompts[index] = record.computed_positions[index] + honoured + record.scheduled_tokens[index]
        if run.prefilling:
            prompt_tokens += self._later_chunks(run, record, prompts)
        if prompt_tokens:
            run.prefilled[record.step] = (prompt_tokens, loaded)
        if record.pages:
            self._take_pages(run, source, record)
        short = self._short(run, record, prompts) if run.block else []
        again = self._asked_again(run, record) if run.asked_again else []
        if short or again:
            self._tell("build", events.Build(run, source, record, short, again))
        run.last_build = record
        while run.due and run.due[0][0] <= run.builds:
            _, name, request = run.due.popleft()
            self._settle(run, source, name, request)
            if name == "left":
                request.trim()

    def _first_report(self, run: Run, record: BuildCall, index: int) -> int:
        """Take a request in; the tokens that a load has to bring in this pass."""
        request = run.request(record.request_ids[index])
        request.pages, request.slots, request.counted, request.chunks = [], [], [], []
        request.held = None
        request.sound.clear()
        request.seen_ns = record.ended_ns
        if request.prompt is None:
            request.prompt = record.prompt_tokens[index]
        begin, scheduled = record.computed_positions[index], record.scheduled_tokens[index]
        honoured = 0
        if request.first_build is None and request.is_whole:
            honoured = 0 if request.is_async else request.honoured or 0
            if not request.is_async or request.returned_ns:
                run.due.append((run.builds + self._limits.settle_passes, "loaded", request))
        if request.is_parked:
            request.is_parked = False
            run.waiting.pop(request.request_id, None)
        if request.first_build is not None:
            request.is_whole = False  # replayed without a query: what was honoured then says nothing now
        request.first_build = record
        begin += honoured
        request.chunks.append((record.step, begin, begin + scheduled))
        if begin + scheduled < request.prompt:
            run.prefilling[request.request_id] = request
        return honoured

    def _later_chunks(self, run: Run, record: BuildCall, prompts: dict[int, int]) -> int:
        """The prompt tokens of chunks that aren't the first; where they end is noted in ``prompts``, by index."""
        tokens = 0
        ids = record.request_ids
        for request_id, request in [*run.prefilling.items()]:
            try:
                index = ids.index(request_id)
            except ValueError:
                continue
            begin, scheduled = record.computed_positions[index], record.scheduled_tokens[index]
            if index >= record.new_requests:
                tokens += scheduled
                prompts[index] = begin + scheduled
                if len(request.chunks) < 4096:
                    request.chunks.append((record.step, begin, begin + scheduled))
            if begin + scheduled >= (request.prompt or 0):
                del run.prefilling[request_id]
        return tokens

    def _take_pages(self, run: Run, source: Source, record: BuildCall) -> None:
        ids, positions, scheduled = record.request_ids, record.computed_positions, record.scheduled_tokens
        requests, block, since = run.requests, run.block, record.started_ns
        room, passes, claims = run.room, run.builds, run.claims[0]
        for position, lists in record.pages:
            request = requests.get(ids[position])
            if request is None:
                continue
            pages, slots = request.pages, lists[0]
            if len(slots) == 1 == len(lists) == len(pages) and request.slots and request.shared <= len(pages[0]):
                # What a request gets while it decodes: of all that is done in a pass, this is done most.
                page = slots[0]
                pages[0].append(page)
                before = claims.get(page)
                claims[page] = (request, since)
                if before is not None and before[0] is not request and self._is_taken(run, request, before[0], ids):
                    self._tell("claim", events.Claim(run, source, record, request, before[0], 0, page))
                least = len(pages[0])
            else:
                request.widen(len(lists))
                begin = len(pages[0])
                for slots, more in zip(pages, lists, strict=False):
                    slots += more
                self._list_pages(run, source, record, request, lists, begin, ids)
                least = min(map(len, pages))
            if block and request.is_whole:
                held = request.held = least * block
                room.fills(request, passes, held - positions[position] - scheduled[position])

    def _list_pages(
        self,
        run: Run,
        source: Source,
        record: Call,
        request: Request,
        lists: Sequence[Sequence[int]],
        begin: int,
        running: Sequence[int],
    ) -> None:
        """Note whose pages these are now; ``begin`` is the block ordinal of the first in each list."""
        mine = (request, record.started_ns)
        for group, slots in enumerate(lists):
            if not slots:
                continue
            distinct = dict.fromkeys(slots, mine)
            if len(distinct) == len(slots):
                facts = run.groups.get(group)
                if not begin and facts is not None and 0 <= min(slots) <= max(slots) < (facts.num_slots or MOST_TOKENS):
                    request.sound[group] = len(slots)
            else:
                self._tell("listed", events.Listed(run, source, record, request, group, slots))
            claims, claimed = run.claims[group], slots
            if request.shared > begin:
                claimed = slots[request.shared - begin :]
                distinct = dict.fromkeys(claimed, mine)
            others, last = set(), None
            for held in map(claims.get, claimed):
                if held is not last:  # pages that were given together are often given away together
                    last = held
                    if held is not None:
                        others.add(held[0])
            for other in others:
                if self._is_taken(run, request, other, running):
                    page = min(page for page in claimed if (held := claims.get(page)) and held[0] is other)
                    self._tell("claim", events.Claim(run, source, record, request, other, group, page))
            claims.update(distinct)

    @staticmethod
    def _is_taken(run: Run, request: Request, other: Request, running: Sequence[int]) -> bool:
        """Note that a page of another request's is ``request``'s now; whether the other one runs on."""
        if other is request:
            return False
        other.lost_pages = True
        return not other.left_ns and other.request_id in running and run.requests.get(other.request_id) is other

    def _short(self, run: Run, record: BuildCall, prompts: dict[int, int]) -> list[tuple[Request, int]]:
        """The requests whose pages hold fewer tokens than the pass reaches."""
        found, room, passes = [], run.room, run.builds
        for index in room.due(record, passes, run.requests, prompts):
            request_id = record.request_ids[index]
            request = run.requests.get(request_id)
            held = None if request is None else request.held
            if request is None or held is None:
                continue
            end = record.computed_positions[index] + record.scheduled_tokens[index]
            if end <= held:
                room.fills(request, passes, max(held - prompts.get(index, end), 0))
            elif self._is_continuous(run, record, request_id):
                found.append((index, request, end))
                room.fills(request, passes, -end % run.block)  # it is told again where it begins another block
            else:
                request.is_whole = False
                request.held = None
        return [(request, end) for _, request, end in sorted(found, key=itemgetter(0))] if found else []

    def _asked_again(self, run: Run, record: BuildCall) -> list[Request]:
        """Requests that go on as if nothing had happened after they were asked about once more."""
        found = []
        for request_id, request in list(run.asked_again.items()):
            if request_id in record.request_ids:
                del run.asked_again[request_id]
                if record.request_ids.index(request_id) >= record.new_requests and request.is_whole:
                    found.append(request)
        return found

    def _is_continuous(self, run: Run, record: BuildCall, request_id: int) -> bool:
        """Whether the request goes on where the pass before left it: then no report in between was missed."""
        index = record.request_ids.index(request_id)
        before = run.last_build
        if index < record.new_requests:
            return True
        if before is None or request_id not in before.request_ids:
            return False
        at = before.request_ids.index(request_id)
        request = run.requests[request_id]
        reached = before.computed_positions[at] + before.scheduled_tokens[at]
        if request.first_build is before:
            reached += request.honoured or 0
        return record.computed_positions[index] <= reached

    def _finish(self, source: Source, record: FinishCall) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        if not self._scheduled(run, source, record):
            return
        request = run.request(record.request_id)
        first = request.finish
        request.finishes += 1
        if first is not None or record.answer is not None or record.pages != request.pages:
            self._tell("finish", events.Finish(run, source, request, record, first))
        request.held = None
        run.prefilling.pop(record.request_id, None)
        run.waiting.pop(record.request_id, None)
        if first is not None:
            return
        request.finish = record
        if not record.keeps_pages:
            request.left_ns = record.ended_ns
        if request.is_whole:
            run.due.append((run.builds + self._limits.settle_passes, "left", request))

    def _cancelled(self, source: Source, record: CancelLoadCall) -> None:
        self._withdrawn(source, record, record.request_id)

    def _reset(self, source: Source, record: RequestResetCall) -> None:
        self._withdrawn(source, record, record.request_id)

    def _withdrawn(self, source: Source, record: Call, request_id: int) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        request = run.requests.get(request_id)
        if request is not None:
            request.is_whole = False
            request.queries = 0
            request.held = None

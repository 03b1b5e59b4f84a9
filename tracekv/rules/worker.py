"""What the workers' records change: binding, loading, forwards, polls and transfers."""

from __future__ import annotations

from operator import le

from tracekv.journal.records import (
    BindCall,
    Call,
    Drop,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Record,
    StoreOperation,
    Transfer,
    WatchReport,
)
from tracekv.journal.vocabulary import Callback, Direction
from tracekv.journal.vocabulary import Source as Origin
from tracekv.rules import events
from tracekv.rules.core import Core
from tracekv.rules.model import EMPTY_PICKLE
from tracekv.rules.plain import is_plain_transfer
from tracekv.rules.state import Ended, Request, Run, Source

#: Prompt tokens from which on a pass tells what computing costs.
_RATE_TOKENS = 256
#: Of the passes that only generate, one in so many has its hooks looked at; of the others too, once as many were regular.
_HOOKS_SAMPLE = 16
#: A layer's hook that wasn't called.
_UNCALLED = bytes(16)
_BUILD = int(Callback.BUILD_CONNECTOR_META)
_BIND = int(Callback.BIND_CONNECTOR_META)
_START = int(Callback.START_LOAD_KV)
_END = int(Callback.WAIT_FOR_SAVE)
# An enumeration's members are looked up in its class each time.
_LOAD, _OBSERVED, _PLANNED = Direction.LOAD, Origin.OBSERVED, Origin.PLANNED


class WorkerRecords(Core):
    """Takes the worker's callbacks, and what a connector reports."""

    def _call(self, source: Source, record: Call) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        code = record.callback
        if record.error is not None:
            self._failed(run, source, record)
        elif code == _START:
            _, loaded = run.prefilled.get(record.step, (0, 0))
            is_slow = loaded and record.ended_ns - record.started_ns > self._limits.recompute_floor_ns
            if is_slow or not source.is_bound or source.register is None:
                self._tell("start", events.Start(run, source, record, source.is_bound, loaded))
            source.is_bound = False
            source.start = record
        elif code == _END:
            self._ended(run, source, record)

    def _failed(self, run: Run, source: Source, record: Call) -> None:
        source.hooks = None
        built = None
        if record.callback == _BUILD:
            if run.last_build is not None and run.last_build.step == record.step:
                built = run.last_build
            run.last_step = max(run.last_step, record.step)
        elif record.callback == _BIND:
            source.is_bound = None
        self._tell("failed", events.Failed(run, source, record, built))

    def _ended(self, run: Run, source: Source, record: Call) -> None:
        hooks, source.hooks = source.hooks, None
        if hooks is not None and hooks.step != record.step:
            hooks = None
        tokens, loaded = run.prefilled.get(record.step, (0, 0))
        start = source.start
        if tokens >= _RATE_TOKENS and start is not None and start.step == record.step:
            rate = max(0, record.started_ns - start.ended_ns) / tokens
            before = run.prefill_ns_per_token
            run.prefill_ns_per_token = (before * 3 + rate) / 4 if before else rate
        if hooks is None or not (tokens or record.step % _HOOKS_SAMPLE == 0):
            source.ended[record.step] = Ended(record, record.started_ns)
            if tokens and start is not None and start.step == record.step:  # else the hooks may lie in a gap
                self._tell("pass", events.Pass(run, source, record, None, [], [], tokens))
            return
        waits, saves = hooks.waits, hooks.saves
        # Passes that load are counted by themselves, so that some of each kind are looked at.
        count = run.hooked_loads if loaded else run.hooked_prefills - run.hooked_loads
        is_looked_at = not tokens or count < _HOOKS_SAMPLE or count % _HOOKS_SAMPLE == 0
        # A layer's own wait is the last chance to load it; the first layer's comes first.
        needed = int.from_bytes(waits[8:16], "little") or record.started_ns
        if is_looked_at or _UNCALLED in waits or len(waits) != len(run.layers) * len(_UNCALLED):
            starts, ends = _times(waits)
            saved = _times(saves)[0]
            needed = next((end for start, end in zip(starts, ends, strict=True) if start), record.started_ns)
            is_regular = len(starts) == len(run.layers) and 0 not in starts and all(map(le, starts, saved))
            if not is_regular:
                self._tell("pass", events.Pass(run, source, record, hooks, starts, saved, tokens))
        source.ended[record.step] = Ended(record, needed, waits)
        if tokens:
            run.hooked_prefills += 1
            run.hooked_loads += bool(loaded)

    def _hooks(self, source: Source, record: LayerHooks) -> None:
        source.hooks = record

    def _bind(self, source: Source, record: BindCall) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        source.is_bound = True
        nbytes = record.nbytes
        is_regular = nbytes is None or EMPTY_PICKLE < nbytes <= self._limits.metadata_bytes
        if is_regular and run.world == 1:
            return
        bound = run.bound.get(record.step)
        if bound is None:
            bound = run.bound[record.step] = []
        others = [each for each in bound if each[0] is not source]
        if others or not is_regular:
            self._tell("bind", events.Bind(run, source, record, others, run.content.get(record.step)))
        bound.append((source, record))

    def _idle(self, source: Source, record: IdlePolls) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.last_ended_ns)
        if record.max_ns > self._limits.get_finished_ns:
            self._tell("idled", events.Idled(run, source, record))

    def _polled(self, source: Source, record: FinishedCall) -> None:
        run = source.run or self._run(source)
        self._passed(run, source, record.ended_ns)
        for request_id in record.saving_given:
            source.saving[request_id] = (record.ended_ns, record)
        for request_id in record.loading_given:
            source.loading[request_id] = (record.ended_ns, record)
        self._tell("polled", events.Polled(run, source, record))
        for request_id in record.saving_returned:
            self._returned(run, source, record, "saving", request_id)
        for request_id in record.loading_returned:
            self._returned(run, source, record, "loading", request_id)

    def _returned(self, run: Run, source: Source, record: FinishedCall, kind: str, request_id: int) -> None:
        mine, others = (source.saving, source.loading) if kind == "saving" else (source.loading, source.saving)
        request = run.requests.get(request_id)
        before: Record | None = None
        if request_id in mine:
            fate, before = "ok", mine.pop(request_id)[1]
        elif request_id in others:
            fate, before = "swapped", others.pop(request_id)[1]
        elif (kind, request_id) in source.returned:
            fate, before = "twice", source.returned[kind, request_id]
        else:
            fate = "unknown"
            if record.ended_ns < source.trusts_ids_from:
                return
        source.returned[kind, request_id] = record
        self._tell("returned", events.Returned(run, source, record, kind, request_id, fate, request, before))
        if fate == "ok":
            self._completed(run, source, record, kind, request_id, request)

    def _completed(
        self, run: Run, source: Source, record: FinishedCall, kind: str, request_id: int, request: Request | None
    ) -> None:
        """A rank has returned an id; once all have, the request goes on, or its pages go."""
        world = run.world or 1
        now = record.ended_ns + source.shift_ns
        key = (kind, request_id)
        by_rank = run.completions.get(key) or {}
        by_rank[source.rank or 0] = (now, record)
        if len(by_rank) < world:
            run.completions[key] = by_rank
            return
        run.completions.pop(key, None)
        if request is None:
            return
        last = max(at for at, _ in by_rank.values())
        if kind == "saving":
            request.left_ns = request.left_ns or last
        else:
            request.returned_ns = last
            request.is_parked = False
            run.waiting.pop(request_id, None)
            # Connectors may load in the pass that runs the request; one that is cancelled before reads no page.
            if request.is_whole and request.first_build is not None:
                run.due.append((run.builds + self._limits.settle_passes, "loaded", request))

    def _moved(self, source: Source, record: Transfer) -> None:
        if record.source is _PLANNED:
            return  # an intention, not a movement
        run = source.run or self._run(source)
        if record.source is _OBSERVED:
            run.is_watched = True
        elif not run.reports:
            run.reports = True
            self._reporting.add(source.worker_class)
        request = run.requests.get(record.request_id)
        is_load = record.direction is _LOAD
        is_plain = is_plain_transfer(run, request, record) and self._spares_astray
        moved = None
        if is_load or not is_plain or request is None or request.left_ns or request.lost_pages:
            moved = events.Moved(run, source, request, record)
        if moved is not None and not is_plain:
            self._tell("astray", moved)
        if record.error is None:
            if not is_load:
                run.saved_bytes += record.nbytes
            if request is not None:
                where = (source.rank or 0, record.layer_group)
                request.note(request.loaded if is_load else request.saved, where, record.pages)
                request.transfers.append((source, record))
                ended_ns = record.ended_ns + source.shift_ns
                if ended_ns > request.moved_ns:
                    request.moved_ns = ended_ns
                if is_load and record.started_ns > request.loading_ns:
                    request.loading_ns = record.started_ns
        if moved is None:
            return
        if request is not None and (request.left_ns or request.lost_pages):
            self._tell("late", moved)
        if is_load:
            self._tell("load", moved)

    def _watched(self, source: Source, record: WatchReport) -> None:
        run = source.run or self._run(source)
        run.is_watched = True
        run.has_watch_gaps |= not record.is_complete
        if record.last_slots:
            self._tell("watched", events.Watched(run, source, record))

    def _stored(self, source: Source, record: StoreOperation) -> None:
        source.operations.append(record)
        self._tell("stored", events.Stored(self._run(source), source, record))

    def _dropped(self, source: Source, record: Drop) -> None:
        if record.request_id is not None:
            self._run(source).dropped[record.request_id] = True


def _times(hooks: bytes) -> tuple[list[int], list[int]]:
    """When each layer's hook was entered, and left."""
    times = memoryview(hooks).cast("q")
    return times[::2].tolist(), times[1::2].tolist()

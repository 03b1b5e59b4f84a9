"""A long multi-turn trace on two engines that share a small store, and what of their books may grow with it.

Engines without a model: a page's content follows from the tokens before it, so each loaded page is compared bit by bit, and a late
or misdirected copy shows in whoever has the page then.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.fsspec.engine import POISON, B, Engine
from tracekv.contract import on_enqueue
from tracekv_fsspec.inventory import survey
from tracekv_fsspec.removal import bury, delete, plan_cleaning
from tracekv_fsspec.store import open_store

WINDOWS = (None, 3 * B)
#: Requests of an engine at a time, conversations, and blocks of the longest prompt.
AT_ONCE, CONVERSATIONS, LONGEST = 4, 24, 14
WAIT_S = 60


@dataclass
class Counts:
    """What happened, so that a soak that exercised nothing isn't taken for a good one."""

    finished: int = 0
    cancelled: int = 0
    replayed: int = 0
    parked: int = 0
    honoured_in_part: int = 0
    loaded_blocks: int = 0
    deleted_commits: int = 0


class Soaked(Engine):
    """An engine whose parked requests are held until they are named."""

    def __init__(self, *args, **kwargs):
        self.started, self.held = [], {}
        super().__init__(*args, **kwargs)
        self.running = []

    def poll(self):
        started, self.started = self.started, []
        saved, loaded = self.worker.get_finished([], started)
        assert saved == []
        self.plans.clear()
        for request_id in loaded:
            running = self.held.pop(request_id)
            if running is not None:  # it was cancelled meanwhile otherwise
                self.running.append(running)

    def free_pages(self, running):
        """Poison what is given back: whoever reads it before it is written reads nonsense."""
        for group, pages in enumerate(running.pages):
            mine = [page for page in pages if page >= 0]
            self.pools[group][mine] = POISON
            self.free[group] += mine


@dataclass
class Conversation:
    tokens: list[int] = field(default_factory=list)


class Soak:
    """Plays requests and checks each.

    Args:
        engines: They share the store at ``url``.
        high, low: Watermarks of the store in bytes.
    """

    def __init__(self, engines, url, *, high, low, seed=1):
        self.engines = engines
        self.chance = random.Random(seed)
        self.store = open_store(url)
        self.high, self.low = high, low
        self.talks = [Conversation() for _ in range(CONVERSATIONS)]
        self.counts = Counts()
        self._last_id = 0

    def play(self, requests, *, clean_every=100):
        """So many requests, the store cleaned in between."""
        for number in range(requests):
            engine = self.chance.choice(self.engines)
            while len(engine.running) + sum(each is not None for each in engine.held.values()) >= AT_ONCE:
                self._step(engine)
            self._submit(engine)
            self._step(engine)
            if number % clean_every == clean_every - 1:
                self.clean()

    def clean(self):
        """What ``tracekv store gc`` does, its grace being the time until nobody runs a request."""
        found = survey(self.store)
        if found.nbytes > self.high:
            plan = plan_cleaning(found, excess=found.nbytes - self.low)
            bury(self.store, plan.commits)
            for engine in self.engines:
                engine.scheduler._engine.stager.catalog.refresh()
            self.drain()
            delete(self.store, plan.commits)
            self.counts.deleted_commits += len(plan.commits)

    def drain(self):
        """Run what there is to its end."""
        for engine in self.engines:
            while engine.running or any(each is not None for each in engine.held.values()):
                self._step(engine)

    def _submit(self, engine):
        chance, talk = self.chance, self.chance.choice(self.talks)
        if len(talk.tokens) > LONGEST * B:
            talk.tokens = []
        if not talk.tokens:
            talk.tokens = random.Random(chance.randrange(4)).choices(range(50_000), k=2 * B)  # a system prompt
        talk.tokens = talk.tokens + chance.choices(range(50_000), k=chance.randint(1, 3 * B))
        self._last_id += 1
        if chance.random() < 0.3:
            on_enqueue(self._last_id, None, talk.tokens, None)
            self._step(engine)
        self._admit(engine, self._last_id, talk.tokens)

    def _admit(self, engine, request_id, tokens):
        honour = self.chance.randrange(len(tokens)) if self.chance.random() < 0.1 else None
        if honour is not None and not self.partial:
            honour = honour // B * B
        running = engine.admit(request_id, tokens, honour=honour, may_park=True)
        self.counts.honoured_in_part += running.honoured < running.offered
        if running.is_parked and running.honoured:
            self.counts.parked += 1
            engine.held[request_id] = running
            engine.started.append(request_id)
        else:
            running.is_parked = False
            engine.running.append(running)

    partial = False

    def _step(self, engine):
        """A pass, an idle one too."""
        chance = self.chance
        for running in list(engine.running):
            if chance.random() < 0.02:
                self._cancel(engine, running)
            elif running.is_reported and chance.random() < 0.05:
                engine.running.remove(running)
                engine.free_pages(running)
                self.counts.replayed += 1
                self._admit(engine, running.request.request_id, running.tokens)
        for request_id, held in list(engine.held.items()):
            if held is not None and request_id not in engine.started and chance.random() < 0.02:
                engine.held[request_id] = None
                engine.free_pages(held)
                self.counts.cancelled += 1
        scheduled = [
            (running, min(len(running.tokens) - running.position, chance.choice([B, 2 * B, LONGEST * B])))
            for running in engine.running
            # What was just offered is run at once: its pins are for the next pass. Others may have to wait.
            if not (running.is_reported or running.is_parked) or chance.random() < 0.9
        ]
        loads_of = {id(running): running.honoured for running, _ in scheduled if not running.is_reported}
        if not scheduled:
            engine.run_pass()
            return
        engine.run_pass(*scheduled)
        for running, _ in scheduled:
            if id(running) in loads_of:
                self.counts.loaded_blocks += loads_of[id(running)] // B
            if running.position == len(running.tokens):
                assert engine.holds_its_kv(running, 0, len(running.pages[0])), "a page isn't what was computed"
                engine.running.remove(running)
                self._end(engine, running)

    def _cancel(self, engine, running):
        """Never announced."""
        engine.running.remove(running)
        engine.free_pages(running)
        self.counts.cancelled += 1

    def _end(self, engine, running):
        engine.scheduler.request_finished_by_layer_group(running.request, [list(pages) for pages in running.pages])
        engine.free_pages(running)
        self.counts.finished += 1


def at_rest(engine):
    """Wait until nothing is under way; whether nothing is pinned then."""
    stager = engine.scheduler._engine.stager
    assert stager.flush(WAIT_S)
    return all(stager.arena.free_slots(shard) == stager.arena.slots_per_shard for shard in stager.arena.shards)


def books(engine):
    """How much each of an engine's books holds."""
    core = engine.scheduler._engine
    stager, worker = core.stager, engine.worker
    reader, prefetcher, writer, index, catalog = (
        stager.reader, stager.prefetcher, stager.writer, stager.index, stager.catalog,
    )  # fmt: skip
    return {
        "requests": len(engine.scheduler._requests),
        "promised": len(engine.scheduler._requests._promised),
        "offers": len(engine.scheduler._planner._offered),
        "parked": len(stager.parking._runs),
        "copies": len(stager.copies._parts),
        "in flight": sum(map(len, reader._in_flight.values())),
        "queued bytes": reader._queue.nbytes,
        "queued batches": sum(map(len, reader._queue._queued.values())),
        "header checks": len(reader._checks),
        "hints": len(prefetcher._of_request) + len(prefetcher._todo) + len(prefetcher._open) + len(prefetcher._ahead),
        "asked": len(prefetcher._asked),
        "fates": sum(map(len, stager.fates._fresh.values())),
        "pending": len(writer._pending) + len(writer._submitted) + len(writer._open) + len(writer._ended),
        "sealed": len(writer._committer._queue),
        "own ids": len(catalog._own),
        "commits": len(index._commits),
        "faults": len(index._faults),
        "doubted": len(index._doubted),
        "shadowed": sum(map(len, index._shadowed.values())),
        "removed": len(index._removed),
        "cursors": len(catalog._cursors) + len(catalog._seen_at),
        "held": len(worker._parked._held),
        "tickets": len(worker._parked._tickets),
    }


def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def footprint(soak):
    """Python's blocks and the process's memory, everything at rest and the store cleaned to its low mark."""
    soak.drain()
    for engine in soak.engines:
        assert engine.scheduler.flush(WAIT_S)
    soak.clean()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return sys.getallocatedblocks(), rss_bytes()

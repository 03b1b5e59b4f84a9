"""Journals as engines would have left them, of any length: what opening a million records is measured on.

A small model of an engine (two ranks, two layer groups, prompts that are partly stored) writes the records that capture and the
persistent connector write, with a clock of its own: the files are real rings and archives.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tracekv.journal.archive import ArchiveWriter
from tracekv.journal.process import describe_self
from tracekv.journal.reader import RingReader
from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CallbackSource,
    ConnectorWrapped,
    FinishCall,
    GroupFacts,
    IdlePolls,
    LayerHooks,
    Lookup,
    QueryCall,
    Record,
    RegionFacts,
    RegisterCall,
    RunJoined,
    StoreCeiling,
    StoreOperation,
    Transfer,
)
from tracekv.journal.ring import RingJournal
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome, Side, Source, Tier

_RANKS = 2
_GROUPS = 2
_LAYERS = 32
_BLOCK = 32
_PAGE_BYTES = 64 << 10
_STEP_NS = 8_000_000
#: Passes from one arrival to the next, and passes that a request takes.
_ARRIVAL, _PASSES = 4, 32
_US = 1_000
#: Bytes that a record takes in a ring, on the average; with some room.
_RECORD_BYTES = 320


class _Live:
    """A request that the engine is serving."""

    def __init__(self, request_id: int, prompt: int, offered: int, pages: list[list[int]]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.offered = offered
        self.pages = pages
        self.passes = 0

    @property
    def loaded(self) -> list[int]:
        """Ordinals of the blocks that come from the store."""
        return list(range(self.offered // _BLOCK))


class Engine:
    """Writes one run, record by record.

    Args:
        directory: Where its ring files go, one per rank.
        records: How many it writes, or a few more: it ends with a whole pass.
        seed: For the prompts.
    """

    def __init__(self, directory: Path, records: int, seed: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311  # no secret
        self._run = self._chance.randbytes(16)
        size = max(1 << 20, (records // _RANKS * _RECORD_BYTES * 16 // 11 + 4095) // 4096 * 4096)
        self.journals = []
        for rank in range(_RANKS):
            facts = msgspec.structs.replace(describe_self(), host=f"node{seed}")
            path = directory / f"{facts.pid}-{facts.process_id.hex()}.tkvring"
            journal = RingJournal.create(path, size, facts)
            journal.claim_engine_thread()
            self.journals.append(journal)
            self._now = facts.monotonic_ns
            self._bring_up(rank)
        self.written = _RANKS * 5
        self._step = 0
        self._live: list[_Live] = []
        self._next_request = 2048
        self._stager = ThreadPoolExecutor(1)
        while self.written < records:
            self._pass()
        self._stager.shutdown()
        for journal in self.journals:
            journal.close()

    def _bring_up(self, rank: int) -> None:
        write = self.journals[rank].write
        region = RegionFacts(_PAGE_BYTES, _PAGE_BYTES, 4096)
        layers = _LAYERS // _GROUPS
        groups = [
            GroupFacts(g, None if g == 0 else 512, list(range(g * layers, (g + 1) * layers)), 4096, _PAGE_BYTES, [region])
            for g in range(_GROUPS)
        ]  # fmt: skip
        names = ["start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished"]
        sources = [CallbackSource(name, "/engine/connector.py", 10 * at) for at, name in enumerate(names, 1)]
        write(ConnectorWrapped(Side.WORKER, "engine.Worker", sources, []))
        if rank == 0:
            names = ["get_num_new_matched_tokens", "update_state_after_alloc_by_layer_group", "build_connector_meta"]
            sources = [CallbackSource(name, "/engine/connector.py", 10 * at) for at, name in enumerate(names, 7)]
            write(ConnectorWrapped(Side.SCHEDULER, "engine.Scheduler", sources, []))
            write(StoreCeiling(self._now, "local", None, Direction.LOAD, 1 << 20, 4 << 30, 3 << 30))
        write(RunJoined(self._run, rank, _RANKS))
        write(RegisterCall(*self._call(Callback.REGISTER_KV_CACHE_LAYOUT), _BLOCK, "bfloat16", groups))

    def _call(self, callback: Callback, took_ns: int = 10 * _US) -> tuple[int, int, int, int, None]:
        started, self._now = self._now, self._now + took_ns
        return int(callback), started, self._now, getattr(self, "_step", 0), None

    def _write(self, rank: int, *records: Record) -> None:
        self.written += len(records)
        for record in records:
            self.journals[rank].write(record)

    def _pass(self) -> None:
        fresh = []
        if self._step % _ARRIVAL == 0:
            fresh.append(self._arrive())
        self._step += 1
        running = [*fresh, *self._live]
        positions = [each.offered if each.passes == 0 else each.prompt + each.passes for each in running]
        scheduled = [each.prompt - each.offered if each.passes == 0 else 1 for each in running]
        pages = [(at, each.pages) for at, each in enumerate(running) if each.passes == 0]
        ids = [each.request_id for each in running]
        prompts = [each.prompt for each in fresh]
        head = self._call(Callback.BUILD_CONNECTOR_META, 40 * _US)
        self._write(0, BuildCall(*head, len(fresh), ids, positions, scheduled, prompts, pages, True))
        begin = self._now
        for rank in range(_RANKS):
            self._now = begin
            self._forward(rank, fresh)
        self._stored(fresh)
        self._live = running
        for each in running:
            each.passes += 1
        done, self._live = [e for e in running if e.passes >= _PASSES], [e for e in running if e.passes < _PASSES]
        for each in done:
            head = self._call(Callback.REQUEST_FINISHED_BY_LAYER_GROUP)
            self._write(0, FinishCall(*head, each.request_id, False, None, each.pages))

    def _arrive(self) -> _Live:
        chance, request_id = self._chance, self._next_request
        self._next_request += 1
        prompt = chance.randrange(100, 1600)
        most = (prompt - 1) // _BLOCK
        kind = chance.random()
        blocks = most if kind < 0.5 else chance.randrange(most) if kind < 0.8 and most else 0
        offered = blocks * _BLOCK
        reason = None if blocks == most else MissReason.NOT_STORED if blocks else MissReason.NOT_STAGED
        stored = most * _BLOCK if reason is MissReason.NOT_STAGED else offered
        first = self._next_request * 64 % 3500
        pages = [list(range(first, first + most + 2)) for _ in range(_GROUPS)]
        head = self._call(Callback.GET_NUM_NEW_MATCHED_TOKENS, 60 * _US)
        bound = 0 if reason is MissReason.NOT_STORED else None
        groups = [stored] * _GROUPS
        looked = (head[1] + 5 * _US, head[2] - 5 * _US)
        key = chance.randbytes(16)
        self._write(
            0,
            Lookup(request_id, prompt, 0, stored, offered, offered, groups, bound, reason, 0, *looked, key),
            QueryCall(*head, request_id, None, prompt, 0, offered, False, None, None, None, None),
            AllocCall(*self._call(Callback.UPDATE_STATE_AFTER_ALLOC_BY_LAYER_GROUP), request_id, offered, pages),
        )
        return _Live(request_id, prompt, offered, pages)

    def _forward(self, rank: int, fresh: Sequence[_Live]) -> None:
        write = self._write
        write(rank, BindCall(*self._call(Callback.BIND_CONNECTOR_META), True, 900, b"0123456789abcdef"))
        loads = []
        start = self._call(Callback.START_LOAD_KV, 30 * _US)
        for each in fresh:
            if each.offered:
                begun = start[1]
                loads += self._moved(each, Direction.LOAD, each.loaded, begun, begun + 1_500 * _US, stall_ns=200 * _US)
        if loads:
            write(rank, *loads)
        write(rank, Call(*start))
        times = [self._now + layer * _STEP_NS // 40 for layer in range(_LAYERS)]
        # In seconds, as an engine writes them.
        waits = struct.pack(f"{2 * _LAYERS}d", *(t / 1e9 for begin in times for t in (begin, begin + 2 * _US)))
        saves = struct.pack(
            f"{2 * _LAYERS}d", *((t + 100 * _US) / 1e9 for begin in times for t in (begin, begin + 3 * _US))
        )
        self._now += _STEP_NS * 9 // 10
        write(rank, LayerHooks(self._step, waits, saves, True))
        ended = self._now
        for each in fresh:
            left = range(len(each.loaded), each.prompt // _BLOCK)
            write(rank, *self._moved(each, Direction.SAVE, left, ended, ended + 300 * _US, stall_ns=0))
        write(rank, Call(*self._call(Callback.WAIT_FOR_SAVE, 20 * _US)))
        self._now += 50 * _US
        write(rank, IdlePolls(self._step, 1, 2 * _US, 2 * _US, self._now - 4 * _US, self._now - 2 * _US))

    def _moved(
        self, each: _Live, way: Direction, ordinals: Sequence[int], begin: int, end: int, *, stall_ns: int
    ) -> list[Transfer]:
        if not ordinals:
            return []
        tokens = len(ordinals) * _BLOCK
        return [
            Transfer(
                way, Source.REPORTED, Tier.HOST, each.request_id, self._step, group, [pages[at] for at in ordinals],
                len(ordinals) * _PAGE_BYTES, tokens, begin, end, 20 * _US, 0, 0, end - begin - 20 * _US, stall_ns, None,
            )
            for group, pages in enumerate(each.pages)
        ]  # fmt: skip

    def _key(self, each: _Live, group: int, rank: int) -> bytes:
        return hashlib.blake2b(self._run + struct.pack("<qqq", each.request_id, group, rank), digest_size=16).digest()

    def _stored(self, fresh: Sequence[_Live]) -> None:
        """The stager's work, from its thread."""
        work = []
        for each in fresh:
            for operation, count in (
                (Operation.READ, len(each.loaded)),
                (Operation.PUT, each.prompt // _BLOCK - len(each.loaded)),
            ):
                if count:
                    begun = self._now - 2_000 * _US
                    work += [
                        StoreOperation(
                            operation, Outcome.OK, "local", None, self._key(each, group, rank), each.request_id, group, rank, count,
                            count * _PAGE_BYTES, 1, begun, begun + 900 * _US, 100 * _US, 700 * _US, 100 * _US, "closed", None,
                        )
                        for group in range(_GROUPS)
                        for rank in range(_RANKS)
                    ]  # fmt: skip
        if work:
            self._stager.submit(self._write, 0, *work).result()


def write_journals(directory: Path, records: int, *, runs: int = 4) -> int:
    """Write ``records`` records, or a few more, of several runs below ``directory``: half as ring files, half as archives.

    Returns:
        How many were written.
    """
    written = 0
    for run in range(runs):
        engine = Engine(directory, records // runs, run)
        written += engine.written
        if run % 2:
            readers = [RingReader(journal.path, patience_ns=0) for journal in engine.journals]
            with ArchiveWriter(directory / f"run{run}.tkvarchive") as archive:
                for reader in readers:
                    archive.copy(reader)
            for reader in readers:
                reader.close()
                reader.path.unlink()
    return written

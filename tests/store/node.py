"""A stager by itself, with blocks of made-up content: no scheduler, no worker, no torch."""

from __future__ import annotations

from tracekv_fsspec.arena import Slot
from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import Deployment, namespace_digest
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import Stager
from tracekv_fsspec.store import Deadlines, open_store
from tracekv_fsspec.writer import SaveBlock

DEPLOYMENT = Deployment("m", "torch.float16", 32, bytes(32))
NAMESPACE = namespace_digest(DEPLOYMENT.digest())
FULL, WINDOW = Shard(0, 0), Shard(1, 0)
MIB = 1 << 20
WAIT_S = 30


class Node:
    """One engine's share of the work on a store."""

    def __init__(self, url, page_bytes=None, *, store=None, deadlines=None, options=None, **settings):
        settings = {"arena_bytes": 64 * MIB, "write_queue_bytes": 64 * MIB, "refresh_ms": 3_600_000, **settings}
        self.page_bytes = page_bytes or {FULL: 4096}
        self.settings = Settings(url=url, **settings)
        deadlines = deadlines or Deadlines(2.0, 5.0)
        self.store = store or open_store(url, options, s3_client=self.settings.s3_client, deadlines=deadlines)
        self.stager = Stager(self.settings, self.store, DEPLOYMENT, self.page_bytes)

    def content(self, shard, key):
        size = self.page_bytes[shard]
        return ((key + bytes(shard)) * (size // (len(key) + 2) + 1))[:size]

    def submit(self, keys, namespace=NAMESPACE, request_id=1):
        writer = self.stager.writer
        blocks = []
        for ordinal, key in enumerate(keys):
            for shard, size in self.page_bytes.items():
                slot = writer.reserve(shard, key)
                assert isinstance(slot, Slot), slot
                self.stager.arena.view(slot)[:size] = self.content(shard, key)
                blocks.append(SaveBlock(request_id, namespace, key, ordinal, 32, slot))
        writer.submit(blocks)

    def save(self, keys, namespace=NAMESPACE):
        self.submit(keys, namespace)
        assert self.stager.flush(WAIT_S)

    def stage(self, keys):
        """Read; the ticket, how many blocks are staged, and why not more."""
        ticket = self.stager.reader.stage(keys, 0)
        self.stager.reader.wait(ticket, WAIT_S)
        return ticket, *self.stager.reader.take(ticket)

    def is_right(self, ticket, count):
        return all(
            self.stager.arena.view(slot)[: self.page_bytes[shard]] == self.content(shard, key)
            for shard, slots in ticket.slots.items()
            for key, slot in zip(ticket.keys[:count], slots, strict=False)
        )

    def release(self, ticket, count):
        for slots in ticket.slots.values():
            self.stager.release(slots[:count])


def keys(count, seed=0):
    return [bytes([seed]) + number.to_bytes(15, "big") for number in range(count)]

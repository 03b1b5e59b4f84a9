"""Halves of the persistent connector that ranks load by name, each wrong in one way, and what tests look at in the ranks."""

from __future__ import annotations

from tracekv.contract import current_runtime
from tracekv_fsspec import Worker
from tracekv_fsspec.index import Shard


class SpoilsASlotOnRank1(Worker):
    """Changes a byte of each slot that rank 1 is to load: the highest one of a float, so that the number becomes another."""

    def start_load_kv(self, stream):
        arena, plan = self._seat.arena, self.get_connector_meta()
        if current_runtime().rank == 1:
            for load in plan.loads:
                for number, generation in zip(load.slots, load.generations, strict=True):
                    if load.rank == 1:
                        start, _ = arena.extent(Shard(load.layer_group, 1), number, generation)
                        arena.buffer[start + 3] ^= 0x80
        super().start_load_kv(stream)

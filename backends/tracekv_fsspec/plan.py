"""The metadata of a pass: which slots are copied to which pages, and which pages to which slots. Plain, picklable, no tensors."""

from __future__ import annotations

import msgspec

from tracekv.journal.vocabulary import Tier
from tracekv_fsspec.arena import Slot


class Copy(msgspec.Struct, array_like=True):
    """Whole pages of one request and shard, between the arena and the device.

    Attributes:
        tier: For a load: where the bytes came from before they were in the arena, ``HOST`` if they were there already.
            For a save: ``HOST``, where they go.
        pages: Page slots of ``layer_group``, one per entry of ``slots``.
        slots, generations: Slots of the arena; see ``arena.Slot``.
        tokens: Tokens that these blocks hold.
        queued_ns, read_ns, verify_ns: What staging them cost.
    """

    request_id: int
    layer_group: int
    rank: int
    tier: Tier
    pages: list[int] = []
    slots: list[int] = []
    generations: list[int] = []
    tokens: int = 0
    queued_ns: int = 0
    read_ns: int = 0
    verify_ns: int = 0

    def add(self, page: int, slot: Slot, tokens: int) -> None:
        """One page more, and its slot."""
        self.pages.append(page)
        self.slots.append(slot.number)
        self.generations.append(slot.generation)
        self.tokens += tokens


class StepPlan(msgspec.Struct, array_like=True):
    """What every worker does in pass ``step``. A worker acts on a step once, however often it stays bound.

    Attributes:
        parked: Requests that are parked from now on, as (request id, number of the ticket in the arena's table).
    """

    step: int
    loads: list[Copy]
    saves: list[Copy]
    parked: list[tuple[int, int]] = []

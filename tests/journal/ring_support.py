"""What the tests of the journal share."""

from __future__ import annotations

from tracekv.journal.records import Drop
from tracekv.journal.vocabulary import Direction, DropReason

SMALL = 1 << 16


def drop(number: int, blocks: int = 1) -> Drop:
    """A small record that is known by its number."""
    return Drop(number, Direction.SAVE, DropReason.NO_SPACE, None, None, blocks, 0)

"""Where the per-layer hooks write: the journal's slots, or None while a hook's call isn't the runtime's or isn't wanted.

One object for the process, because every hook of every layer looks here first.
"""

from __future__ import annotations

from tracekv.journal.current import Journal

_NOWHERE = memoryview(bytearray(8)).cast("l")


class Hooks:
    """Strided views of the journal's hook slots, indexed by layer.

    Attributes:
        waits, saves: Where a hook's start goes; None: call the inner hook and write nothing.
        waits_ends, saves_ends: Where its end goes.
        is_off: Whether hooks are left alone until further notice.
    """

    __slots__ = ("_saves", "_waits", "is_off", "saves", "saves_ends", "waits", "waits_ends")

    def __init__(self) -> None:
        self.waits: memoryview | None = None
        self.saves: memoryview | None = None
        self.unbind()

    def bind(self, journal: Journal) -> None:
        """Take the slots of a journal."""
        self._waits, self.waits_ends = journal.waits[::2], journal.waits[1::2]
        self._saves, self.saves_ends = journal.saves[::2], journal.saves[1::2]
        self.is_off = False
        self.resume()

    def unbind(self) -> None:
        """Write nothing any more."""
        self._waits = self._saves = self.waits_ends = self.saves_ends = _NOWHERE
        self.is_off = True
        self.pause()

    def pause(self) -> None:
        """A callback was entered: what is called inside it is the connector's own."""
        self.waits = self.saves = None

    def resume(self) -> None:
        """It was left."""
        if not self.is_off:
            self.waits = self._waits
            self.saves = self._saves


hooks = Hooks()

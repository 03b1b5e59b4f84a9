"""Where the per-layer hooks write: the journal's slots, or None while a hook's call isn't the runtime's or isn't wanted.

One object for the process, because every hook of every layer looks here first.
"""

from __future__ import annotations

from tracekv.journal.current import Journal
from tracekv.journal.layout import MAX_LAYERS

_NOWHERE = memoryview(bytearray(8 * MAX_LAYERS)).cast("d")
_NOTHING = memoryview(bytearray())


class Hooks:
    """Strided views of the journal's hook slots, indexed by layer.

    Attributes:
        waits, saves: Where a hook's start goes; None: call the inner hook and write nothing.
        waits_ends, saves_ends: Where its end goes.
        is_off: Whether hooks are left alone until further notice.
        used: All slots that these views reach, of waits and of saves, as bytes. ``cleared`` are as many zeros.
    """

    __slots__ = (
        "_journal",
        "_layers",
        "_saves",
        "_waits",
        "cleared",
        "is_off",
        "saves",
        "saves_ends",
        "used",
        "waits",
        "waits_ends",
    )

    def __init__(self) -> None:
        self.waits: memoryview[float] | None = None
        self.saves: memoryview[float] | None = None
        self._journal: Journal | None = None
        self._layers = 0
        self.used: tuple[memoryview, memoryview] = (_NOTHING, _NOTHING)
        self.cleared = b""
        self.unbind()

    def bind(self, journal: Journal) -> None:
        """Take the slots of a journal."""
        self._journal = journal
        self.is_off = False
        self._layers = 0
        self._reach(journal, 1)
        self.resume()

    def reach(self, layers: int) -> None:
        """Reach the slots of so many layers at least. The end of a pass reads and clears all that are in reach."""
        if self._journal is not None and layers > self._layers:
            self._reach(self._journal, min(layers, MAX_LAYERS))

    def _reach(self, journal: Journal, layers: int) -> None:
        self._layers = layers
        waits, saves = journal.waits[: 2 * layers], journal.saves[: 2 * layers]
        self._waits, self._saves = waits[::2], saves[::2]
        # All of them: a hook that is under way when these are set anew must find its end's slot.
        self.waits_ends, self.saves_ends = journal.waits[1::2], journal.saves[1::2]
        self.used = waits.cast("B"), saves.cast("B")
        self.cleared = bytes(16 * layers)
        if self.waits is not None:
            self.resume()

    def unbind(self) -> None:
        """Write nothing any more."""
        self._journal = None
        self._waits = self._saves = self.waits_ends = self.saves_ends = _NOWHERE
        self.used, self.cleared = (_NOTHING, _NOTHING), b""
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

"""Keys that tell KV apart which differs. Judged where keys are reported."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.journal.records import StoreOperation
from tracekv.journal.vocabulary import Operation, Outcome
from tracekv.rules.events import Rekeyed, Stored
from tracekv.rules.model import Hit, Limits, Rule
from tracekv.rules.state import MOST_IDS, Keyed, Recent


class _KeyRule(Rule):
    """Compares what one key stood for before with what it stands for now."""

    def on_rekeyed(self, event: Rekeyed) -> Iterator[Hit]:
        """A query whose key was reported before."""
        differing = self.differs(event.before, event.now)
        if differing:
            yield self.finding(event.record, event.before.record, event.now.lookup, differs=differing)

    def differs(self, before: Keyed, now: Keyed) -> list[str]:
        """What the key should have told apart."""
        raise NotImplementedError


class KeyLacksTheTenant(_KeyRule):
    """Keys differ where the salt, the images or the adapter do.

    Contract: the salt must be mixed into keys; so must everything else that changes KV (contract.md 5, 8, 10 S12).
    Runtime: none; a request is answered from another tenant's, image's or adapter's KV.
    Fix: begin the chain of digests with salt, multimodal digests and LoRA identity (``tracekv.contract.reading`` has them), or
        leave such requests alone.
    """

    id = "S12"

    def differs(self, before: Keyed, now: Keyed) -> list[str]:
        """Salt, images, and the adapter within one engine: its ids count there only."""
        found = []
        if before.salt != now.salt:
            found.append("salt")
        if before.image != now.image:
            found.append("image")
        if before.adapter != now.adapter and before.run == now.run:
            found.append("adapter")
        return found


class KeyLacksTheModel(_KeyRule):
    """Keys differ where the caches do.

    Contract: model, dtype, block and layout change what a page holds (contract.md 8, 10 S12).
    Runtime: none; pages are filled with another model's bytes.
    Fix: mix an identity of the model and a fingerprint of the layout into the key.
    """

    id = "S12c"
    follows = frozenset({"S12"})

    def differs(self, before: Keyed, now: Keyed) -> list[str]:
        """The layout, which every rank's leader registers."""
        return ["layout"] if None not in (before.layout, now.layout) and before.layout != now.layout else []


class KeyLacksThePrefix(_KeyRule):
    """Keys differ where the tokens before a block do.

    Contract: KV of a block depends on everything before it (contract.md 5, 10 S12).
    Runtime: none; a block of another text is served.
    Fix: chain the digests: each block's key is over the key before it and its tokens.
    """

    id = "S12d"
    follows = frozenset({"S12", "S12c"})

    def differs(self, before: Keyed, now: Keyed) -> list[str]:
        """One key at two places can't be over two equal prefixes."""
        return ["position"] if before.layout == now.layout and before.block != now.block else []


class ObjectOfSeveral(Rule):
    """An object holds one rank's pages of one layer group.

    Contract: shards and layer groups hold different KV of the same tokens (contract.md 8, 10 S12).
    Runtime: none; one rank or group is served the other's bytes.
    Fix: put layer group and rank of world into the object's name.
    """

    id = "S12b"

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._known: Recent[bytes, StoreOperation] = Recent(MOST_IDS)

    def on_stored(self, event: Stored) -> Iterator[Hit]:
        """An object was written."""
        record = event.record
        if record.operation is not Operation.PUT or record.outcome is not Outcome.OK or record.key is None:
            return
        before = self._known.get(record.key)
        self._known[record.key] = record
        if before is None:
            return
        differing = [
            name
            for name in ("rank", "layer_group")
            if None not in (getattr(before, name), getattr(record, name))
            and getattr(before, name) != getattr(record, name)
        ]
        if differing:
            yield self.finding(record, before, differs=differing)

"""What travels from the leader to every rank's worker."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.rules.events import Bind, Failed
from tracekv.rules.model import EMPTY_PICKLE, By, Hit, Rule, Severity


class MetadataCannotBePickled(Rule):
    """Metadata can be pickled.

    Contract: ``build_connector_meta``'s answer is broadcast to every rank (contract.md 1.4 step 6, 10 S7).
    Runtime: with one rank it is handed over as it is, and works; with two, rank 0 raises and rank 1 waits in the broadcast.
    Fix: plain containers, numbers and bytes; no locks, events, tensors on a device, or closures.
    """

    id = "S7"

    def on_failed(self, event: Failed) -> Iterator[Hit]:
        """A build that had succeeded failed on its way."""
        if event.built is not None:
            yield self.finding(event.record, event.built, error=event.record.error)


class MetadataIsLarge(Rule):
    """Metadata is small.

    Contract: it is pickled, broadcast and unpickled in each pass, on every rank's loop thread (contract.md 1.4 step 6, 10 S7).
    Runtime: every pass waits for it.
    Fix: send page slots and keys; let bytes go another way.
    """

    id = "S7b"
    severity = Severity.SUSPECT
    once = True

    def on_bind(self, event: Bind) -> Iterator[Hit]:
        """Metadata was bound."""
        nbytes = event.record.nbytes
        if nbytes is not None and nbytes > self.limits.metadata_bytes:
            yield self.finding(event.record, nbytes=nbytes, limit=self.limits.metadata_bytes)


class MetadataIsEmptyOnARank(Rule):
    """Metadata is not empty on a rank where the leader's has content.

    Contract: one broadcast reaches every rank; connectors that send bytes take empty ones for "nothing" (contract.md 10 S7).
    Runtime: that rank loads nothing, its peers do; tensor-parallel shards mix old and new KV.
    Fix: look for a rank that replaces the metadata; check what ``bind_connector_meta`` is given there.
    """

    id = "S7d"
    by = By.RUNTIME

    def on_bind(self, event: Bind) -> Iterator[Hit]:
        """Metadata was bound."""
        nbytes = event.record.nbytes
        if event.built is not None and nbytes is not None and nbytes <= EMPTY_PICKLE:
            yield self.finding(event.record, event.built, nbytes=nbytes, rank=event.source.rank)


class MetadataDiffers(Rule):
    """Every rank binds the same metadata.

    Contract: it is one broadcast (contract.md 10 S7).
    Runtime: ranks load and save different blocks: their shards no longer belong together.
    Fix: look for a rank that builds metadata of its own, or changes what it was given.
    """

    id = "S7c"
    by = By.RUNTIME
    follows = frozenset({"S7d", "S15"})

    def on_bind(self, event: Bind) -> Iterator[Hit]:
        """Metadata was bound."""
        for other, bound in event.others:
            digests = event.record.digest, bound.digest
            if None not in digests and digests[0] != digests[1]:
                yield self.finding(event.record, bound, rank=event.source.rank, other_rank=other.rank)
                return

"""Pages that are touched when they are no longer, or not yet, the request's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tracekv.journal.records import Transfer
from tracekv.rules.events import Moved, Settled
from tracekv.rules.model import Hit, Rule
from tracekv.rules.state import Request, Source

_MOST_NAMED = 16


class PageReusedUnderTransfer(Rule):
    """No transfer touches a page that another request has been given.

    Contract: pages are the request's until it leaves; a cancelled request leaves without a word (contract.md 1.6, 10 W9).
    Runtime: gives the pages away while the transfer runs: another request's KV is overwritten, or stored under a wrong key.
    Fix: touch pages between ``start_load_kv`` and ``wait_for_save`` only, in passes that list the request.
    """

    id = "W9b"
    follows = frozenset({"W9"})

    def on_late(self, event: Moved) -> Iterator[Hit]:
        """A transfer."""
        record, request = event.record, event.request
        if request is None or not request.lost_pages or not request.is_whole or not _is_comparable(event.source):
            return
        claims = event.run.claims.get(record.layer_group, {})
        shift = event.source.shift_ns
        for page in record.pages:
            owner, since = claims.get(page, (request, 0))
            if owner is not request and record.started_ns + shift < since < record.ended_ns + shift:
                yield self.finding(
                    record, owner.alloc, page=page, layer_group=record.layer_group, given_to=owner.request_id,
                    direction=record.direction.value,
                )  # fmt: skip
                return


class TransferAfterTheEnd(Rule):
    """No transfer touches a request's pages after it has left.

    Contract: ``request_finished`` that answers False frees the pages; so does the return of the id (contract.md 10 W9).
    Runtime: the pages may be another request's by then.
    Fix: answer True and return the id when the copy is done; or copy within the pass.
    """

    id = "W9"

    def on_late(self, event: Moved) -> Iterator[Hit]:
        """A transfer of a request that has left."""
        if event.request is not None:
            yield from self._judge(event.request, [(event.source, event.record)])

    def on_left(self, event: Settled) -> Iterator[Hit]:
        """A request has gone: what was reported before its end was."""
        yield from self._judge(event.request, event.request.transfers)

    def _judge(self, request: Request, transfers: Iterable[tuple[Source, Transfer]]) -> Iterator[Hit]:
        if not request.left_ns or not request.is_whole:
            return
        for source, transfer in transfers:
            late_ns = transfer.ended_ns + source.shift_ns - request.left_ns
            if late_ns > 0 and transfer.error is None and _is_comparable(source):
                yield self.finding(
                    transfer, request.finish, late_ns=late_ns, pages=transfer.pages[:_MOST_NAMED],
                    layer_group=transfer.layer_group, direction=transfer.direction.value,
                )  # fmt: skip


def _is_comparable(source: Source) -> bool:
    """Clocks of two machines agree to milliseconds, which is too little here."""
    leader = source.run.leader if source.run is not None else None
    return leader is None or leader.boot_id == source.boot_id

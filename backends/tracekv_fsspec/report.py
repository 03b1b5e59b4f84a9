"""How an operation on a store comes on the trace: what it took is the wrappers' tally, what it was for its caller says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import tracekv
from tracekv.journal.vocabulary import Operation, Outcome
from tracekv_fsspec.format import BadObject
from tracekv_fsspec.paths import path_digest
from tracekv_fsspec.store import Store, StoreError
from tracekv_fsspec.tally import tally


class Report:
    """What a caller adds to its operation's record while the block runs.

    Attributes:
        transfer_ns: Left at 0, it is the time of the whole block, less waiting and verifying.
    """

    __slots__ = ("blocks", "error", "nbytes", "outcome", "queued_ns", "transfer_ns", "verify_ns")

    def __init__(self, nbytes: int, blocks: int, queued_ns: int) -> None:
        self.nbytes = nbytes
        self.blocks = blocks
        self.queued_ns = queued_ns
        self.transfer_ns = 0
        self.verify_ns = 0
        self.outcome = Outcome.OK
        self.error: str | None = None

    def failed(self, error: StoreError | BadObject) -> None:
        """Say how the operation ended."""
        self.outcome, self.error = error.outcome, str(error)


@contextmanager
def reported(
    store: Store,
    operation: Operation,
    path: str,
    *,
    nbytes: int = 0,
    blocks: int = 0,
    queued_ns: int = 0,
    request_id: int | None = None,
    rank: int = 0,
) -> Iterator[Report]:
    """Report the block as one operation on ``path``; what it raises passes through."""
    report = Report(nbytes, blocks, queued_ns)
    tally.reset()
    started = perf_counter_ns()
    try:
        yield report
    except (StoreError, BadObject) as error:
        report.failed(error)
        raise
    finally:
        took = perf_counter_ns() - started
        tracekv.store_operation(
            operation,
            report.outcome,
            store.engine,
            started_ns=started,
            nbytes=report.nbytes,
            blocks=report.blocks,
            attempts=tally.attempts,
            requests=tally.requests,
            bucket=store.bucket,
            key=path_digest(path),
            request_id=request_id,
            rank=rank,
            queued_ns=report.queued_ns + tally.paced_ns,
            transfer_ns=max(0, (report.transfer_ns or took - report.verify_ns) - tally.paced_ns),
            verify_ns=report.verify_ns,
            breaker=tally.breaker,
            error=report.error,
        )

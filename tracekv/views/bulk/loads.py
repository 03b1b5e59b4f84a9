"""What the loads of a large run come to, by request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tracekv.journal.arrays import np, npt
from tracekv.journal.columns import Columns, Ints
from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction, Source, Tier, Word
from tracekv.views.requests import is_load
from tracekv.views.runs import Segment


class Loads(NamedTuple):
    """Reported loads of one request, some of them or all."""

    request_id: int
    last_ended_ns: int
    nbytes: int
    stall_ns: int


def loads_of(segment: Segment) -> Iterator[Loads]:
    """The loads of a process; a request may come several times."""
    for found in segment.batches_by_kind(Transfer):
        payloads = found[Transfer].payloads
        columns = Columns(Transfer, payloads)
        directions, sources = columns.words(Direction), columns.words(Source)
        columns.words(Tier)
        requests, _, _ = columns.ints(), columns.ints(), columns.ints()
        columns.skip()
        nbytes, _, _, ended = (columns.ints() for _ in range(4))
        *_, stalls = (columns.ints() for _ in range(5))
        for at in np.flatnonzero(columns.odd).tolist():
            record = segment.process.decoded(payloads[at])
            if isinstance(record, Transfer) and is_load(record):
                yield Loads(record.request_id, record.ended_ns, record.nbytes, record.stall_ns)
        are_loads = ~columns.odd & _is(Direction.LOAD, *directions) & _is(Source.REPORTED, *sources)
        rows = np.flatnonzero(are_loads)
        rows = rows[np.argsort(requests[rows], kind="stable")]
        if not rows.size:
            continue
        first = np.flatnonzero(np.diff(requests[rows], prepend=requests[rows[0]] - 1))
        yield from map(
            Loads,
            requests[rows[first]].tolist(),
            np.maximum.reduceat(ended[rows], first).tolist(),
            np.add.reduceat(nbytes[rows], first).tolist(),
            np.add.reduceat(stalls[rows], first).tolist(),
        )


def _is(wanted: Word, which: Ints, words: Sequence[Word]) -> npt.NDArray[np.bool_]:
    return which == words.index(wanted) if wanted in words else np.zeros(len(which), bool)

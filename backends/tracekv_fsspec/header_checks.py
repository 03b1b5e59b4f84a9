"""Whether a segment is the one that its manifest names: its header is checked once, by whoever reads from it first."""

from __future__ import annotations

import threading

from tracekv.journal.vocabulary import MissReason, Outcome
from tracekv_fsspec.format import BadObject, parse_header
from tracekv_fsspec.index import Segment


class HeaderCheck:
    """What became of a segment's header, for those who read other parts of the segment at the same time.

    Attributes:
        done: Set once it is known.
        reason: Why blocks of the segment are misses; None where its header is right.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.reason: MissReason | None = MissReason.ERROR


class HeaderChecks:
    """The checks that are under way. Any thread may call.

    Args:
        deployment: Digest that a segment's header has to carry.
        layout: Fingerprint that it has to carry.
    """

    def __init__(self, deployment: bytes, layout: bytes) -> None:
        self._deployment = deployment
        self._layout = layout
        self._lock = threading.Lock()
        self._under_way: dict[Segment, HeaderCheck] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, segment: Segment) -> tuple[HeaderCheck | None, HeaderCheck | None]:
        """Who finds out whether a segment's header is right, where that isn't known.

        Returns:
            The check that is the caller's to make and to :meth:`end`; and the one of another thread, to wait for.
        """
        with self._lock:
            if segment.is_checked:
                return None, None
            theirs = self._under_way.get(segment)
            if theirs is not None:
                return None, theirs
            mine = self._under_way[segment] = HeaderCheck()
            return mine, None

    def end(self, segment: Segment, mine: HeaderCheck) -> None:
        """The caller's check is over, whatever became of it."""
        with self._lock:
            del self._under_way[segment]
        mine.done.set()

    def check(self, segment: Segment, data: memoryview) -> None:
        """Hold a segment's header against what its manifest says.

        Raises:
            BadObject: It is damaged, or another segment's.
        """
        header = parse_header(data)
        found = (
            header.deployment, header.layout, header.namespace, header.writer, header.sequence, header.rank,
            header.world, header.total_bytes,
        )  # fmt: skip
        expected = (
            self._deployment, self._layout, segment.namespace, *segment.commit, segment.rank, segment.world, segment.size,
        )  # fmt: skip
        if found != expected:
            raise BadObject(Outcome.FOREIGN, "segment that isn't the one its manifest names")
        segment.is_checked = True

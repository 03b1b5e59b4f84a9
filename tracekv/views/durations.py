"""How long calls took, as a histogram that merges with others and from which percentiles are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

#: Buckets per doubling of a duration: half a bucket is 1.6 %.
_BUCKETS = 32


class Durations(msgspec.Struct):
    """A histogram of durations whose size doesn't grow with the calls.

    Attributes:
        buckets: ``{bucket: calls}``; bucket ``i`` of doubling ``d`` (``d * 32 + i``) begins at ``2**d * (1 + i / 32)`` ns.
    """

    calls: int = 0
    total_ns: int = 0
    max_ns: int = 0
    buckets: dict[int, int] = {}

    def add(self, duration_ns: int, calls: int = 1) -> None:
        """Count ``calls`` calls of ``duration_ns`` each."""
        duration_ns = max(0, duration_ns)
        self.calls += calls
        self.total_ns += duration_ns * calls
        self.max_ns = max(self.max_ns, duration_ns)
        bucket = _bucket(duration_ns)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + calls

    def add_all(self, durations_ns: Mapping[int, int]) -> None:
        """Count calls, ``{duration: calls}``."""
        buckets = self.buckets
        for duration_ns, calls in durations_ns.items():
            duration_ns = max(0, duration_ns)
            self.calls += calls
            self.total_ns += duration_ns * calls
            if duration_ns > self.max_ns:
                self.max_ns = duration_ns
            bucket = _bucket(duration_ns)
            buckets[bucket] = buckets.get(bucket, 0) + calls

    def merge(self, other: Durations) -> None:
        """Add another process's calls."""
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        for bucket, calls in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + calls

    def percentile_ns(self, percent: float) -> int:
        """The duration that ``percent`` % of the calls don't exceed (nearest rank), to within 1.6 %; 0 without calls."""
        rank = max(1, -(-self.calls * percent // 100))
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return min(_middle_ns(bucket), self.max_ns)
        return 0

    @property
    def p50_ns(self) -> int:
        """Median."""
        return self.percentile_ns(50)

    @property
    def p99_ns(self) -> int:
        """99th percentile."""
        return self.percentile_ns(99)


@lru_cache(1 << 16)
def _bucket(duration_ns: int) -> int:
    if duration_ns < 1:
        return 0
    doubling = duration_ns.bit_length() - 1
    return doubling * _BUCKETS + ((duration_ns * _BUCKETS) >> doubling) - _BUCKETS


def _middle_ns(bucket: int) -> int:
    doubling, part = divmod(bucket, _BUCKETS)
    return ((2 * _BUCKETS + 2 * part + 1) << doubling) // (2 * _BUCKETS)

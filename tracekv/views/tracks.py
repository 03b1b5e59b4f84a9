"""Where bars of a lane lie when they overlap: on tracks, as few as can be."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.views.timeline import Lane

#: Numbers of tracks rise as their lanes stand, and are unique over all processes that begin this far from each other.
TRACKS_OF_A_PROCESS = 10_000_000
_TRACKS_OF_A_ROW = 500_000
_TRACKS_OF_A_GROUP = 1_000


class Tracks:
    """Gives each bar a track on which it overlaps no other.

    Args:
        first: Below the numbers that it gives.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._given: dict[int, int] = {}
        #: Lane -> (track, end of its last bar).
        self._of_lane: dict[Lane, list[tuple[int, int]]] = {}

    def place(self, lane: Lane, start_ns: int, end_ns: int) -> int:
        """The number of the track for a bar. A track is free again where its last bar ended before this one began."""
        among = self.among(lane, start_ns, end_ns)
        return self._of_lane[lane][among][0]

    def among(self, lane: Lane, start_ns: int, end_ns: int) -> int:
        """As :meth:`place`, counted among the tracks of the lane from 0."""
        tracks = self._of_lane.setdefault(lane, [])
        free = [place for place, (_, end) in enumerate(tracks) if end <= start_ns]
        if free:
            # The one that was busy for longest leaves the others to bars that began earlier.
            place = max(free, key=lambda place: tracks[place][1])
            tracks[place] = (tracks[place][0], end_ns)
            return place
        base = self._first + lane.row * _TRACKS_OF_A_ROW + (lane.group + 2) * _TRACKS_OF_A_GROUP
        self._given[base] = given = self._given.get(base, 0) + 1
        tracks.append((base + given, end_ns))
        return len(tracks) - 1

    def count(self, lane: Lane) -> int:
        """How many tracks a lane has."""
        return len(self._of_lane.get(lane, ()))

    def all(self) -> Iterator[tuple[Lane, int, int]]:
        """Lane, number among its tracks from 0, and track, in the order in which they stand."""
        for lane in sorted(self._of_lane):
            for place, (track, _) in enumerate(self._of_lane[lane]):
                yield lane, place, track

"""Where segments and manifests live: the seam between the backend and any store.

An engine (``engines``) is one implementation; what holds for all of them (retries, pacing, the breaker, the fork guard: ``wrappers``)
wraps this seam from outside.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tracekv.journal.vocabulary import Outcome, Tier
from tracekv_fsspec import protocols
from tracekv_fsspec.store_errors import AlreadyExists, SlowDown, StoreError, StoreUnusable

#: Prefix of files that are still being written. No listing shows them.
UNFINISHED = ".unfinished-"
#: Ranges that follow each other are one request, up to so many bytes (a batch of the reader, and the header before it).
MERGED_BYTES = (4 << 20) + 4096

#: Of a deadline, the part that one try may take, so that a stalled one leaves time for another (see ``wrappers.retry``).
TRY_SHARE = 0.4

Data = bytes | bytearray | memoryview


class Range(NamedTuple):
    """``length`` bytes at ``offset``."""

    offset: int
    length: int


class Entry(NamedTuple):
    """An object: its path below the root, its size in bytes, and when it was written (seconds since 1970; 0: not told)."""

    path: str
    size: int
    modified: float = 0.0


class Store(Protocol):
    """Objects below a root, by path. Calls may block and come from several of the stager's threads, from no other.

    Every method raises :class:`StoreError`, whose outcome says why.

    Attributes:
        engine: What reports call it: ``local``, ``s3``, ``memory`` or the URL's protocol.
        tier: Where KV that is read from here comes from.
        bucket: The bucket of an object store, else None.
        url: For messages: no user, no password.
        is_create_atomic: Whether of two writers that create one path at the same time exactly one wins.
        lists_after: Whether a listing behind a path costs no more than what it finds.
    """

    engine: str
    tier: Tier
    bucket: str | None
    url: str
    is_create_atomic: bool
    lists_after: bool

    def put(self, path: str, *parts: Data, create_only: bool) -> None:
        """Write a whole object, the parts one after the other; a reader sees all of it or nothing.

        Raises:
            AlreadyExists: ``create_only``, and there is one. It is left as it is.
        """

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill each buffer with its range, exactly. ``ranges`` are in rising order; neighbours are read at once.

        Raises:
            StoreError: ``TRUNCATED`` where the object ends before a range does.
        """

    def sizes(self, paths: Sequence[str]) -> builtins.list[int | None]:
        """How large each object is now, in one round; None for those that aren't there."""

    def list(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """Objects whose path begins with the folder ``prefix``, in rising order of path, behind ``after``."""

    def delete(self, path: str) -> None:
        """Remove an object; none there is no error."""

    def close(self) -> None:
        """Give connections back. Further calls are errors."""


class Deadlines(NamedTuple):
    """How long an operation may take with all its tries, in seconds, before it counts as failed."""

    read_s: float = 5.0
    write_s: float = 30.0


def open_store(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    s3_client: str = "obstore",
    deadlines: Deadlines | None = None,
) -> Store:
    """Open the store at an fsspec URL, with everything around it that makes a failing one bearable.

    Args:
        options: fsspec's storage options for the protocol.
        s3_client: ``obstore`` or ``s3fs``.

    Raises:
        StoreUnusable: No such protocol, or its package is missing, or it can't express an option.
    """
    from tracekv_fsspec.wrappers import guarded

    deadlines = deadlines or Deadlines()
    return guarded(open_engine(url, options, s3_client=s3_client, deadlines=deadlines), deadlines)


def open_engine(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    s3_client: str = "obstore",
    deadlines: Deadlines | None = None,
) -> Store:
    """The bare engine for a URL: one try per call; for :func:`open_store`, benchmarks and tests.

    Raises:
        StoreUnusable: As :func:`open_store`.
    """
    options = options or {}
    deadlines = deadlines or Deadlines()
    protocol = protocols.protocol_of(url)
    if "::" not in url:
        if protocol in protocols.LOCAL:
            from tracekv_fsspec.engines.local import open_local

            return open_local(url, options)
        if protocol in protocols.S3 and s3_client == "obstore":
            from tracekv_fsspec.engines.s3 import open_s3

            return open_s3(url, options, deadlines)
    from tracekv_fsspec.engines.generic import open_generic

    return open_generic(url, options, deadlines)


def read_whole(store: Store, path: str, size: int) -> bytes:
    """A whole object of the size that the listing gave."""
    data = bytearray(size)
    if size:
        view = memoryview(data)
        ranges = [Range(at, min(MERGED_BYTES, size - at)) for at in range(0, size, MERGED_BYTES)]
        store.read(path, ranges, [view[at : at + length] for at, length in ranges])
    return bytes(data)


def runs(ranges: Sequence[Range]) -> Iterator[tuple[int, int]]:
    """Index ranges ``[first, end)`` of neighbours that are read at once."""
    first = begin = stop = 0
    for number, (offset, length) in enumerate(ranges):
        if offset != stop or offset + length - begin > MERGED_BYTES or not number:
            if number:
                yield first, number
            first, begin = number, offset
        stop = offset + length
    if ranges:
        yield first, len(ranges)


def check_usable(store: Store) -> None:
    """Write, read, list and remove a small object, so that a store that can't be used is known at start-up.

    Raises:
        StoreUnusable: With what failed, where, and what to do.
    """
    path = f"probe/{secrets.token_hex(8)}"
    data = secrets.token_bytes(32)
    doing = "written to"
    try:
        store.put(path, data, create_only=True)
        doing = "read from"
        same = read_whole(store, path, len(data)) == data
        doing = "listed"
        listed = [entry.path for entry in store.list("probe/")]
        doing = "deleted from"
        store.delete(path)
    except StoreError as error:
        raise StoreUnusable(
            f"tracekv: the store TRACEKV_FSSPEC__URL={store.url} can't be {doing} ({error.outcome.value}): {error}. "
            f"{_ADVICE.get(error.outcome, _ADVICE[Outcome.ERROR])}"
        ) from None
    if not same or path not in listed:
        what = "gives other bytes than were written" if not same else "doesn't list what was written"
        raise StoreUnusable(
            f"tracekv: the store TRACEKV_FSSPEC__URL={store.url} {what}. Use one that is consistent after a write."
        )


_ADVICE = {
    Outcome.DENIED: "Check the permissions of the folder or, for S3, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the "
    "role, and that it may put, get, list and delete objects there.",
    Outcome.MISSING: "The bucket or folder doesn't exist: create it, or name another in TRACEKV_FSSPEC__URL.",
    Outcome.UNAVAILABLE: "Check that the server runs and that AWS_ENDPOINT_URL (or endpoint_url in "
    "TRACEKV_FSSPEC__STORAGE_OPTIONS) names it.",
    Outcome.TIMEOUT: "The server doesn't answer: check its address, AWS_ENDPOINT_URL and the network.",
    Outcome.NO_SPACE: "Make room, or name another place in TRACEKV_FSSPEC__URL.",
    Outcome.ERROR: "Check TRACEKV_FSSPEC__URL and TRACEKV_FSSPEC__STORAGE_OPTIONS.",
}

__all__ = [
    "AlreadyExists",
    "Data",
    "Deadlines",
    "Entry",
    "Range",
    "SlowDown",
    "Store",
    "StoreError",
    "StoreUnusable",
    "check_usable",
    "open_engine",
    "open_store",
    "read_whole",
    "runs",
]

"""S3 through obstore: blocking calls from the caller's threads, which release the interpreter's lock while they run."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from tracekv.journal.vocabulary import Outcome, Tier
from tracekv_fsspec import protocols
from tracekv_fsspec.s3_options import S3Access, s3_access
from tracekv_fsspec.store import TRY_SHARE, Data, Deadlines, Entry, Range, runs
from tracekv_fsspec.store_errors import StoreError, StoreUnusable, translating
from tracekv_fsspec.tally import Progress, tally

_HEADS = 16
#: A body is taken over in pieces of about so much; as one object it would be put together first, which is another copy.
_CHUNK = 256 << 10
_CONNECT_S = 3.0


def open_s3(url: str, options: Mapping[str, Any], deadlines: Deadlines) -> S3Store:
    """The store at ``s3://bucket/prefix``.

    Raises:
        StoreUnusable: obstore isn't installed, or can't express an option.
    """
    shown = protocols.shown_url(url)
    bucket, _, prefix = url.split("://", 1)[1].partition("/")
    try:
        from obstore.store import S3Store as Client
    except ImportError:
        raise StoreUnusable(
            f"tracekv: TRACEKV_FSSPEC__URL={shown} needs obstore: install tracekv[s3], "
            "or choose another client with TRACEKV_FSSPEC__S3_CLIENT=s3fs."
        ) from None
    access = s3_access(options, shown)
    hidden = protocols.Secrets(url, options)

    def client(seconds: float) -> Any:
        return Client(
            bucket,
            prefix=prefix.strip("/") or None,
            config=access.config,
            # The time covers the whole body (storage.md section 6, trap 17), so reads and writes have clients of their own.
            client_options={
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, seconds)),
                **access.client_options,
                "timeout": timedelta(seconds=seconds),
            },
            retry_config={"max_retries": 0},  # a range is tried again as a whole, by our own wrapper
            credential_provider=access.credentials,
        )

    try:
        clients = client(deadlines.read_s * TRY_SHARE), client(deadlines.write_s * TRY_SHARE)
    except Exception as error:  # obstore's own classes and ValueError, for a value that it doesn't take
        text = hidden.hidden_in(str(error).split("\n", 1)[0])
        raise StoreUnusable(
            f"tracekv: TRACEKV_FSSPEC__URL={shown} can't be opened: {text}. "
            "Check TRACEKV_FSSPEC__STORAGE_OPTIONS and the AWS_* variables."
        ) from None
    return S3Store(bucket, shown, hidden, *clients, access=access)


class S3Store:
    """A bucket, or what lies below a prefix of one. Create-only is ``If-None-Match: *``."""

    engine = "s3"
    tier = Tier.OBJECT
    is_create_atomic = True
    lists_after = True

    def __init__(
        self, bucket: str, url: str, hidden: protocols.Secrets, reading: Any, writing: Any, *, access: S3Access
    ) -> None:
        import obstore

        self._api: Any = obstore
        self._reading = reading
        self._writing = writing
        self._hidden = hidden
        self._access = access
        self._heads: ThreadPoolExecutor | None = None
        self.bucket: str | None = bucket
        self.url = url

    def put(self, path: str, *parts: Data, create_only: bool) -> None:
        """Write a whole object with one PUT: there are no parts of it that a crash could leave behind."""
        # Joined here, a segment would be copied with the interpreter's lock held.
        data = parts[0] if len(parts) == 1 else list(parts)
        mode = "create" if create_only else "overwrite"
        tally.requests += 1
        with self._translating("write", path):
            self._api.put(self._writing, path, data, mode=mode, use_multipart=False)

    def read(self, path: str, ranges: Sequence[Range], into: Sequence[memoryview]) -> None:
        """Fill each buffer with its range, exactly."""
        progress = tally.progress
        if progress is not None:
            progress.restart()
        with self._translating("read", path):
            for first, end in runs(ranges):
                start = ranges[first].offset
                length = ranges[end - 1].offset + ranges[end - 1].length - start
                tally.requests += 1
                answer = self._api.get(self._reading, path, options={"range": (start, start + length)})
                came = _copy(answer.stream(min_chunk_size=_CHUNK), into, first, end, progress)
                if came != length:  # past the end it is silently shortened (trap 16)
                    raise StoreError(Outcome.TRUNCATED, f"{path} gave {came} bytes instead of {length} from {start} on")

    def sizes(self, paths: Sequence[str]) -> builtins.list[int | None]:
        """How large each object is now, by as many HEADs at once; None for those that aren't there."""
        tally.requests += len(paths)
        if len(paths) == 1:
            return [self._size(paths[0])]
        if self._heads is None:
            self._heads = ThreadPoolExecutor(_HEADS, thread_name_prefix="tracekv-head")
        return list(self._heads.map(self._size, paths))

    def list(self, prefix: str, *, after: str = "") -> Sequence[Entry]:
        """Objects below the folder ``prefix``, in rising order of path, behind ``after`` (S3's StartAfter)."""
        with self._translating("list", prefix):
            found: list[Entry] = []
            for page in self._api.list(
                self._reading, prefix.rstrip("/") or None, offset=after or None, chunk_size=1000
            ):
                tally.requests += 1
                found += [Entry(item["path"], item["size"], item["last_modified"].timestamp()) for item in page]
            tally.requests += not found
        return sorted(found)

    def delete(self, path: str) -> None:
        """Remove an object; none there is no error."""
        tally.requests += 1
        with self._translating("delete", path), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._writing, path)

    def close(self) -> None:
        """Connections go with their clients, which nobody else has."""
        if self._heads is not None:
            self._heads.shutdown(wait=False)
        self._reading = self._writing = None

    def _size(self, path: str) -> int | None:
        with self._translating("look at", path):
            try:
                return int(self._api.head(self._reading, path)["size"])
            except FileNotFoundError:
                return None

    def _translating(self, verb: str, path: str) -> contextlib.AbstractContextManager[None]:
        return translating(f"{verb} {self.url.rstrip('/')}/{path}", self._hidden)


def _copy(chunks: Iterable[Any], views: Sequence[memoryview], number: int, end: int, progress: Progress | None) -> int:
    """Fill ``views[number:end]`` with what comes, piece by piece while it is in the processor's cache; how many bytes came."""
    came = at = 0
    for chunk in chunks:
        data = memoryview(chunk)
        came += len(data)
        while len(data) and number < end:
            view = views[number]
            size = min(len(view) - at, len(data))
            view[at : at + size] = data[:size]
            data = data[size:]
            at += size
            if progress is not None:
                progress.filled(number, at)
            if at == len(view):
                number, at = number + 1, 0
    return came

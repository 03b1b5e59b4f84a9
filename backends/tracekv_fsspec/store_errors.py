"""What can go wrong with a store, as one closed set of outcomes, whatever the protocol raised."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

from tracekv.journal.vocabulary import DropReason, MissReason, Outcome
from tracekv_fsspec.protocols import Secrets


class StoreError(Exception):
    """An operation that failed, and why. The message has no credentials and no KV in it."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class AlreadyExists(StoreError):
    """A create-only write found an object in its place."""

    def __init__(self, message: str) -> None:
        super().__init__(Outcome.EXISTS, message)


class StoreUnusable(RuntimeError):
    """The store can't be used at all; found at start-up, with what to do about it."""


#: What a failed read means for the block that was looked for.
MISS_OF = {
    Outcome.MISSING: MissReason.NOT_STORED,
    Outcome.TRUNCATED: MissReason.CORRUPT,
    Outcome.ALTERED: MissReason.CORRUPT,
    Outcome.FOREIGN: MissReason.CORRUPT,
    Outcome.VERSION: MissReason.CORRUPT,
}

#: What a failed write means for the blocks that were to be saved.
DROP_OF = {
    Outcome.NO_SPACE: DropReason.NO_SPACE,
    Outcome.DENIED: DropReason.STORE_REFUSED,
    Outcome.MISSING: DropReason.STORE_REFUSED,
    Outcome.UNAVAILABLE: DropReason.STORE_DOWN,
    Outcome.TIMEOUT: DropReason.STORE_DOWN,
}

_BY_ERRNO = {
    errno.ENOSPC: Outcome.NO_SPACE,
    errno.EDQUOT: Outcome.NO_SPACE,
    errno.EACCES: Outcome.DENIED,
    errno.EPERM: Outcome.DENIED,
    errno.EROFS: Outcome.DENIED,
    errno.ENOENT: Outcome.MISSING,
    errno.EEXIST: Outcome.EXISTS,
    errno.ECONNREFUSED: Outcome.UNAVAILABLE,
    errno.ECONNRESET: Outcome.UNAVAILABLE,
    errno.EHOSTUNREACH: Outcome.UNAVAILABLE,
    errno.ENETUNREACH: Outcome.UNAVAILABLE,
    errno.EPIPE: Outcome.UNAVAILABLE,
    errno.ETIMEDOUT: Outcome.TIMEOUT,
}

#: Error codes of S3's answers (AWS's list of error responses), which s3fs folds into a few errnos.
_BY_S3_CODE = {
    "PreconditionFailed": Outcome.EXISTS,
    "412": Outcome.EXISTS,
    "InvalidRange": Outcome.TRUNCATED,
    "416": Outcome.TRUNCATED,
    "NoSuchKey": Outcome.MISSING,
    "NoSuchBucket": Outcome.MISSING,
    "404": Outcome.MISSING,
    "AccessDenied": Outcome.DENIED,
    "InvalidAccessKeyId": Outcome.DENIED,
    "SignatureDoesNotMatch": Outcome.DENIED,
    "ExpiredToken": Outcome.DENIED,
    "InvalidToken": Outcome.DENIED,
    "403": Outcome.DENIED,
    "401": Outcome.DENIED,
    "SlowDown": Outcome.UNAVAILABLE,
    "ServiceUnavailable": Outcome.UNAVAILABLE,
    "InternalError": Outcome.UNAVAILABLE,
    "ConditionalRequestConflict": Outcome.UNAVAILABLE,
    "409": Outcome.UNAVAILABLE,
    "500": Outcome.UNAVAILABLE,
    "502": Outcome.UNAVAILABLE,
    "503": Outcome.UNAVAILABLE,
    "RequestTimeout": Outcome.TIMEOUT,
    "504": Outcome.TIMEOUT,
}

#: Classes of botocore and aiohttp, by name: they aren't there where their file system isn't.
_BY_CLASS = {
    "NoCredentialsError": Outcome.DENIED,
    "PartialCredentialsError": Outcome.DENIED,
    "CredentialRetrievalError": Outcome.DENIED,
    "ReadTimeoutError": Outcome.TIMEOUT,
    "ConnectTimeoutError": Outcome.TIMEOUT,
    "FSTimeoutError": Outcome.TIMEOUT,
    "HTTPClientError": Outcome.UNAVAILABLE,
    "ConnectionError": Outcome.UNAVAILABLE,
    "ClientConnectionError": Outcome.UNAVAILABLE,
    "ClientPayloadError": Outcome.UNAVAILABLE,
    "IncompleteRead": Outcome.UNAVAILABLE,
}


def translated(error: Exception, doing: str, hidden: Secrets) -> StoreError:
    """The same failure as a :class:`StoreError`."""
    outcome = _outcome_of(error)
    text = hidden.hidden_in(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    if outcome is Outcome.EXISTS:
        return AlreadyExists(f"{doing}: {text}")
    return StoreError(outcome, f"{doing}: {text}")


def _outcome_of(error: Exception) -> Outcome:
    for link in _chain(error):
        code = _s3_code(link)
        if code in _BY_S3_CODE:
            return _BY_S3_CODE[code]
    for link in _chain(error):
        if isinstance(link, (TimeoutError, asyncio.TimeoutError)):
            return Outcome.TIMEOUT
        for cls in type(link).__mro__:
            if cls.__name__ in _BY_CLASS:
                return _BY_CLASS[cls.__name__]
        if isinstance(link, FileExistsError):
            return Outcome.EXISTS
        if isinstance(link, FileNotFoundError):
            return Outcome.MISSING
        if isinstance(link, PermissionError):
            return Outcome.DENIED
        if isinstance(link, OSError) and link.errno in _BY_ERRNO:
            return _BY_ERRNO[link.errno]
    return Outcome.ERROR


def _s3_code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = (response.get("Error") or {}).get("Code")
        return str(code) if code else str((response.get("ResponseMetadata") or {}).get("HTTPStatusCode"))
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 8:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        seen += 1

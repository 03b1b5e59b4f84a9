"""What can go wrong with a store, as one closed set of outcomes, whatever the protocol raised."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
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


class SlowDown(StoreError):
    """The store asks for fewer requests (S3's 503 ``SlowDown``, 429)."""

    def __init__(self, message: str) -> None:
        super().__init__(Outcome.UNAVAILABLE, message)


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
    "429": Outcome.UNAVAILABLE,
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

_SLOW_DOWN = frozenset({"SlowDown", "ServiceUnavailable", "503", "429"})

#: Classes of botocore, aiohttp and obstore, by name: they aren't there where their file system isn't.
_BY_CLASS = {
    "AlreadyExistsError": Outcome.EXISTS,
    "PermissionDeniedError": Outcome.DENIED,
    "UnauthenticatedError": Outcome.DENIED,
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


#: What obstore's messages say of an answer or of a connection that gave none; its classes don't tell these apart.
_OBSTORE_CODE = re.compile(r"<Code>(\w+)</Code>")
_OBSTORE_STATUS = re.compile(r"status code: (\d{3})")
_OBSTORE_KIND = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Decode)\b")
_OBSTORE_NOISE = re.compile(r"\s*\n\s*Debug source:.*|\s*<\?xml.*", re.DOTALL)


@contextlib.contextmanager
def translating(doing: str, hidden: Secrets) -> Iterator[None]:
    """Whatever the block raises becomes a :class:`StoreError`."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # every kind that a file system may raise; translated() sorts them
        raise translated(error, doing, hidden) from None


def translated(error: Exception, doing: str, hidden: Secrets) -> StoreError:
    """The same failure as a :class:`StoreError`."""
    outcome = _outcome_of(error)
    shown = _OBSTORE_NOISE.sub("", str(error))
    if shown != str(error) and (code := _OBSTORE_CODE.search(str(error))):
        shown += f" {code[1]}"
    text = hidden.hidden_in(f"{type(error).__name__}: {shown}" if shown else type(error).__name__)
    if outcome is Outcome.EXISTS:
        return AlreadyExists(f"{doing}: {text}")
    if outcome is Outcome.UNAVAILABLE and any(_SLOW_DOWN & set(_codes(link)) for link in _chain(error)):
        return SlowDown(f"{doing}: {text}")
    return StoreError(outcome, f"{doing}: {text}")


def _outcome_of(error: Exception) -> Outcome:
    for link in _chain(error):
        for code in _codes(link):
            if code in _BY_S3_CODE:
                return _BY_S3_CODE[code]
    for link in _chain(error):
        if isinstance(link, (TimeoutError, asyncio.TimeoutError)):
            return Outcome.TIMEOUT
        if type(link).__name__ == "GenericError" and (kind := _OBSTORE_KIND.search(str(link))):
            return Outcome.TIMEOUT if kind[1] == "Timeout" else Outcome.UNAVAILABLE
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


def _codes(error: BaseException) -> list[str]:
    """S3's error code and HTTP status, the more telling first; empty where the error isn't an S3 client's."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = (response.get("Error") or {}).get("Code")
        status = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        return [str(found) for found in (code, status) if found]
    if type(error).__module__.startswith("obstore") or isinstance(error, FileNotFoundError):
        text = str(error)
        return [match[1] for match in (_OBSTORE_CODE.search(text), _OBSTORE_STATUS.search(text)) if match]
    return []


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 8:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        seen += 1

"""Hints from outside: ``tracekv prefetch`` and routers tell an engine, over a unix socket, which prompt it is going to be asked.

One request and one answer per connection, each a msgpack message behind its length (4 bytes, little-endian). The socket lies in the
folder of the journals, mode 0600; a peer of another user is refused. Whatever comes, the engine goes on: sizes, connections and
times are bounded, and nothing of a message reaches a log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import msgspec

from tracekv_fsspec.keys import KEY_BYTES, KeyChain, namespace_digest, partial_keys

if TYPE_CHECKING:
    from tracekv_fsspec.stager import Stager

_log = logging.getLogger("tracekv.fsspec")

PREFIX = "tracekv-hints-"
SUFFIX = ".sock"
MOST_TOKENS = 4 << 20
MOST_KEYS = 1 << 18
#: 4 Mi tokens of 5 bytes each, and a little.
MOST_BYTES = 21 << 20
MOST_CONNECTIONS = 8
#: What fits into the kernel's address, less the byte that ends it.
_LONGEST_ADDRESS = 107
#: How long a peer may take to send its request, or to take its answer.
PEER_S = 5.0
LONGEST_WAIT_MS = 600_000
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class HintRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt, by its tokens or by its blocks' keys.

    Attributes:
        cache_salt: The request's salt, for tokens; keys have it in them.
        wait_ms: How long the answer may wait for what is stored to be staged.
    """

    tokens: Annotated[list[Token], msgspec.Meta(max_length=MOST_TOKENS)] = []
    keys: Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)] = []
    cache_salt: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=LONGEST_WAIT_MS)] = 0


class HintAnswer(msgspec.Struct):
    """Blocks of the prompt that are staged, that are on their way, and of which the store isn't known to have all."""

    staged: int = 0
    queued: int = 0
    unknown: int = 0
    error: str = ""


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """What to bind or connect to while it is entered: the kernel takes 107 bytes, so a longer path goes by its folder."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class HintSocket:
    """Listens for hints. Made and closed by the leader; a forked child has no part in it.

    Args:
        folder: Made if it is missing; only its owner may be able to write there.

    Raises:
        OSError: The socket can't be made.
    """

    def __init__(self, stager: Stager, folder: Path) -> None:
        self._stager = stager
        self._pid = os.getpid()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if facts.st_uid != os.geteuid() or (facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX):
            raise PermissionError(errno.EPERM, "others can write there", str(folder))
        _remove_dead(folder)
        self.path = folder / f"{PREFIX}{self._pid}-{secrets.token_hex(4)}{SUFFIX}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(self._listener.fileno(), 0o600)  # before it has a name, so that it never has another mode
            with address_of(self.path) as address:
                self._listener.bind(address)
            self.path.chmod(0o600)
            self._listener.listen(MOST_CONNECTIONS)
        except BaseException:
            self._listener.close()
            raise
        self._turns = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracekv-hints", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Stop listening, and remove the socket."""
        if os.getpid() != self._pid:
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self._listener.close()
        self._thread.join(seconds)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                self._closed.wait(0.1)  # out of descriptors, say
                continue
            if not self._turns.acquire(blocking=False):
                peer.close()  # so many wait already that another wouldn't help
                continue
            threading.Thread(target=self._serve, args=(peer,), name="tracekv-hint", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(PEER_S)
                _send(peer, self._answer(peer))
        except (OSError, EOFError):
            pass  # the peer's own trouble
        except Exception as error:
            _log.warning("tracekv: a hint could not be answered (%s)", type(error).__name__)
        finally:
            self._turns.release()

    def _answer(self, peer: socket.socket) -> HintAnswer:
        _, uid, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid not in (os.geteuid(), 0):
            return HintAnswer(error="this engine takes hints from its own user only")
        try:
            request = msgspec.msgpack.decode(_receive(peer), type=HintRequest)
        except msgspec.MsgspecError:
            return HintAnswer(error="the message isn't a hint")
        except _TooLarge:
            return HintAnswer(error=f"a hint has at most {MOST_BYTES} bytes")
        if bool(request.tokens) == bool(request.keys):
            return HintAnswer(error="a hint has either tokens or keys")
        return self._stage(request)

    def _stage(self, request: HintRequest) -> HintAnswer:
        stager = self._stager
        keys: Sequence[bytes] = request.keys
        tails: Sequence[bytes] = ()
        if request.tokens:
            size = stager.prefetcher.tokens_per_block
            chain = KeyChain(namespace_digest(stager.deployment, cache_salt=request.cache_salt), size)
            for at in range(0, len(request.tokens), 256 * size):
                chain.extend(array("I", request.tokens[at : at + 256 * size]))
            keys = chain.keys
            if stager.prefetcher.has_partial_blocks and chain.tail:
                tails = partial_keys(chain.link_before(len(keys)), chain.tail)
        if not keys:
            return HintAnswer()
        deadline = monotonic() + request.wait_ms / 1000
        hint = stager.prefetcher.hint(keys, tails)
        stager.prefetcher.wait(hint, max(PEER_S, request.wait_ms / 1000), deadline)
        shards = stager.arena.shards
        staged = sum(all(stager.arena.holds(shard, key) for shard in shards) for key in keys)
        known = sum(all(stager.is_available(shard, key) for shard in shards) for key in keys)
        return HintAnswer(staged, known - staged, len(keys) - known)


class _TooLarge(Exception):
    """A message that is longer than any that makes sense."""


def sockets(folder: Path) -> list[Path]:
    """Where the engines listen whose sockets lie in a folder."""
    return sorted(path for path in folder.glob(f"{PREFIX}*{SUFFIX}") if stat.S_ISSOCK(path.lstat().st_mode))


def send_hint(path: Path, request: HintRequest) -> HintAnswer:
    """Tell an engine, and wait for its answer.

    Raises:
        OSError: It isn't there, or takes too long.
        ValueError: The answer isn't one.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(2 * PEER_S + request.wait_ms / 1000)
        with address_of(path) as address:
            peer.connect(address)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was read, and told why
            _send(peer, request)
        try:
            return msgspec.msgpack.decode(_receive(peer), type=HintAnswer)
        except (msgspec.MsgspecError, EOFError, _TooLarge):
            raise ValueError(f"tracekv: {path} gave no answer; is it an engine's?") from None


def _send(peer: socket.socket, message: HintRequest | HintAnswer) -> None:
    data = msgspec.msgpack.encode(message)
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket) -> bytes:
    """One message; all of it within :data:`PEER_S` of patience for each part and four times that in all."""
    deadline = monotonic() + 4 * max(PEER_S, peer.gettimeout() or 0.0)
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size, deadline))
    if length > MOST_BYTES:
        raise _TooLarge
    return _exactly(peer, length, deadline)


def _exactly(peer: socket.socket, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        if monotonic() > deadline:
            raise TimeoutError
        part = peer.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _remove_dead(folder: Path) -> None:
    """Sockets that nobody listens on any more."""
    for path in sockets(folder):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.settimeout(0.2)
            try:
                with address_of(path) as address:
                    probe.connect(address)
            except ConnectionRefusedError:
                path.unlink()

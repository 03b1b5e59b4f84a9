"""Which KV is the same KV: a chained digest per block, seeded with everything else that changes KV.

Two levels of seed: the *deployment* (model, dtype, block size, layout, scales, world) names the folder in the store; the *namespace*
adds what a request brings (salt, images, LoRA). Layer group and rank are not part of a key: they are part of a block's place.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import iter_unpack

import msgspec

#: Part of every key: a change of the object format or of this module's bytes makes all older objects another deployment's.
FORMAT_VERSION = 1
KEY_BYTES = 16

_PARTIAL_TAG = b"tracekv partial block"
_UINT32 = "I" if array("I").itemsize == 4 else "L"


class UnkeyableTokens(ValueError):
    """A token id outside uint32 (some runtimes mark image positions so): this prompt has no key."""


def _framed(*parts: bytes | str | int | None) -> bytes:
    """Parts with their kind and length, so that no two different lists give the same bytes."""
    framed = []
    for part in parts:
        if part is None:
            framed.append(b"-")
            continue
        if isinstance(part, int):
            kind, raw = b"i", str(part).encode()
        elif isinstance(part, str):
            kind, raw = b"s", part.encode("utf-8", "surrogatepass")
        else:
            kind, raw = b"b", part
        framed.append(kind + len(raw).to_bytes(8, "little") + raw)
    return b"".join(framed)


class Deployment(msgspec.Struct, frozen=True):
    """What every block of an engine has in common.

    Attributes:
        layout: ``LayoutView.fingerprint()``: how a page's bytes are laid out, for every layer group.
        world: Number of ranks that share the KV; a rank's part is another one where there are more ranks.
    """

    model_id: str
    dtype: str
    tokens_per_block: int
    layout: bytes
    world: int = 1
    kv_scales: str | None = None

    def digest(self) -> bytes:
        """32 bytes."""
        framed = _framed(
            "tracekv deployment",
            FORMAT_VERSION,
            self.model_id,
            self.dtype,
            self.tokens_per_block,
            self.layout,
            self.world,
            self.kv_scales,
        )
        return hashlib.sha256(framed).digest()


def tenant_digest(deployment: bytes, cache_salt: str | None) -> bytes:
    """16 bytes that all namespaces of one salt begin with, so that a tenant's blocks can be found and removed."""
    return hashlib.sha256(_framed("tracekv tenant", deployment, cache_salt)).digest()[:16]


@lru_cache(maxsize=256)
def namespace_digest(
    deployment: bytes, *, cache_salt: str | None = None, multimodal: str | None = None, lora: str | None = None
) -> bytes:
    """The seed of a request's chain, 32 bytes: the deployment and everything but the tokens that changes its KV.

    The first half is the tenant's (:func:`tenant_digest`), the second one covers everything.
    """
    whole = hashlib.sha256(_framed("tracekv namespace", deployment, cache_salt, multimodal, lora)).digest()
    return tenant_digest(deployment, cache_salt) + whole[:16]


class KeyChain:
    """The keys of one request's complete blocks, grown as its tokens become known.

    ``link_i = sha256(link_{i-1} || tokens of block i as uint32, little-endian)``, ``link_{-1}`` the namespace's digest; key i is
    the first 16 bytes of link i. Only what is new is hashed.

    Attributes:
        keys: One key per complete block, by block ordinal.
    """

    __slots__ = ("_block_bytes", "_link", "_tail", "keys", "namespace", "tokens_per_block")

    def __init__(self, namespace: bytes, tokens_per_block: int) -> None:
        self.namespace = namespace
        self.tokens_per_block = tokens_per_block
        self.keys: list[bytes] = []
        self._link = namespace
        self._tail = array(_UINT32)
        self._block_bytes = tokens_per_block * 4

    @property
    def tail(self) -> array[int]:
        """The tokens behind the last complete block."""
        return self._tail

    def link_before(self, ordinal: int) -> bytes:
        """What the key of an incomplete block at this ordinal is chained to: the key before it, or the namespace's digest."""
        return self.keys[ordinal - 1] if ordinal else self.namespace

    @property
    def tokens(self) -> int:
        """Tokens known so far, those of an incomplete last block included."""
        return len(self.keys) * self.tokens_per_block + len(self._tail)

    def append(self, token: int) -> bool:
        """Append one token, unless it would complete a block (False): almost every pass of a request that generates.

        Raises:
            UnkeyableTokens: As :meth:`extend`.
        """
        tail = self._tail
        if len(tail) + 1 >= self.tokens_per_block:
            return False
        try:
            tail.append(token)
        except (OverflowError, TypeError) as error:
            raise UnkeyableTokens(f"a token id that is no uint32 ({type(error).__name__})") from None
        return True

    def extend(self, tokens: Sequence[int] | array[int]) -> None:
        """Append tokens and hash the blocks that are complete now.

        Raises:
            UnkeyableTokens: An id outside uint32. The chain stays as it was.
        """
        added = tokens if isinstance(tokens, array) else as_uint32(tokens)
        pending = self._tail + added if self._tail else added
        complete = len(pending) // self.tokens_per_block
        if not complete:
            self._tail = pending if pending is not tokens else pending[:]
            return
        hashed = pending
        if sys.byteorder == "big":
            hashed = pending[:]
            hashed.byteswap()
        raw = memoryview(hashed).cast("B")
        link, size, sha256 = self._link, self._block_bytes, hashlib.sha256
        self.keys += [
            (link := sha256(link + block).digest())[:KEY_BYTES]
            for (block,) in iter_unpack(f"{size}s", raw[: complete * size])
        ]
        self._link = link
        self._tail = pending[complete * self.tokens_per_block :]


def partial_keys(before: bytes, tokens: array[int]) -> list[bytes]:
    """Keys of an incomplete block after its first, second ... last token, where ``before`` is :meth:`KeyChain.link_before`.

    ``sha256(tag || before || tokens so far as uint32 || their count as uint32)``, its first 16 bytes. The tag makes what is hashed one
    byte longer than a multiple of 4, which it never is for a complete block: so no incomplete block has the key of a complete one.
    """
    digest = hashlib.sha256(_PARTIAL_TAG + before)
    hashed = tokens
    if sys.byteorder == "big":
        hashed = tokens[:]
        hashed.byteswap()
    raw, keys = memoryview(hashed).cast("B"), []
    for count in range(1, len(tokens) + 1):
        digest.update(raw[4 * count - 4 : 4 * count])
        whole = digest.copy()
        whole.update(count.to_bytes(4, "little"))
        keys.append(whole.digest()[:KEY_BYTES])
    return keys


def as_uint32(tokens: Sequence[int]) -> array[int]:
    """Token ids as an array of uint32; UnkeyableTokens where one doesn't fit."""
    try:
        return array(_UINT32, tokens)
    except (OverflowError, TypeError) as error:
        raise UnkeyableTokens(f"a token id that is no uint32 ({type(error).__name__})") from None

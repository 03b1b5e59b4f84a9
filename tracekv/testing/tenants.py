"""Requests whose KV depends on their salt, LoRA adapter and images, so that KV shared between them gives other tokens.

The harness's models compute the same for all of them. Here each gets a permutation of the vocabulary: the connector sees the
prompt's tokens, the model computes the permuted ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tracekv.harness.requests import Request
from tracekv.testing.cells import VOCABULARY


class TenantRequest(Request):
    """A request of a tenant, an adapter or an image."""

    def tokens_between(self, start: int, end: int) -> list[int]:
        """What the model computes."""
        return [self._computed(token) for token in super().tokens_between(start, end)]

    @property
    def last_token(self) -> int:
        """The same for the input of the next generation step."""
        return self._computed(super().last_token)

    def _computed(self, token: int) -> int:
        factor, offset = _permutation(self)
        return (token * factor + offset) % VOCABULARY


def of_its_tenant(request: Request) -> Request:
    """Let the model tell a submitted request from those of others with the same tokens."""
    if any(each is not None for each in _identity(request)):
        request.__class__ = TenantRequest
    return request


def _identity(request: Any) -> tuple[Any, ...]:
    return (
        request.cache_salt,
        request.lora_task_id,
        request.multimodal_hashes,
        request.multimodal_positions if request.multimodal_hashes is None else None,
    )


def _permutation(request: Any) -> tuple[int, int]:
    digest = hashlib.sha256(repr(_identity(request)).encode()).digest()
    return 2 * digest[0] + 3, digest[1]  # odd, so it has an inverse modulo a power of two

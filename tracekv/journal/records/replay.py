"""What ``tracekv replay`` needs beside the calls (``TRACEKV_RECORD=replay``)."""

from __future__ import annotations

from tracekv.journal.records.base import Record


class ReplayStart(Record, tag=61):
    """What ``tracekv replay`` needs of the engine's arguments (``TRACEKV_RECORD=replay``); None where they don't say."""

    tokens_per_block: int | None
    has_block_reuse: bool | None
    has_partial_reuse: bool | None
    is_v2: bool | None


class ReplayCaches(Record, tag=62):
    """What ``RegisterCall`` leaves out of the caches.

    Attributes:
        shape: Of the single tensor; empty where a layout was registered.
        buffers: By group and region, ``(layer, role, expansion)`` in memory order; replicated regions come last.
        replicated: How many of a group's regions are replicated ones.
    """

    shape: list[int]
    buffers: list[list[list[tuple[int, str, int]]]]
    replicated: list[int]


class ReplayPrompt(Record, tag=63):
    """A request's tokens as it was first seen, before its ``QueryCall``; equal digests mean equal tokens, within this process.

    The digests are keyed with a random key that exists in the process's memory only. A block's digest is of its own tokens,
    not of those before it, so that every equality of blocks is kept.

    Attributes:
        tokens: How many there are; more than ``prompt_tokens`` where generated ones are among them.
        block_tokens: Tokens per block.
        blocks: 8 bytes per full block.
        rest: 8 bytes for the tokens behind the last full block; empty where there are none.
        salt, images: 8 bytes each, None where the request has none. The LoRA id is its ``QueryCall``'s.
        image_places, image_lengths: Where the items lie in the prompt.
    """

    request_id: int
    prompt_tokens: int
    tokens: int
    block_tokens: int
    blocks: bytes
    rest: bytes
    salt: bytes | None
    images: bytes | None
    image_places: list[int]
    image_lengths: list[int]


class ReplayBuild(Record, tag=64):
    """What the ``BuildCall`` before it leaves out; ``new_tokens`` is parallel to its ``request_ids``.

    Attributes:
        block_hashes: ``(position in request_ids, keyed digests of the whole chain)`` where the chain grew.
        priorities: ``(position in request_ids, priorities)`` where there are any.
    """

    step: int
    new_tokens: list[int]
    block_hashes: list[tuple[int, list[int]]]
    priorities: list[tuple[int, list[int]]]


class ReplayEnd(Record, tag=65):
    """All tokens of a request that finished, generated ones included; fields as in :class:`ReplayPrompt`."""

    request_id: int
    tokens: int
    blocks: bytes
    rest: bytes

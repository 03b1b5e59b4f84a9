"""The settings of the backend: ``TRACEKV_FSSPEC__*`` variables, or the keys below ``fsspec`` in the YAML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

Bytes = Annotated[int, msgspec.Meta(ge=1)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0)]


def default_url() -> str:
    """A folder in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # No as_uri(): fsspec takes a path as it is written, percent signs included.
    return f"file://{Path(base, 'tracekv', 'kv').absolute()}"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``tracekv_fsspec`` can be told. The representation leaves out ``storage_options``, which may hold keys."""

    #: Where segments and manifests live: any fsspec URL, the folder or prefix below which everything is kept.
    url: str = msgspec.field(default_factory=default_url)
    #: Which weights made the KV (name and revision, or a digest). There is no default: a wrong one would serve wrong KV.
    model_id: str | None = None
    #: ``staged``: only what is verified in host memory is promised. ``async``: all that is stored is, and the request is parked while
    #: it is staged. TensorRT-LLM has no way to take a promise back: where staging fails for good, the engine stops.
    offer: Literal["staged", "async"] = "staged"
    #: Which half of disaggregated serving this engine is: a ``producer`` never loads, a ``consumer`` never saves.
    role: Literal["both", "producer", "consumer"] = "both"
    #: Keep what a request's next turn would need in host memory when it ends, reading it from the store where it isn't there.
    read_ahead: bool = True
    #: How long a query may wait for stored blocks to be read and verified.
    offer_wait_ms: Milliseconds = 0
    #: What makes a stored prefix servable: ``strict``: every layer group has all of it; ``window``: a group with a sliding window has
    #: its live window. Per-layer-group caches only, and only where the runtime is bound to honour the whole offer.
    window_lookup: Literal["strict", "window"] = "strict"
    #: Store the incomplete last block of a prompt, too, and make offers that begin or end inside a block. Not with a single
    #: KV cache tensor (TensorRT-LLM's V1).
    partial_blocks: bool = False
    #: Host memory for blocks that were read ahead or wait to be stored.
    arena_bytes: Bytes = 1 << 30
    #: Where the arena's file is made, in memory that every rank of the node maps; ``/dev/shm`` where that is a tmpfs, else the
    #: temporary directory.
    arena_dir: str | None = None
    #: Load layer by layer beside the forward pass (``on``), before it (``off``), or beside it where the engine's layer hooks surely
    #: run (``auto``): no CUDA graphs, no compiled layers, and every hook was seen before.
    layerwise: Literal["auto", "on", "off"] = "auto"
    #: Of the arena, how much may wait to be stored; past it, blocks are dropped. The last quarter is for requests of which
    #: something is already saved, so tails of new chains are dropped first.
    write_queue_bytes: Bytes = 256 << 20
    #: How long storing what waits may take at the rate at which the store was seen to take it in; past it, as past the bytes.
    write_queue_ms: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    #: How often other writers' manifests are looked for.
    refresh_ms: Annotated[int, msgspec.Meta(ge=10)] = 2000
    #: How long a read may take with all its tries before its blocks are a miss.
    read_deadline_ms: Annotated[int, msgspec.Meta(ge=10)] = 5000
    #: How long a write may take with all its tries before its blocks are dropped.
    write_deadline_ms: Annotated[int, msgspec.Meta(ge=10)] = 30_000
    #: Who speaks S3: ``obstore`` (fast) or ``s3fs`` (takes every option of botocore's).
    s3_client: Literal["obstore", "s3fs"] = "obstore"
    #: Options for the fsspec file system, as JSON in a variable. Never printed.
    storage_options: dict[str, Any] = {}
    #: Digest of the scales of a quantized KV cache, where they aren't part of the weights that ``model_id`` names.
    kv_scales: str | None = None
    #: LoRA task id -> digest of the adapter, as JSON in a variable. Requests of other adapters bypass the store.
    lora_digests: dict[str, str] = {}

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "storage_options"}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

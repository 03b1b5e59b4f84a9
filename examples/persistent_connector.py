"""A persistent KV cache in a folder: one ``.pt`` file per full block, flat callbacks. The smallest connector there is.

It follows the first example of the connector document: the leader names files by a hash of tokens and pairs each with a
block id, the worker reads files into blocks before the forward and writes blocks to files after it.

What the document says of its limits holds here too:

- **Blocking I/O.** ``torch.load`` and ``torch.save`` run on the engine's thread, inside the pass.
- **Full blocks only.** A prompt is matched block by block; a partial block is neither found nor kept.
- **One file per block**, which is hard on a file system.
- **Only ``new_requests`` is walked.** With chunked prefill the later chunks arrive in ``cached_requests`` and stay unplanned:
  of a chunked prompt only the first chunk is kept. What is generated is never kept.
- **Flat callbacks.** It serves models with one attention window; ``vswa_connector.py`` is the one for several. Under a single
  sliding window a block without a page is passed over.

Two things the document leaves open are decided here, since wrong KV would follow: a block's key covers everything before it
too (KV depends on the whole prefix) and the tenant's salt, and a request with a LoRA adapter or images is left alone.

The folder is ``KV_CACHE_FOLDER``, by default ``kv_cache`` below the current one. Use another folder for another model.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, valid_page_slots
from tracekv.contract.reading import honoured_tokens, tokens_per_block


@dataclass
class PersistentKvCacheConnectorMetadata:
    """What the leader tells the workers of one pass: ``(file_path, block_id)`` pairs."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Prompt:
    """A request between its query and its first report.

    Attributes:
        paths: A file per full block of the prompt, by block ordinal.
        matched: Blocks that were offered, behind what the device has.
        honoured: Tokens that the runtime took of the offer.
    """

    paths: list[str]
    matched: int = 0
    honoured: int = 0


class PersistentKvCacheConnectorLeader(KvCacheConnectorScheduler):
    """Decides which files are read into which blocks, and which blocks are written to which files."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.block_size = tokens_per_block(llm_args) or 32
        self.folder = Path(os.environ.get("KV_CACHE_FOLDER", "kv_cache"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prompts: dict[int, Prompt] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Count the full blocks behind ``num_computed_tokens`` that have a file. One token is left to compute."""
        tokens = request.get_tokens(0)
        prompt = self.prompts[request.request_id] = Prompt(self.paths(request, tokens))
        if num_computed_tokens % self.block_size:
            return 0, False
        first = num_computed_tokens // self.block_size
        for path in prompt.paths[first : (len(tokens) - 1) // self.block_size]:
            if not Path(path).exists():
                break
            prompt.matched += 1
        return prompt.matched * self.block_size, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Learn how much of the offer was taken."""
        prompt = self.prompts.get(request.request_id)
        if prompt is not None:
            taken = honoured_tokens(request)
            prompt.honoured = prompt.matched * self.block_size if taken is None else taken

    def build_connector_meta(self, scheduler_output: Any) -> PersistentKvCacheConnectorMetadata:
        """Load what was matched; save every other full block that this pass completes."""
        metadata = PersistentKvCacheConnectorMetadata()
        for data in scheduler_output.new_requests:
            prompt = self.prompts.pop(data.request_id, None)
            if prompt is None:
                continue
            computed = data.computed_position // self.block_size
            loaded = computed + prompt.matched
            complete = (data.computed_position + prompt.honoured + data.num_scheduled_tokens) // self.block_size
            blocks = dict(valid_page_slots(data.new_block_ids))
            metadata.load += self.pairs(prompt, blocks, computed, loaded)
            metadata.save += self.pairs(prompt, blocks, loaded, complete)
        return metadata

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Nothing is under way: every save was over with its pass."""
        self.prompts.pop(request.request_id, None)
        return False

    @staticmethod
    def pairs(prompt: Prompt, blocks: dict[int, int], start: int, end: int) -> list[tuple[str, int]]:
        """File and block id of the ordinals ``[start, end)`` that have both."""
        return [(path, blocks[i]) for i, path in enumerate(prompt.paths[:end]) if i >= start and i in blocks]

    def paths(self, request: Any, tokens: list[int]) -> list[str]:
        """The files of a prompt's full blocks; none for a request whose KV isn't told by its tokens and salt."""
        if getattr(request, "lora_task_id", None) is not None or getattr(request, "multimodal_positions", None):
            return []
        chain = hashlib.sha256(repr(getattr(request, "cache_salt", None)).encode()).digest()
        paths = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            chain = hashlib.sha256(chain + array("q", tokens[end - self.block_size : end]).tobytes()).digest()
            paths.append(str(self.folder / f"{chain.hex()}.pt"))
        return paths


class PersistentKvCacheConnectorWorker(KvCacheConnectorWorker):
    """Copies between files and blocks, on the engine's thread."""

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Keep the tensor; row ``block_id`` is that block's KV for every layer."""
        self.kv_cache_tensor = kv_cache_tensor

    def start_load_kv(self, stream: Any) -> None:
        """Read each file and copy it into its block, before the forward."""
        metadata = self.get_connector_meta()
        for path, block_id in metadata.load:
            self.kv_cache_tensor[block_id].copy_(torch.load(path, map_location="cpu"), non_blocking=False)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Everything is loaded already."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A block is saved whole, when the pass is over."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy each block to the CPU and write it to its file."""
        stream.synchronize()
        metadata = self.get_connector_meta()
        for path, block_id in metadata.save:
            if Path(path).exists():
                continue
            # A copy even where the cache is in host memory: torch.save writes all the memory behind a view.
            block = self.kv_cache_tensor[block_id].to("cpu", copy=True)
            partial = f"{path}.{os.getpid()}"
            torch.save(block, partial)
            Path(partial).replace(path)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is asynchronous."""
        return [], []

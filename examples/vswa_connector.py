"""A persistent KV cache for models with several attention windows: files per block and layer group.

It follows the second example of the connector document. The five things that such a connector has to do are marked in the code:

1. address pages per group,
2. read the per-group block lists,
3. carry the layer group in the key and in every transfer target,
4. filter blocks without a page through ``valid_page_slots``,
5. serve a block only when every group holds it.

What the document says of its limits holds here too:

- **At most a window is kept of a sliding group.** A block is saved in the pass that completes it; one that has left the window
  by then has no page and is not kept, and then no group's file of it is of use: what can be served back is bounded by the
  smallest window. A prompt that is computed in one pass has a page for each of its blocks during that pass, and is kept whole.
- **Only ``new_requests`` is walked.** The later chunks of a chunked prompt stay unplanned.
- **Blocking I/O, full blocks only, a file per block and group**, as in ``persistent_connector.py``.

The folder is ``KV_CACHE_FOLDER``, by default ``kv_cache`` below the current one. Use another folder for another model.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, KvCacheLayout, valid_page_slots
from tracekv.contract.reading import honoured_tokens, tokens_per_block


class Transfer(NamedTuple):
    """A file and the page it belongs to: a page slot means nothing without its layer group (3)."""

    path: str
    layer_group_id: int
    page_slot: int


@dataclass
class Metadata:
    """What the leader tells the workers of one pass."""

    load: list[Transfer] = field(default_factory=list)
    save: list[Transfer] = field(default_factory=list)


@dataclass
class Prompt:
    """A request between its query and its first report.

    Attributes:
        hashes: One per full block of the prompt, by block ordinal; it covers all tokens up to the block's end.
        matched: Blocks that were offered, behind what the device has.
        honoured: Tokens that the runtime took of the offer.
    """

    hashes: list[str]
    matched: int = 0
    honoured: int = 0


class VswaKvCacheConnectorLeader(KvCacheConnectorScheduler):
    """Plans by layer group."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.block_size = tokens_per_block(llm_args) or 32
        self.folder = Path(os.environ.get("KV_CACHE_FOLDER", "kv_cache"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prompts: dict[int, Prompt] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Count the full blocks that every group holds (5). One token is left to compute."""
        tokens = request.get_tokens(0)
        prompt = self.prompts[request.request_id] = Prompt(self.hashes(request, tokens))
        groups = self.groups_in_store()
        if num_computed_tokens % self.block_size or not groups:
            return 0, False
        first = num_computed_tokens // self.block_size
        for block in prompt.hashes[first : (len(tokens) - 1) // self.block_size]:
            if not all(Path(self.path(block, group)).exists() for group in groups):
                break
            prompt.matched += 1
        return prompt.matched * self.block_size, False

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """Learn how much of the offer was taken."""
        prompt = self.prompts.get(request.request_id)
        if prompt is not None:
            taken = honoured_tokens(request)
            prompt.honoured = prompt.matched * self.block_size if taken is None else taken

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        """Load what was matched; save every other full block that this pass completes, group by group (2)."""
        metadata = Metadata()
        for data in scheduler_output.new_requests:
            prompt = self.prompts.pop(data.request_id, None)
            if prompt is None:
                continue
            self.remember_groups(len(data.new_block_ids_by_layer_group))
            computed = data.computed_position // self.block_size
            loaded = computed + prompt.matched
            complete = (data.computed_position + prompt.honoured + data.num_scheduled_tokens) // self.block_size
            for group, page_slots in enumerate(data.new_block_ids_by_layer_group):
                for ordinal, slot in valid_page_slots(page_slots):  # (4)
                    if computed <= ordinal < min(complete, len(prompt.hashes)):
                        target = Transfer(self.path(prompt.hashes[ordinal], group), group, slot)
                        (metadata.load if ordinal < loaded else metadata.save).append(target)
        return metadata

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """Nothing is under way: every save was over with its pass."""
        self.prompts.pop(request.request_id, None)
        return False

    def path(self, block: str, layer_group_id: int) -> str:
        """The same tokens have other KV in another layer group, so the group is in the name (3)."""
        return str(self.folder / f"{block}.group{layer_group_id}.pt")

    def remember_groups(self, count: int) -> None:
        """The leader sees no layout: how many groups there are it learns from the first report, and keeps for the next engine."""
        (self.folder / "layer_groups").write_text(str(count))

    def groups_in_store(self) -> range:
        """The layer groups that every served block needs."""
        kept = self.folder / "layer_groups"
        return range(int(kept.read_text()) if kept.exists() else 0)

    def hashes(self, request: Any, tokens: list[int]) -> list[str]:
        """A hash per full block; none for a request whose KV isn't told by its tokens and salt."""
        if getattr(request, "lora_task_id", None) is not None or getattr(request, "multimodal_positions", None):
            return []
        chain = hashlib.sha256(repr(getattr(request, "cache_salt", None)).encode()).digest()
        hashes = []
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            chain = hashlib.sha256(chain + array("q", tokens[end - self.block_size : end]).tobytes()).digest()
            hashes.append(chain.hex())
        return hashes


class VswaKvCacheConnectorWorker(KvCacheConnectorWorker):
    """Copies between files and pages, on the engine's thread."""

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Not served: without a layout there are no layer groups."""
        raise NotImplementedError(
            "vswa_connector works by layer group; use the V2 cache manager, or persistent_connector"
        )

    def register_kv_cache_layout(self, layout: KvCacheLayout) -> None:
        """Keep the layout, which gives the byte ranges of every group's pages (1)."""
        self.layout = layout

    def start_load_kv(self, stream: Any) -> None:
        """Read each file, a tensor per region, and copy it into its page, before the forward."""
        metadata = self.get_connector_meta()
        for path, group, slot in metadata.load:
            regions = self.layout.group(group).regions
            for region, kept in zip(regions, torch.load(path, map_location="cpu"), strict=True):
                region.slot_tensor(slot).copy_(kept)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Everything is loaded already. Where it isn't, ``layout.group_of_layer(layer_idx)`` says which pages to wait for."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A block is saved whole, when the pass is over."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy each page to the CPU, region by region, and write it to its file."""
        stream.synchronize()
        metadata = self.get_connector_meta()
        for path, group, slot in metadata.save:
            if Path(path).exists():
                continue
            # A copy even where the cache is in host memory: torch.save writes all the memory behind a view.
            page = [region.slot_tensor(slot).to("cpu", copy=True) for region in self.layout.group(group).regions]
            partial = f"{path}.{os.getpid()}"
            torch.save(page, partial)
            Path(partial).replace(path)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is asynchronous."""
        return [], []

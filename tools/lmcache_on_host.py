"""LMCache's in-process adapter and engine as they are; the class that copies pages with a CUDA kernel copies them with torch.

It takes chunks apart as the CUDA one does: chunk ``i`` lies in block ids ``[i * n, (i + 1) * n)``, and a chunk for which there are too
few block ids is passed over. Imported by name, so that a rank's process has it too.
"""

from __future__ import annotations

import torch
from lmcache.integration.tensorrt_llm import tensorrt_adapter
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface


class HostPages(GPUConnectorInterface):
    load_stream = store_stream = None

    def __init__(self, metadata):
        layers, _, self.chunk, self.heads, self.size = metadata.kv_shape
        self.layers = layers

    def register_kv_caches(self, pool):
        blocks, layers, roles, flat = pool.shape
        self.block = flat // (self.heads * self.size)
        self.pages = pool.view(blocks, layers, roles, self.heads, self.block, self.size)

    def get_shape(self, num_tokens):
        return torch.Size([2, self.layers, num_tokens, self.heads * self.size])

    def blocks_of(self, start, block_ids):
        count = self.chunk // self.block
        first = start // self.chunk * count
        return block_ids[first : first + count] if first + count <= len(block_ids) else None

    def from_gpu(self, memory_obj, start, end, **kwargs):
        blocks = self.blocks_of(start, kwargs.get("block_ids", []))
        if blocks is not None and memory_obj.tensor is not None:
            picked = self.pages[blocks].permute(2, 1, 0, 4, 3, 5)  # K/V, layer, block, token, head, size
            memory_obj.tensor.copy_(picked.reshape(memory_obj.tensor.shape))

    def to_gpu(self, memory_obj, start, end, **kwargs):
        blocks = self.blocks_of(start, kwargs.get("block_ids", []))
        if blocks is not None and memory_obj.tensor is not None:
            shape = (2, self.layers, len(blocks), self.block, self.heads, self.size)
            self.pages[blocks] = memory_obj.tensor.view(shape).permute(2, 1, 0, 4, 3, 5)

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        for memory_obj, start, end in zip(memory_objs or (), starts or (), ends or (), strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)


class Scheduler(tensorrt_adapter.LMCacheKvConnectorScheduler):
    """Theirs."""


class Worker(tensorrt_adapter.LMCacheKvConnectorWorker):
    """Theirs."""


tensorrt_adapter.CreateGPUConnector = lambda *arguments: HostPages(arguments[1])  # (config, metadata, engine type)

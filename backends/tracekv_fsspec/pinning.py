"""The arena's memory made known to CUDA, so that copies between it and the GPU run beside the host."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from tracekv.contract.reading import LayoutView

_log = logging.getLogger("tracekv.fsspec")


def pin_for_gpu(layout: LayoutView, buffer: memoryview) -> Callable[[], None] | None:
    """Register ``buffer`` with CUDA where pages of ``layout`` are on a GPU; each process that maps the memory does so for itself.

    Where that fails, copies are as right and slower: it is said once, and the engine goes on.

    Returns:
        What undoes it, once no copy is under way, which it waits for; None where nothing was registered.
    """
    import torch

    devices = {region.slots().device for group in layout.groups for region in group.regions}
    devices = {device for device in devices if device.type == "cuda"}
    if not devices:
        return None
    address, size = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr(), len(buffer)
    try:
        load: Callable[[], Any] = torch.cuda.cudart
        runtime = load()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
    except Exception as error:
        _log.warning(
            "tracekv: the arena's %d MiB can't be registered with CUDA (%s); copies to and from the GPU are slower. "
            "Raise the limit of locked memory (ulimit -l), or give TRACEKV_FSSPEC__ARENA_BYTES less",
            size >> 20,
            error,
        )
        return None

    def undo() -> None:
        for device in devices:
            with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
                torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(address)

    return undo

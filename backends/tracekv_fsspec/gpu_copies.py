"""Copies of evenly spaced rows between host and GPU memory, which torch has no asynchronous call for.

torch copies to or from a strided host tensor through a temporary one and waits for it. The driver has a call for it; where both
sides are dense, or on the CPU, torch's own is used.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the CUDA driver API."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``[rows, bytes]`` of uint8, whose rows are dense, on torch's current stream; host memory has to be registered.

    Raises:
        RuntimeError: The driver refuses.
    """
    if target.is_cuda == source.is_cuda or (target.is_contiguous() and source.is_contiguous()):
        target.copy_(source, non_blocking=True)
        return
    copy = _Copy2D(width=target.shape[1], height=target.shape[0])
    for side, tensor in (("src", source), ("dst", target)):
        setattr(copy, f"{side}_type", _DEVICE if tensor.is_cuda else _HOST)
        setattr(copy, f"{side}_{'device' if tensor.is_cuda else 'host'}", tensor.data_ptr())
        setattr(copy, f"{side}_pitch", tensor.stride(0))
    device = target.device if target.is_cuda else source.device
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    with torch.cuda.device(device):  # the driver copies in the calling thread's current context
        status = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream)
    if status:
        raise RuntimeError(
            f"tracekv: the CUDA driver refused a copy of {target.shape[0]} rows (cuMemcpy2DAsync: {status})"
        )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")

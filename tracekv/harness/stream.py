"""Streams: CUDA's where there is a GPU, an object with the same three verbs on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class HostEvent:
    """A point on a :class:`HostStream`. Host work is done when it is issued, so it has always been reached."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True: everything before the event is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to order."""


class HostStream:
    """A stream of host work, in the shape of ``torch.cuda.Stream``: every call runs to its end before it returns.

    Source: contract.md section 4.3 (which callback is handed which stream).
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"HostStream({self.name!r})"

    def synchronize(self) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Nothing to order."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to order."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """An event behind everything issued so far."""
        return event or HostEvent()

    def query(self) -> bool:
        """True: nothing is under way."""
        return True


class Streams:
    """The two streams of an executor: its thread's own, and the one on which the forward runs.

    ``start_load_kv`` and ``wait_for_save`` get ``current``; the per-layer hooks get ``execution``.
    """

    def __init__(self, device: torch.device) -> None:
        self.current: Any
        self.execution: Any
        if device.type == "cuda":
            self.current = torch.cuda.current_stream(device)
            self.execution = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        else:
            self.current = HostStream("current")
            self.execution = HostStream("execution")

    def on_execution(self) -> contextlib.AbstractContextManager[Any]:
        """Issue work on ``execution``, ordered after ``current`` so far."""
        self.execution.wait_stream(self.current)
        if isinstance(self.execution, HostStream):
            return contextlib.nullcontext()
        return torch.cuda.stream(self.execution)

    def join(self) -> None:
        """Order ``current`` after everything issued on ``execution``."""
        self.current.wait_stream(self.execution)

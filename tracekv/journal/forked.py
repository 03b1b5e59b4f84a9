"""A forked child must not write into its parent's journal, not even through a view that it inherited."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Protocol

_MAP_FIXED = 0x10  # Linux, all architectures that Python's mmap module leaves it out of
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Inherited(Protocol):
    """What has to be given up in a child."""

    def abandon_in_child(self) -> None:
        """Runs in the child, before any of its own code."""


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(journal: Inherited) -> None:
    """Have ``journal`` abandoned in every child that this process forks while it lives."""
    _watched.add(journal)


def detach(mapping: mmap.mmap) -> None:
    """Put private, zeroed memory where ``mapping`` shares a file; views over it stay valid and no longer reach the file.

    Closing the map can't do that: capture holds views over it, and a map with views can't be closed.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if _libc.mmap(address, len(mapping), mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0) != address:
        raise OSError(ctypes.get_errno(), "tracekv: the parent's journal can't be detached in a forked child")


def _abandon() -> None:
    for journal in list(_watched):
        journal.abandon_in_child()


os.register_at_fork(after_in_child=_abandon)

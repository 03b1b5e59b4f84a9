"""A file system in memory whose operations can be watched, held up and made to fail: ``faulty://``."""

from __future__ import annotations

import threading
from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyFileSystem(MemoryFileSystem):
    protocol = "faulty"
    #: (operation, path, thread) of each call, in order.
    calls: ClassVar[list[tuple[str, str, threading.Thread]]] = []
    #: Called with (operation, path) before each; may block or raise.
    before = staticmethod(lambda operation, path: None)

    @classmethod
    def reset(cls):
        cls.calls.clear()
        cls.before = staticmethod(lambda operation, path: None)
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://", 1))

    def _note(self, operation, path):
        self.calls.append((operation, path, threading.current_thread()))
        type(self).before(operation, path)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._note("put", path)
        super().pipe_file(path, value, mode=mode)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._note("read", path)
        return super().cat_file(path, start=start, end=end)

    def find(self, path, *args, **kwargs):
        self._note("list", path)
        return super().find(path, *args, **kwargs)

    def exists(self, path, **kwargs):
        self._note("head", path)
        return super().exists(path, **kwargs)

    def rm_file(self, path):
        self._note("delete", path)
        super().rm_file(path)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)

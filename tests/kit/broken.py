"""A pair that keys blocks by their own tokens alone, for the command to find out."""

from __future__ import annotations

import hashlib

from tracekv.testing import minimal


class Scheduler(minimal.Scheduler):
    def keys(self, request):
        tokens, size = request.get_tokens(0), self.block
        blocks = (tokens[at : at + size] for at in range(0, len(tokens) // size * size, size))
        return [hashlib.sha256(repr(block).encode()).digest() for block in blocks]


Worker = minimal.Worker

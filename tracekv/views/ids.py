"""Trace and span ids as functions of facts, so that ranks, processes and a restarted reader come to the same ids.

A trace id is SHA-256 over the run id (16 bytes that every rank knows) and what the trace is about. Where no run id was ever
seen, the process id (16 random bytes) takes its place, and then traces of different processes don't join.
"""

from __future__ import annotations

import hashlib
import struct

_pack = struct.Struct("<qqq").pack


def trace_id(run: bytes, kind: str, key: int) -> bytes:
    """16 bytes for the trace of request or step ``key`` of a run; ``kind`` keeps their number spaces apart."""
    return hashlib.sha256(b"tracekv\0%b\0%b\0%d" % (run, kind.encode(), key)).digest()[:16]


def root_id(trace: bytes, part: int = 0) -> bytes:
    """8 bytes for a trace's root, the same in every process; a story that went on after its end has further parts."""
    return hashlib.blake2b(trace + b"root%d" % part, digest_size=8).digest()


def span_id(trace: bytes, process_id: bytes, what: int, started_ns: int, which: int = 0) -> bytes:
    """8 bytes for a span that began at ``started_ns`` in a process; ``what`` and ``which`` tell those of one moment apart."""
    return hashlib.blake2b(trace + process_id + _pack(what, started_ns, which), digest_size=8).digest()


def request_label(run: bytes, request_id: int, *, hashed: bool) -> str:
    """How a request is named in everything that leaves the process.

    The digest is keyed with the run id, which is itself never exported: request ids are small numbers, and a plain digest of
    one is found by counting.
    """
    if not hashed:
        return str(request_id)
    return hashlib.blake2b(b"request%d" % request_id, key=run[:64], digest_size=8).hexdigest()


def run_label(run_id: bytes) -> str:
    """A name of the run that doesn't give away the run id."""
    return hashlib.sha256(b"tracekv run\0" + run_id).hexdigest()[:16]

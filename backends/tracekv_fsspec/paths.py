"""Where objects lie below the store's root.

::

    <deployment>/s/<hh>/<writer>-<sequence>.r<rank>.seg     hh spreads segments over key prefixes
    <deployment>/m/<writer>/<sequence>.man                  a commit; listing order is the order of writing
    <deployment>/m/<writer>/<sequence>.tmb                  a tombstone: commits that are going to be deleted
    <deployment>/u/<writer>.use                             when an engine last read which commits
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import NamedTuple

#: Sequence numbers have so many digits that text order is number order.
_DIGITS = 12
_COMMIT = re.compile(r"^([0-9a-f]{16})/m/([0-9a-f]{32})/(\d{12})\.(man|tmb)$")
_SEGMENT = re.compile(r"^([0-9a-f]{16})/s/[0-9a-f]{2}/([0-9a-f]{32})-(\d{12})\.r(\d+)\.seg$")


class Commit(NamedTuple):
    """Who wrote something, and as which one of theirs."""

    writer: bytes
    sequence: int


def new_writer() -> bytes:
    """16 bytes, unique; they begin with the time in milliseconds, so later writers sort behind earlier ones."""
    return (time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10)


def deployment_folder(deployment: bytes) -> str:
    """The folder of everything that shares model, layout and format. The full digest is in each object's header."""
    return deployment.hex()[:16]


def segment_path(deployment: bytes, writer: bytes, sequence: int, rank: int) -> str:
    """A path that no other writer, sequence or rank has."""
    name = f"{writer.hex()}-{sequence:0{_DIGITS}d}.r{rank}"
    spread = hashlib.sha256(name.encode()).hexdigest()[:2]
    return f"{deployment_folder(deployment)}/s/{spread}/{name}.seg"


def manifest_folder(deployment: bytes) -> str:
    """Prefix of every writer's manifests."""
    return f"{deployment_folder(deployment)}/m/"


def manifest_path(deployment: bytes, writer: bytes, sequence: int) -> str:
    """Path of a writer's n-th commit."""
    return f"{manifest_folder(deployment)}{writer.hex()}/{sequence:0{_DIGITS}d}.man"


def tombstone_path(deployment: bytes, writer: bytes, sequence: int) -> str:
    """Path of a tombstone: where manifests lie, so that one listing finds both."""
    return f"{manifest_folder(deployment)}{writer.hex()}/{sequence:0{_DIGITS}d}.tmb"


def uses_folder(deployment: bytes) -> str:
    """Prefix of every engine's uses."""
    return f"{deployment_folder(deployment)}/u/"


def uses_path(deployment: bytes, writer: bytes) -> str:
    """Path of an engine's uses, which it writes again and again."""
    return f"{uses_folder(deployment)}{writer.hex()}.use"


def commit_of(path: str) -> tuple[Commit, bool] | None:
    """Writer and sequence of a manifest's or tombstone's path and whether it is a tombstone; None for anything else."""
    match = _COMMIT.match(path)
    return (Commit(bytes.fromhex(match[2]), int(match[3])), match[4] == "tmb") if match else None


def segment_of(path: str) -> tuple[Commit, int] | None:
    """Writer, sequence and rank of a segment's path, or None for anything else."""
    match = _SEGMENT.match(path)
    return (Commit(bytes.fromhex(match[2]), int(match[3])), int(match[4])) if match else None


def path_digest(path: str) -> bytes:
    """What reports name an object by."""
    return hashlib.sha256(path.encode()).digest()[:16]

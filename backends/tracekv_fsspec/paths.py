"""Where objects lie below the store's root.

::

    <deployment>/s/<hh>/<writer>-<sequence>.r<rank>.seg     hh spreads segments over key prefixes
    <deployment>/m/<writer>/<sequence>.man                  listing order is the order of writing
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import NamedTuple

#: Sequence numbers have so many digits that text order is number order.
_DIGITS = 12
_MANIFEST = re.compile(r"/m/([0-9a-f]{32})/(\d{12})\.man$")


class ManifestName(NamedTuple):
    """Who wrote a manifest, and as which one."""

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


def manifest_name(path: str) -> ManifestName | None:
    """Writer and sequence of a manifest's path, or None for anything else that lies there."""
    match = _MANIFEST.search(path)
    return ManifestName(bytes.fromhex(match[1]), int(match[2])) if match else None


def path_digest(path: str) -> bytes:
    """What reports name an object by."""
    return hashlib.sha256(path.encode()).digest()[:16]

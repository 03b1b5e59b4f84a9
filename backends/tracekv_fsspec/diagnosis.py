"""What ``tracekv doctor`` asks a backend: can it be used as it is set up here?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tracekv.settings import SettingsError, load_section
from tracekv_fsspec import protocols
from tracekv_fsspec.arena_file import default_directory
from tracekv_fsspec.scheduler import open_configured
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.store import StoreUnusable, check_usable


class NoRoom(Exception):
    """The arena would be smaller than it is set up to be, or not be at all."""


def diagnose() -> Iterator[tuple[str, Exception | None]]:
    """``(subject: what is the case, None or what is wrong)`` for the model's name, the store and the arena.

    The store is written to, read and listed, as at bring-up; what was written is removed.
    """
    try:
        settings = load_section("fsspec", Settings)
    except SettingsError as error:
        yield "TRACEKV_FSSPEC__*: wrong", error
        return
    if not settings.model_id:
        yield (
            "TRACEKV_FSSPEC__MODEL_ID: missing",
            SettingsError("It is not set. Name the weights that make the KV: model and revision, or a digest."),
        )
    yield _store(settings)
    yield _arena(settings)


def _store(settings: Settings) -> tuple[str, Exception | None]:
    shown = protocols.shown_url(settings.url)
    try:
        store = open_configured(settings)
        try:
            check_usable(store)
        finally:
            store.close()
    except StoreUnusable as error:
        return f"{shown}: unusable", error
    return f"{shown}: can be written, read and listed", None


def _arena(settings: Settings) -> tuple[str, Exception | None]:
    folder = Path(settings.arena_dir) if settings.arena_dir else default_directory()
    existing = folder
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return f"{folder}: unwritable", NoRoom(
            "The arena's folder can't be written. Name another with TRACEKV_FSSPEC__ARENA_DIR."
        )
    free = os.statvfs(existing)
    room, wanted = free.f_bavail * free.f_frsize, settings.arena_bytes
    if room < wanted:
        return f"{folder}: too little room", NoRoom(
            f"{room >> 20} MiB are free, and TRACEKV_FSSPEC__ARENA_BYTES={wanted}: the arena would be smaller. Make room there "
            "(in a container: a larger /dev/shm), or ask for less."
        )
    return f"{folder}: {room >> 20} MiB free for an arena of {wanted >> 20} MiB", None

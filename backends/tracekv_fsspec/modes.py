"""Settings that not every engine can have: refused where they would serve wrong KV, said once where they do nothing."""

from __future__ import annotations

import logging

from tracekv.contract.reading import LayoutView
from tracekv.settings import SettingsError
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import PARKED_TRIES

_log = logging.getLogger("tracekv.fsspec")


def announce(settings: Settings) -> None:
    """Say once, when the engine starts, what a setting risks."""
    if settings.offer == "async":
        _log.warning(
            "tracekv: TRACEKV_FSSPEC__OFFER=async: requests are promised blocks that are still to be read, and TensorRT-LLM can't be "
            "told afterwards that one failed; if a block can't be had for %.0f s, this engine stops rather than serve wrong KV. "
            "TRACEKV_FSSPEC__OFFER=staged has no such case",
            PARKED_TRIES * settings.read_deadline_ms / 1000,
        )


def checked(settings: Settings, layout: LayoutView) -> LayoutView:
    """The layout, for which the settings are right.

    Raises:
        SettingsError: They would serve wrong KV, or what they ask for can't be told.
    """
    if settings.window_lookup == "window" and layout.is_single_tensor:
        raise SettingsError(
            "tracekv: TRACEKV_FSSPEC__WINDOW_LOOKUP=window leaves out blocks that an attention window has passed, and this engine "
            "registered its KV caches as a single tensor, which doesn't tell windows (TensorRT-LLM's KVCacheManager, V1). Set it to "
            "strict, or run the engine with KVCacheManagerV2."
        )
    if settings.window_lookup == "window" and settings.offer == "async":
        raise SettingsError(
            "tracekv: TRACEKV_FSSPEC__WINDOW_LOOKUP=window needs offers that are honoured in full, and of an asynchronous one the "
            "runtime may take less, or none (TRACEKV_FSSPEC__OFFER=async). Set one of them to strict or staged."
        )
    if settings.partial_blocks and layout.is_single_tensor:
        _log.warning(
            "tracekv: TRACEKV_FSSPEC__PARTIAL_BLOCKS does nothing here: offers that end inside a block are for KVCacheManagerV2, "
            "and this engine registered its KV caches as V1 does"
        )
    return layout

"""Settings that not every engine can have: refused where they would serve wrong KV, said once where they do nothing."""

from __future__ import annotations

import logging

from tracekv.contract.reading import LayoutView
from tracekv.settings import SettingsError
from tracekv_fsspec.settings import Settings

_log = logging.getLogger("tracekv.fsspec")


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
    if settings.partial_blocks and layout.is_single_tensor:
        _log.warning(
            "tracekv: TRACEKV_FSSPEC__PARTIAL_BLOCKS does nothing here: offers that end inside a block are for KVCacheManagerV2, "
            "and this engine registered its KV caches as V1 does"
        )
    return layout

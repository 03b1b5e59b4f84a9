"""The smallest correct pairs, over a dictionary of the process: what the kit has to find clean.

Which dictionary, the variable ``MINIMAL_CONNECTOR_STORE`` says: engines with other models or layer groups take another one.
"""

from __future__ import annotations

import os
from typing import Any

from tracekv.contract import reading
from tracekv.testing.corpus import correct

VARIABLE = "MINIMAL_CONNECTOR_STORE"
_STORES: dict[str, dict[tuple[bytes, int], Any]] = {}


def _share(half: object) -> None:
    """Both halves of a pair find the same dictionary; the base's is the class's."""
    vars(half)["store"] = _STORES.setdefault(os.environ.get(VARIABLE, ""), {})


class _LeavesAlone(correct.Leader):
    """A request whose KV has no key is neither stored nor served."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        _share(self)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing for images without hashes; a request that isn't known here is passed over in every other callback."""
        try:
            reading.multimodal_digest(request)
        except reading.UnreadableRequest:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class Scheduler(_LeavesAlone):
    """Offers what the dictionary holds."""

    supports_attention_dp = True


class Worker(correct.Follower):
    """Copies during the pass."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        _share(self)


class ParkingScheduler(_LeavesAlone, correct.ParkingLeader):
    """Has requests parked while they are loaded."""

    supports_attention_dp = True


class ParkingWorker(correct.ParkingFollower):
    """Loads between passes."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        _share(self)


class KeepingScheduler(_LeavesAlone, correct.KeepingLeader):
    """Keeps the pages of finished requests until they are saved."""


class KeepingWorker(correct.KeepingFollower):
    """Saves between passes."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        _share(self)

"""tracekv_fsspec over the kit's whole matrix, in each of the ways in which it may be set."""

from __future__ import annotations

import pytest

from tracekv.testing import Kit, matrix
from tracekv.testing.verdicts import Verdict
from tracekv_fsspec import Scheduler, Worker

pytestmark = pytest.mark.soak

BASE = {
    "TRACEKV_FSSPEC__URL": "file://{folder}/kv",
    "TRACEKV_FSSPEC__MODEL_ID": "kit",
    "TRACEKV_FSSPEC__ARENA_BYTES": str(64 << 20),
}
WAITING = {"TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000"}
PARKING = {"TRACEKV_FSSPEC__OFFER": "async"}
PARTIAL = {"TRACEKV_FSSPEC__PARTIAL_BLOCKS": "true"}
WINDOW = {"TRACEKV_FSSPEC__WINDOW_LOOKUP": "window"}
#: Settings, and the cells for which they are: parts of blocks need V2, windows two layer groups.
WAYS = {
    "staged": (WAITING, "*"),
    "async": (PARKING, "*"),
    "staged-partial": (WAITING | PARTIAL, "v2*"),
    "async-partial": (PARKING | PARTIAL, "v2*"),
    "window": (WAITING | WINDOW, "v2-groups2/*"),
    "window-partial": (WAITING | WINDOW | PARTIAL, "v2-groups2/*"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_cell_is_clean(way):
    settings, cells = WAYS[way]
    with Kit(Scheduler, Worker, environment={**BASE, **settings}) as kit:
        results = [kit.run(cell) for cell in matrix(16, cells)]
    assert len(results) >= 40
    assert {result.name: result.faults for result in results if result.faults} == {}
    # What isn't about parking is served in any way; what is, with OFFER=async only.
    others = {result.name for result in results if result.verdict is not Verdict.OK}
    parked = {result.name for result in results if result.name.endswith("parked")}
    assert others == (set() if settings.items() >= PARKING.items() else parked)

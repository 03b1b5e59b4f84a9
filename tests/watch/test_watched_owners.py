"""Whose pages the watch takes them for."""

from __future__ import annotations

import random

import tracekv
from tests.support.connectors import GroupedScheduler, GroupedWorker
from tracekv.contract.reading import layout_of
from tracekv.harness import Executor
from tracekv.journal.records import BuildCall
from tracekv.journal.vocabulary import Direction
from tracekv.testing.journals import recorded


class Looks(GroupedWorker):
    """Reads every page before each forward pass, whoever has it."""

    def register_kv_cache_layout(self, layout):
        self._regions = [region.slots() for group in layout_of(layout).groups for region in group.regions]

    def start_load_kv(self, stream):
        self.seen = [slots.clone() for slots in self._regions]


def test_a_replayed_request_has_its_new_pages_only(model):
    with recorded(TRACEKV_WATCH="1") as run:
        executor = Executor(model("llama"), tracekv.trace(GroupedScheduler), tracekv.trace(Looks), num_blocks=8)
        request = executor.submit(random.Random(1).choices(range(2048), k=5), 3)
        executor.step()
        executor.destroy(request)
        executor.run()
        executor.shutdown()
    builds = [record for _, record in run.records if isinstance(record, BuildCall) and record.pages]
    first, again = ({page for _, (pages,) in record.pages for page in pages} for record in builds)
    assert first.isdisjoint(again)  # else the test shows nothing
    seen = [
        page
        for moved in run.transfers(Direction.SAVE)
        if moved.request_id == request.request_id and moved.step >= builds[1].step
        for page in moved.pages
    ]
    assert set(seen) == again
    assert [finding for finding in run.findings() if finding.rule == "S8"] == []

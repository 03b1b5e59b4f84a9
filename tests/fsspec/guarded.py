"""A worker that holds itself to its word: outside the pages that a pass's loads name, it changes none, in no callback."""

from __future__ import annotations

import torch

from tracekv.contract import reading
from tracekv_fsspec import Worker


class OtherPagesChanged(RuntimeError):
    """A page that belongs to another request, or to nobody, was written."""


class Guarded(Worker):
    """Compares every page before and after each of its callbacks."""

    _pages = None

    def register_kv_caches(self, kv_cache_tensor):
        super().register_kv_caches(kv_cache_tensor)
        self._watch(self._layout_of_tensor(kv_cache_tensor))

    def register_kv_cache_layout(self, layout):
        super().register_kv_cache_layout(layout)
        self._watch(reading.layout_of(layout))

    def start_load_kv(self, stream):
        plan = self.get_connector_meta()
        mine = [copy for copy in plan.loads if plan.step > self._loaded_step]
        self._guarded(lambda: super(Guarded, self).start_load_kv(stream), mine)

    def wait_for_save(self, stream):
        self._guarded(lambda: super(Guarded, self).wait_for_save(stream))

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return self._guarded(lambda: super(Guarded, self).get_finished(finished_gen_req_ids, started_loading_req_ids))

    def _watch(self, layout):
        self._pages = [(group.layer_group_id, [region.slots() for region in group.regions]) for group in layout.groups]

    def _guarded(self, call, loads=()):
        before = [[slots.clone() for slots in regions] for _, regions in self._pages]
        answer = call()
        for (group, regions), was in zip(self._pages, before, strict=True):
            named = {page for copy in loads if copy.layer_group == group for page in copy.pages}
            for slots, old in zip(regions, was, strict=True):
                changed = set((slots != old).flatten(1).any(1).nonzero().flatten().tolist())
                if changed - named:
                    raise OtherPagesChanged(f"pages {sorted(changed - named)} of layer group {group}")
        return answer


class Careless(Guarded):
    """The negative control: a load goes on into the page behind its last one."""

    def start_load_kv(self, stream):
        plan = self.get_connector_meta()
        if not (plan.loads and plan.step > self._loaded_step):
            super().start_load_kv(stream)
            return
        last = max(page for copy in plan.loads for page in copy.pages)

        def loads():
            Worker.start_load_kv(self, stream)
            for _, regions in self._pages:
                for slots in regions:
                    behind = (last + 1) % len(slots)
                    slots[behind] = torch.bitwise_not(slots[behind])

        self._guarded(loads, plan.loads)

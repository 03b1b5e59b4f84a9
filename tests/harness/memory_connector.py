"""A minimal correct connector: whole blocks in a dictionary, both request lists read, keys by group and whole prefix.

It tells what it transfers; that is recorded where the pair is traced.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch

import tracekv
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker, valid_page_slots
from tracekv.contract.reading import layout_of, layout_of_tensor, new_block_ids
from tracekv.journal.vocabulary import Direction, Tier

BLOCK = 32


def memory_pair(store, *, offered=None, after_load=None, is_async=False, polls=0):
    """``(scheduler class, worker class)`` over the dictionary ``store``.

    Args:
        store: (salt, layer group, tokens up to the block's end) -> bytes of the page.
        offered: Most tokens to offer; None: whatever is stored.
        is_async: Load while the request is parked: the pages are written when ``get_finished`` returns its id.
        polls: So many polls of ``get_finished`` return before it does.
        after_load: Called with ``(layer group, page)`` after each page that was loaded.
    """

    class Scheduler(KvCacheConnectorScheduler):
        def __init__(self, llm_args):
            super().__init__(llm_args)
            self.live = {}
            self.loads = {}
            self.parked = []

        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            tokens, salt = request.get_tokens(0), request.cache_salt
            groups = len({group for _, group, _ in store})
            end = num_computed_tokens
            while end + BLOCK < request.prompt_len and all(
                (salt, group, tuple(tokens[: end + BLOCK])) in store for group in range(groups or 1)
            ):
                end += BLOCK
            count = end - num_computed_tokens
            count = count if offered is None else min(count, offered)
            self.loads[request.request_id] = (num_computed_tokens, num_computed_tokens + count)
            return count, is_async and count > 0

        def update_state_after_alloc(self, request, block_ids):
            self.update_state_after_alloc_by_layer_group(request, [block_ids])

        def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
            start, end = self.loads.pop(request.request_id, (0, 0))
            if is_async and end > start:
                # The request isn't in this pass's output: what is loaded is known from here, be it honoured or not.
                self.parked += self.pages(request, request.get_tokens(0), block_ids_by_layer_group, start, end)
            elif end > start:
                self.loads[request.request_id] = (start, start + request.py_num_connector_matched_tokens)

        def build_connector_meta(self, scheduler_output):
            loads, saves = self.parked, []
            self.parked = []
            for data in scheduler_output.new_requests:
                self.live.pop(data.request_id, None)  # a replay is reported anew
            for data in scheduler_output.new_requests + scheduler_output.cached_requests:
                tokens, lists, saved = self.live.setdefault(data.request_id, ([], [], [0]))
                tokens += data.new_tokens
                new = new_block_ids(data)
                lists += [[] for _ in range(len(new) - len(lists))]
                for slots, more in zip(lists, new, strict=True):
                    slots += more
                start, end = self.loads.pop(data.request_id, (0, 0))
                loads += self.pages(data, tokens, lists, start, end)
                begin = max(saved[0], end)
                done = (max(end, data.computed_position) + data.num_scheduled_tokens) // BLOCK * BLOCK
                if end:
                    done = (end + data.num_scheduled_tokens) // BLOCK * BLOCK
                saves += self.pages(data, tokens, lists, begin, done)
                saved[0] = max(done, begin)
            return loads, saves

        def pages(self, data, tokens, lists, start, end):
            return [
                (data.request_id, (data.cache_salt, group, tuple(tokens[: (ordinal + 1) * BLOCK])), group, slot)
                for group, slots in enumerate(lists)
                for ordinal, slot in valid_page_slots(slots)
                if start <= ordinal * BLOCK < end
            ]

        def request_finished(self, request, cache_block_ids):
            self.live.pop(request.request_id, None)  # the overlap loop may announce it again
            return False

        def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
            return self.request_finished(request, cache_block_ids_by_layer_group)

    class Worker(KvCacheConnectorWorker):
        loaded_pages = 0

        def __init__(self, llm_args):
            super().__init__(llm_args)
            self.in_flight = {}
            self.waiting = {}

        def register_kv_caches(self, kv_cache_tensor):
            self.groups = layout_of_tensor(kv_cache_tensor).groups

        def register_kv_cache_layout(self, layout):
            self.groups = layout_of(layout).groups

        def page(self, group, slot):
            (region,) = self.groups[group].regions
            assert 0 <= slot < region.num_slots
            return region.slots()[slot]

        def start_load_kv(self, stream):
            for transfer in self._metadata[0]:
                if is_async:
                    self.in_flight.setdefault(transfer[0], []).append(transfer)
                else:
                    self.load([transfer])

        def load(self, transfers):
            for request_id, key, group, slot in transfers:
                started = perf_counter_ns()
                self.page(group, slot).copy_(store[key])
                self.loaded_pages += 1
                self.tell(Direction.LOAD, request_id, group, slot, started)
                if after_load:
                    after_load(group, self.page(group, slot).view(torch.float32))

        def wait_for_layer_load(self, layer_idx, stream):
            pass

        def save_kv_layer(self, layer_idx, stream):
            pass

        def wait_for_save(self, stream):
            for request_id, key, group, slot in self._metadata[1]:
                started = perf_counter_ns()
                store.setdefault(key, self.page(group, slot).clone())
                self.tell(Direction.SAVE, request_id, group, slot, started)

        def tell(self, direction, request_id, group, slot, started):
            nbytes = self.page(group, slot).nbytes
            tracekv.transfer(direction, request_id, group, [slot], nbytes, Tier.HOST, started, perf_counter_ns())

        def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
            self.waiting.update(dict.fromkeys(started_loading_req_ids, polls))
            done = [request_id for request_id, left in self.waiting.items() if left == 0]
            self.waiting = {request_id: left - 1 for request_id, left in self.waiting.items() if left > 0}
            for request_id in done:
                self.load(self.in_flight.pop(request_id, []))
            return [], done

    return Scheduler, Worker

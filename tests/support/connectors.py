"""Small connectors and request objects for tests of what surrounds a connector."""

from __future__ import annotations

from types import SimpleNamespace

from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker


def request(request_id=7, prompt_len=64, **more):
    tokens = list(range(prompt_len))
    return SimpleNamespace(request_id=request_id, prompt_len=prompt_len, get_tokens=lambda beam: tokens, **more)


class FlatScheduler(KvCacheConnectorScheduler):
    def build_connector_meta(self, scheduler_output):
        return {"plan": 1}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 32, False

    def update_state_after_alloc(self, request, block_ids):
        pass

    def request_finished(self, request, cache_block_ids):
        return False


class GroupedScheduler(KvCacheConnectorScheduler):
    def build_connector_meta(self, scheduler_output):
        return None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
        pass

    def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
        return False


class _Worker(KvCacheConnectorWorker):
    def start_load_kv(self, stream):
        pass

    def wait_for_layer_load(self, layer_idx, stream):
        pass

    def save_kv_layer(self, layer_idx, stream):
        pass

    def wait_for_save(self, stream):
        pass

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


class TensorWorker(_Worker):
    def register_kv_caches(self, kv_cache_tensor):
        pass


class GroupedWorker(_Worker):
    def register_kv_cache_layout(self, layout):
        pass

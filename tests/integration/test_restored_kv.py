"""Token equality against a run without a connector is the last word; each equality here has its negative control."""

from __future__ import annotations

import random

import pytest
import torch

import tracekv
from tests.support.connectors import FlatScheduler, TensorWorker
from tracekv.contract import reading
from tracekv.harness import Executor
from tracekv.journal.current import current
from tracekv.journal.records import (
    AllocCall,
    BuildCall,
    FinishCall,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    QueryCall,
    Transfer,
)
from tracekv.journal.vocabulary import Direction
from tracekv_fsspec import Scheduler, Worker

TOLERANCE = 1e-3
PROMPT = 700
NEW = 8


def tokens(seed, count=PROMPT):
    return random.Random(seed).choices(range(2048), k=count)


@pytest.fixture
def executor(model, mode):
    """Executors on one model; ended with the test."""
    made = []

    def make(scheduler=None, worker=None, **options):
        pair = (tracekv.trace(scheduler), tracekv.trace(worker)) if scheduler else ()
        defaults = {"mode": mode, "chunk_tokens": 256, "num_blocks": 96}
        made.append(Executor(model, *pair, **{**defaults, **options}))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def run(executor, prompt, **more):
    request = executor.submit(prompt, NEW, **more)
    executor.run()
    assert request.error is None
    return request


def saved(executor, prompt, **more):
    """The prompt run once with the connector, everything stored."""
    engine = executor(Scheduler, Worker)
    request = run(engine, prompt, **more)
    engine.shutdown()
    return request


def recorded(kind):
    records, _, lost = current.journal.read(0)
    assert lost == 0
    return [record for record in records if type(record) is kind]


def test_a_restored_prompt_is_bit_equal_to_device_reuse_and_close_to_cold(executor):
    prompt = tokens(1)
    first = saved(executor, prompt)
    warm = run(executor(Scheduler, Worker), prompt)
    bare = executor()
    cold, reused = run(bare, prompt), run(bare, prompt)
    assert warm.honoured_tokens == reused.device_tokens == (PROMPT - 1) // 32 * 32
    assert warm.output_tokens == cold.output_tokens == first.output_tokens
    assert torch.equal(warm.first_logits, reused.first_logits)
    assert (warm.first_logits - cold.first_logits).abs().max() <= TOLERANCE


def groups_of(preset):
    return {"llama": [0], "gemma3": [0, 1]}[preset]


def test_a_page_changed_after_loading_moves_the_logits(executor, preset, monkeypatch):
    """The negative control of the equality above, for every layer group."""
    monkeypatch.setenv("TRACEKV_FSSPEC__LAYERWISE", "off")  # or what is changed could be loaded afterwards
    prompt = tokens(2)
    saved(executor, prompt)
    cold = run(executor(), prompt)
    for group in groups_of(preset):

        class Spoiling(Worker):
            spoils = group

            def start_load_kv(self, stream):
                super().start_load_kv(stream)
                loads = [copy for copy in self._seen.loads if copy.layer_group == self.spoils]
                if loads:
                    page = loads[-1].pages[-1]
                    for region in self._view.group_by_id(self.spoils).regions:
                        rows = region.slots()
                        rows[page] = rows[page].view(torch.float32).neg().view(torch.uint8)

            def bind_connector_meta(self, metadata):
                super().bind_connector_meta(metadata)
                self._seen = metadata

            def register_kv_caches(self, kv_cache_tensor):
                super().register_kv_caches(kv_cache_tensor)
                self._view = _ById(reading.layout_of_tensor(kv_cache_tensor))

            def register_kv_cache_layout(self, layout):
                super().register_kv_cache_layout(layout)
                self._view = _ById(reading.layout_of(layout))

        warm = run(executor(Scheduler, Spoiling), prompt)
        assert warm.honoured_tokens > 0
        assert (warm.first_logits - cold.first_logits).abs().max() >= 100 * TOLERANCE, group


class _ById:
    def __init__(self, layout):
        self._groups = {group.layer_group_id: group for group in layout.groups}

    def group_by_id(self, layer_group_id):
        return self._groups[layer_group_id]


def test_after_a_load_a_shorter_prompt_that_reuses_its_pages_is_equal(executor):
    prompt = tokens(3)
    saved(executor, prompt)
    warm = executor(Scheduler, Worker)
    assert run(warm, prompt).honoured_tokens > 0
    shorter = prompt[:-60] + tokens(4, 20)
    again = run(warm, shorter)
    assert again.device_tokens + again.honoured_tokens > 0
    assert again.output_tokens == run(executor(), shorter).output_tokens


def test_several_requests_in_a_batch_are_each_restored(executor):
    prompts = [tokens(seed, count) for seed, count in ((5, 300), (6, 421), (7, 96))]
    first = executor(Scheduler, Worker)
    for prompt in prompts:
        first.submit(prompt, NEW)
    first.run()
    first.shutdown()
    warm = executor(Scheduler, Worker)
    requests = [warm.submit(prompt, NEW) for prompt in prompts]
    warm.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.honoured_tokens == (len(prompt) - 1) // 32 * 32
        assert request.output_tokens == run(executor(), prompt).output_tokens


def test_a_longer_prompt_is_restored_as_far_as_it_is_known_and_continues(executor):
    prompt = tokens(8)
    first = saved(executor, prompt)
    following = prompt + first.output_tokens + tokens(9, 100)
    warm = run(executor(Scheduler, Worker), following)
    assert warm.honoured_tokens == (PROMPT + NEW - 1) // 32 * 32
    assert warm.output_tokens == run(executor(), following).output_tokens


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "another"},
        {"multimodal_hashes": [[9] * 8], "multimodal_positions": [3], "multimodal_lengths": [4]},
    ],
)
def test_another_tenant_or_image_restores_nothing(executor, other):
    prompt = tokens(10, 200)
    saved(executor, prompt, cache_salt="mine")
    assert run(executor(Scheduler, Worker), prompt, **other).honoured_tokens == 0
    assert run(executor(Scheduler, Worker), prompt, cache_salt="mine").honoured_tokens == 192


def test_what_is_recorded_adds_up_to_what_happened(executor, preset):
    prompt = tokens(11)
    saved(executor, prompt)
    before, builds = len(recorded(Transfer)), len(recorded(BuildCall))
    engine = executor(Scheduler, Worker)
    warm = run(engine, prompt)
    query, alloc = recorded(QueryCall)[-1], recorded(AllocCall)[-1]
    assert (query.prompt_tokens, query.computed_tokens) == (PROMPT, 0)
    assert query.offered_tokens == alloc.honoured_tokens == warm.honoured_tokens
    assert recorded(Lookup)[-1].reason is None
    loads = [each for each in recorded(Transfer)[before:] if each.direction is Direction.LOAD]
    assert sorted({each.layer_group for each in loads}) == groups_of(preset)
    assert sum(each.nbytes for each in loads) > 0
    assert len(recorded(BuildCall)) - builds == engine.calls["scheduler.build_connector_meta"]
    polls = len(recorded(FinishedCall)) + sum(idle.count for idle in recorded(IdlePolls))
    assert polls >= engine.calls["worker.get_finished"]
    assert len(recorded(LayerHooks)) >= engine.passes
    assert recorded(FinishCall)[-1].keeps_pages is False


def test_a_connector_without_a_store_runs_traced_and_changes_nothing(model, executor, mode):
    prompt = tokens(12, 200)

    class Never(FlatScheduler):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return 0, False

        def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
            pass

        def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
            return False

    class Idle(TensorWorker):
        def register_kv_cache_layout(self, layout):
            pass

    traced = run(executor(Never, Idle), prompt)
    bare = run(executor(), prompt)
    assert traced.output_tokens == bare.output_tokens
    assert torch.equal(traced.first_logits, bare.first_logits)

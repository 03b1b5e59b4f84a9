"""PARTIAL_BLOCKS: the tail of a prompt is stored, and offers begin and end inside blocks. Tokens are those of a bare run."""

from __future__ import annotations

import random

import pytest
import torch

import tracekv
from tests.fsspec.engine import B, prompt
from tracekv import capture
from tracekv.contract import reading
from tracekv.harness import Executor, build_model
from tracekv.journal.current import current
from tracekv.journal.records import Drop, Lookup, Transfer
from tracekv.journal.vocabulary import Direction, DropReason, MissReason
from tracekv.testing import Kit, matrix
from tracekv.testing.corpus import judge
from tracekv.testing.verdicts import Verdict
from tracekv_fsspec import Scheduler, Worker, offers
from tracekv_fsspec.format import parse_segment

GROUPS = (None, 64 * B)
BLOCK, NEW = 32, 6
TOLERANCE = 1e-3
MODELS = {}


@pytest.fixture
def partial(configure, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    configure(partial_blocks="true", arena_bytes=64 << 20)
    return configure


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    if request.param not in MODELS:
        MODELS[request.param] = build_model(request.param)
    return MODELS[request.param]


def tokens(count, seed=1):
    return random.Random(seed).choices(range(2048), k=count)


def serve(executor, *prompts):
    requests = []
    for each in prompts:
        requests.append(executor.submit(each, NEW))
        executor.run()
        assert requests[-1].error is None
    executor.shutdown()
    return requests


def with_connector(model, *prompts, worker=Worker, **options):
    return serve(Executor(model, Scheduler, worker, **options), *prompts)


@pytest.mark.parametrize("chunk", [None, 128])
def test_a_prompt_is_restored_to_its_last_token_but_one(model, partial, chunk):
    prompt_tokens = tokens(5 * BLOCK + 13)
    (cold,) = serve(Executor(model), prompt_tokens)
    with_connector(model, prompt_tokens, chunk_tokens=chunk)
    (warm,) = with_connector(model, prompt_tokens, chunk_tokens=chunk)
    assert warm.honoured_tokens == len(prompt_tokens) - 1
    assert warm.output_tokens == cold.output_tokens
    assert (warm.first_logits - cold.first_logits).abs().max() <= TOLERANCE


def test_a_longer_prompt_goes_on_from_the_stored_tail(model, partial):
    first = tokens(3 * BLOCK + 20)
    longer = first + tokens(60, seed=2)
    (cold,) = serve(Executor(model), longer)
    with_connector(model, first)
    (warm,) = with_connector(model, longer)
    assert warm.honoured_tokens == len(first)
    assert warm.output_tokens == cold.output_tokens
    assert (warm.first_logits - cold.first_logits).abs().max() <= TOLERANCE
    (again,) = with_connector(model, longer)  # its blocks were saved, the one that was loaded in part among them
    assert again.honoured_tokens == len(longer) - 1
    assert again.output_tokens == cold.output_tokens


def test_a_prompt_that_parts_inside_the_stored_tail_gets_none_of_it(model, partial):
    first = tokens(3 * BLOCK + 20)
    parted = first[:-5] + [(token + 1) % 2048 for token in first[-5:]] + tokens(9, seed=2)
    (cold,) = serve(Executor(model), parted)
    with_connector(model, first)
    (warm,) = with_connector(model, parted)
    assert warm.honoured_tokens == 3 * BLOCK
    assert warm.output_tokens == cold.output_tokens


class Spoiling(Worker):
    """Negates what was loaded of the block that an offer ends in."""

    def bind_connector_meta(self, metadata):
        super().bind_connector_meta(metadata)
        self._seen = metadata

    def register_kv_cache_layout(self, layout):
        super().register_kv_cache_layout(layout)
        self._groups = {group.layer_group_id: group for group in reading.layout_of(layout).groups}

    def wait_for_layer_load(self, layer_idx, stream):
        super().wait_for_layer_load(layer_idx, stream)
        for copy in self._seen.loads if layer_idx == 0 else ():
            for region in self._groups[copy.layer_group].regions:
                rows = region.slots()
                rows[copy.pages[-1]] = rows[copy.pages[-1]].view(torch.float32).neg().view(torch.uint8)


def test_a_changed_tail_moves_the_logits(model, partial):
    """The negative control of the equalities above."""
    partial(partial_blocks="true", arena_bytes=64 << 20, layerwise="off")
    first = tokens(3 * BLOCK + 20)
    longer = first + tokens(60, seed=2)
    (cold,) = serve(Executor(model), longer)
    with_connector(model, first)
    (warm,) = with_connector(model, longer, worker=Spoiling)
    assert warm.honoured_tokens == len(first)
    assert (warm.first_logits - cold.first_logits).abs().max() >= 20 * TOLERANCE


def test_a_device_hit_inside_a_block_is_continued_from_the_store(model, partial):
    whole, shared = tokens(6 * BLOCK), 2 * BLOCK + 11
    other = whole[:shared] + tokens(70, seed=3)
    (cold,) = serve(Executor(model), whole)
    with_connector(model, whole)
    _, warm = with_connector(model, other, whole, partial_reuse=True)
    assert warm.device_tokens == shared
    assert warm.device_tokens + warm.honoured_tokens == len(whole) - 1
    assert warm.output_tokens == cold.output_tokens
    assert (warm.first_logits - cold.first_logits).abs().max() <= TOLERANCE


def test_the_page_that_two_requests_share_in_part_is_not_written_for_the_other(model, partial):
    whole, shared = tokens(6 * BLOCK), 2 * BLOCK + 11
    other = whole[:shared] + tokens(70, seed=3)
    (cold,) = serve(Executor(model), other)
    with_connector(model, whole)
    executor = Executor(model, Scheduler, Worker, partial_reuse=True)
    first = executor.submit(other, 40)
    for _ in range(5):
        executor.step()
    executor.submit(whole, NEW)  # loads over its copy of the page, while the first one runs on
    executor.run()
    executor.shutdown()
    assert first.output_tokens[:NEW] == cold.output_tokens
    (alone,) = [serve_long(Executor(model), other, 40)]
    assert first.output_tokens == alone.output_tokens


def serve_long(executor, prompt_tokens, count):
    request = executor.submit(prompt_tokens, count)
    executor.run()
    return request


def test_an_offer_honoured_in_part_inside_a_block_is_right(model, partial):
    prompt_tokens = tokens(8 * BLOCK + 5)
    (cold,) = serve(Executor(model), prompt_tokens)
    with_connector(model, prompt_tokens)
    (warm,) = with_connector(model, prompt_tokens, chunk_tokens=2 * BLOCK, grow_limit=0)
    assert 0 < warm.honoured_tokens < len(prompt_tokens) - 1
    assert warm.output_tokens == cold.output_tokens


def test_a_tail_is_stored_once_with_its_count_in_the_pass_of_its_last_chunk(engines, partial, records, tmp_path):
    engine = engines(GROUPS)
    given = prompt(3, extra=2)
    running = engine.admit(1, given)
    engine.run_pass((running, 2 * B))
    engine.run_pass((running, B + 2))
    saves = [(r.layer_group, len(r.pages), r.tokens) for r in records.of(Transfer) if r.direction is Direction.SAVE]
    assert saves == [(0, 2, 2 * B), (1, 2, 2 * B), (0, 2, B + 2), (1, 2, B + 2)]
    running.tokens.append(7)
    engine.run_pass((running, 1))
    assert engine.scheduler.flush(20)
    assert len([r for r in records.of(Transfer) if r.direction is Direction.SAVE]) == 4
    stored = [block for path in (tmp_path / "kv").rglob("*.seg") for block in parse_segment(path.read_bytes())[1]]
    assert sorted({(block.ordinal, block.tokens) for block in stored}) == [(0, B), (1, B), (2, B), (3, 2)]
    again = engine.admit(2, given)
    assert again.offered == len(given) - 1
    loads = engine.run_pass((again, 1), forward=False).loads
    assert [copy.tokens for copy in loads] == [3 * B + 2, 3 * B + 2]


def test_a_device_hit_beyond_the_stored_tail_is_not_stored(engines, partial, records):
    engine = engines(GROUPS)
    engine.prefill(1, prompt(1, extra=1))
    assert engine.scheduler.flush(20)
    longer = [*prompt(1, extra=1), 1, 2, 3, 4]
    assert engine.admit(2, longer, computed=B + 1).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.NOT_STORED


def test_a_tail_whose_save_was_dropped_costs_nothing_else(engines, partial, records):
    partial(partial_blocks="true", write_queue_bytes=8 * 4096)
    engine = engines(GROUPS)
    engine.prefill(1, prompt(3, extra=2))
    assert engine.scheduler.flush(20)
    drops = [(drop.reason, drop.blocks, drop.layer_group) for drop in records.of(Drop)]
    assert drops == [(DropReason.QUEUE_FULL, 1, 0), (DropReason.QUEUE_FULL, 1, 1)]
    assert engine.admit(2, prompt(3, extra=2)).offered == 3 * B


def test_it_does_nothing_under_a_single_tensor_and_says_so(engines, partial, records, caplog):
    engine = engines()
    given = prompt(2, extra=2)
    engine.prefill(1, given)
    assert engine.scheduler.flush(20)
    assert engine.admit(2, given).offered == 2 * B
    assert engine.admit(3, given, computed=B + 1).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.UNALIGNED
    assert any("PARTIAL_BLOCKS does nothing" in record.message for record in caplog.records)


ENVIRONMENT = {
    "TRACEKV_FSSPEC__URL": "file://{folder}/kv",
    "TRACEKV_FSSPEC__MODEL_ID": "kit",
    "TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000",
    "TRACEKV_FSSPEC__PARTIAL_BLOCKS": "true",
}


@pytest.fixture(scope="module")
def kit():
    with Kit(Scheduler, Worker, environment=ENVIRONMENT) as kit:
        yield kit


@pytest.mark.parametrize("story", ["warm", "chunked", "device-reuse", "whole-blocks", "cancel-prefill"])
@pytest.mark.parametrize("cache", ["v2", "v2-groups2"])
def test_a_cell_with_partial_blocks_is_clean(kit, cache, story):
    (cell,) = matrix(16, f"{cache}/{story}")
    result = kit.run(cell)
    assert (result.verdict, result.faults) == (Verdict.OK, [])


@pytest.mark.parametrize("says_so", [True, False])
def test_the_rules_about_alignment_follow_what_the_lookup_reports(partial, monkeypatch, tmp_path, says_so):
    """Without the word that parts of blocks are meant so, the same offers are suspect."""
    told = tracekv.lookup
    monkeypatch.setattr(
        offers.tracekv, "lookup", lambda *a, **more: told(*a, **{**more, "has_partial_blocks": says_so})
    )
    monkeypatch.setenv("TRACEKV_BUDGET_PCT", "100")
    capture.shutdown()
    whole, shared = tokens(6 * BLOCK), 2 * BLOCK + 11
    pair = tracekv.trace(Scheduler), tracekv.trace(Worker)
    model = MODELS.get("llama") or build_model("llama")
    serve(Executor(model, *pair), whole)
    serve(Executor(model, *pair, partial_reuse=True), whole[:shared] + tokens(70, seed=3), whole)
    found, _, lost = current.journal.read(0)
    assert not lost
    findings = {finding.rule for finding in judge([("engine", record) for record in found])}
    capture.shutdown()
    assert findings == (set() if says_so else {"S3b"})

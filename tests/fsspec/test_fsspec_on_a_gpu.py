"""A whole engine with its caches on a GPU: what the store gives back is what device reuse gives. Needs a GPU."""

from __future__ import annotations

import random

import pytest
import torch

import tracekv
from tracekv.harness import Executor, build_model
from tracekv_fsspec import Scheduler, Worker

pytestmark = pytest.mark.cuda

PROMPT = random.Random(5).choices(range(2048), k=1100)


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    torch.backends.cuda.matmul.allow_tf32 = False
    return build_model(request.param).to("cuda")


@pytest.fixture(params=["off", "on"])
def layerwise(request, monkeypatch, tmp_path):
    tracekv.capture.shutdown()
    (tmp_path / "journals").mkdir()
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_AGENT", "off")
    monkeypatch.setenv("TRACEKV_FSSPEC__URL", (tmp_path / "store").as_uri())
    monkeypatch.setenv("TRACEKV_FSSPEC__MODEL_ID", "gpu")
    monkeypatch.setenv("TRACEKV_FSSPEC__OFFER_WAIT_MS", "10000")
    monkeypatch.setenv("TRACEKV_FSSPEC__LAYERWISE", request.param)
    yield request.param
    tracekv.capture.shutdown()


def serve(model, worker=Worker):
    executor = Executor(model, *map(tracekv.trace, (Scheduler, worker)), mode="v2", num_blocks=256)
    request = executor.submit(PROMPT, 16)
    executor.run()
    executor.shutdown()
    assert request.error is None
    return request


class LeavesAPageOut(Worker):
    """A load of each pass lacks its last page."""

    def bind_connector_meta(self, metadata):
        for load in metadata.loads[:1]:
            for numbers in (load.pages, load.slots, load.generations):
                numbers.pop()
        super().bind_connector_meta(metadata)


def test_a_restored_prompt_is_bit_equal_to_device_reuse(model, layerwise):
    bare = Executor(model, mode="v2", num_blocks=256)
    cold = bare.submit(PROMPT, 16)
    bare.run()
    reused = bare.submit(PROMPT, 16)
    bare.run()
    first, restored = serve(model), serve(model)
    assert (first.honoured_tokens, restored.honoured_tokens) == (0, 1088)
    assert cold.output_tokens == first.output_tokens == restored.output_tokens
    assert torch.equal(restored.first_logits, reused.first_logits)


def test_a_page_that_was_not_loaded_moves_the_logits(model, layerwise):
    first, spoilt = serve(model), serve(model, LeavesAPageOut)
    assert spoilt.honoured_tokens == 1088
    assert (first.first_logits - spoilt.first_logits).abs().max() > 0.1

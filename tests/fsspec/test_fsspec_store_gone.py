"""The store goes before, during or after a query: what is offered is served, what isn't is computed, tokens are equal."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from tracekv.harness import Executor
from tracekv.testing.playing import model_of
from tracekv_fsspec import Scheduler, Worker
from tracekv_fsspec.arena_tables import Parked

BLOCK, NEW, LENGTH = 16, 4, 7 * 16 + 5
WHOLE = LENGTH // BLOCK * BLOCK
PROMPT = random.Random(1).choices(range(512), k=LENGTH)


class Asked(Scheduler):
    """Tells when a query begins and when it is answered."""

    def __init__(self, llm_args=None):
        super().__init__(llm_args)
        self.begins, self.answered = threading.Event(), lambda: None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.begins.set()
        try:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            self.answered()


class GiveAway(Worker):
    """The negative control: the pages of a load are left as they are."""

    def start_load_kv(self, stream):
        plan = self.get_connector_meta()
        for copy in plan.loads:
            copy.pages[:] = [copy.pages[0]] * len(copy.pages)
        super().start_load_kv(stream)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))


def executor(*pair):
    return Executor(model_of("llama"), *pair, tokens_per_block=BLOCK, num_blocks=64)


def served(running):
    request = running.submit(PROMPT, NEW)
    running.run()
    running.shutdown()
    assert request.error is None
    return request


def is_equal(one, other):
    return one.output_tokens == other.output_tokens and (one.first_logits - other.first_logits).abs().max() < 1e-3


@pytest.fixture
def stored(faulty, configure):
    configure(url="faulty://kv", read_deadline_ms=300)
    served(executor(Scheduler, Worker))


def gone(operation, path):
    raise ConnectionResetError(104, "reset")


@pytest.mark.parametrize(("when", "honoured"), [("before", 0), ("during", 0), ("after", WHOLE)])
def test_tokens_are_equal_whenever_the_store_goes(stored, faulty, when, honoured):
    running = executor(Asked, Worker)
    scheduler = running.scheduler

    def goes():
        faulty.before = staticmethod(gone)

    def while_asked(operation, path):
        assert scheduler.begins.wait(30)
        gone(operation, path)

    if when == "before":
        goes()
    elif when == "during":
        faulty.before = staticmethod(while_asked)
    else:
        scheduler.answered = goes
    request = served(running)
    assert request.honoured_tokens == honoured
    assert is_equal(request, served(executor()))


def test_a_load_into_other_pages_would_be_seen(stored):
    """The negative control."""
    assert not is_equal(served(executor(Scheduler, GiveAway)), served(executor()))


def test_what_a_parked_request_has_in_the_arena_is_served_without_the_store(stored, faulty, configure):
    configure(url="faulty://kv", offer="async", offer_wait_ms=0)
    running = executor(Scheduler, Worker)
    table = running.scheduler._engine.stager.parked
    request = running.submit(PROMPT, NEW)
    running.step()
    (number,) = [number for number in range(1, 10) if table.state(number) is not Parked.FORGOTTEN]
    while table.state(number) is Parked.PENDING:
        threading.Event().wait(0.002)
    assert table.state(number) is Parked.STAGED
    faulty.before = staticmethod(gone)
    running.run()
    running.shutdown()
    assert request.honoured_tokens == WHOLE
    assert is_equal(request, served(executor()))

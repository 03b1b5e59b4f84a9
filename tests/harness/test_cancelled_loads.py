"""``cancel_load`` and ``request_reset``, which some branches of the runtime call (contract.md section 1.2)."""

from __future__ import annotations

from typing import ClassVar

import pytest

import tracekv
from tests.harness.test_device_reuse import tokens
from tracekv.harness import Executor
from tracekv.harness.versions import RuntimeVersion
from tracekv.journal.records import CancelLoadCall, RequestResetCall
from tracekv.testing import recorded
from tracekv.testing.corpus.correct import Follower, Leader

BRANCH = RuntimeVersion(tells_of_cancelled_loads=True)


def pair(offer):
    """A connector that offers so much, and notes what it is told."""

    class Noting(Leader):
        told: ClassVar = []

        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            super().get_num_new_matched_tokens(request, num_computed_tokens)
            return offer, False

        def cancel_load(self, request, start, end):
            self.told.append(("cancel_load", request.request_id, start, end))

        def request_reset(self, request):
            self.told.append(("request_reset", request.request_id))

    class Moving(Follower):
        def load(self, moves):
            """What was offered is nowhere; this is about what is told."""

    return Noting, Moving


@pytest.mark.parametrize(
    ("offer", "version", "told"),
    [
        (64, BRANCH, [("cancel_load", 1, 32, 64)]),
        (32, BRANCH, []),
        (64, RuntimeVersion(), []),
    ],
)
def test_what_is_not_honoured_is_told_where_the_version_does(model, offer, version, told):
    """96 tokens in chunks of 64, no page to grow by: 32 of 64 are honoured (contract-v2.md section 1.3)."""
    scheduler, worker = pair(offer)
    engine = Executor(model("llama"), scheduler, worker, chunk_tokens=64, grow_limit=0, version=version)
    engine.submit(tokens(96), 1)
    engine.run()
    assert scheduler.told == told


@pytest.mark.parametrize("version", [BRANCH, RuntimeVersion()])
def test_a_request_that_begins_anew_is_told_before_it_is_asked_about_again(model, version):
    scheduler, worker = pair(0)
    engine = Executor(model("llama"), scheduler, worker, version=version)
    request = engine.submit(tokens(96), 6)
    for _ in range(3):
        engine.step()
    engine.destroy(request, forget=True)
    assert scheduler.told == ([("request_reset", 1)] if version is BRANCH else [])
    engine.run()
    assert engine.calls["scheduler.get_num_new_matched_tokens"] == 2


def test_both_are_recorded(model):
    scheduler, worker = pair(64)
    with recorded() as run:
        engine = Executor(
            model("llama"),
            tracekv.trace(scheduler),
            tracekv.trace(worker),
            chunk_tokens=64,
            grow_limit=0,
            version=BRANCH,
        )
        request = engine.submit(tokens(96), 6)
        for _ in range(4):
            engine.step()
        engine.destroy(request, forget=True)
        engine.run()
    assert [(each.request_id, each.start, each.end) for each in run.of(CancelLoadCall)][:1] == [(1, 32, 64)]
    assert [each.request_id for each in run.of(RequestResetCall)] == [1]

"""Whatever happens to requests in whatever order, those that end by themselves have the tokens of a run alone."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.memory_connector import memory_pair
from tests.harness.test_device_reuse import tokens
from tests.harness.test_overlap import alone
from tracekv.harness import Executor, build_model
from tracekv.harness.requests import RequestState

LENGTHS = (20, 64, 100)


@functools.cache
def _model(preset):
    return build_model(preset, num_hidden_layers=2, **({"sliding_window": 48} if preset == "gemma3" else {}))


@functools.cache
def expected(preset, length, new):
    return alone(_model(preset), tokens(length), new)


MOVES = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(LENGTHS), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["cancel", "destroy", "forget", "suspend", "resume"]), st.integers(0, 5)),
)

OPTIONS = st.fixed_dictionaries(
    {
        "overlap": st.booleans(),
        "chunk_tokens": st.sampled_from([None, 32]),
        "policy": st.sampled_from([None, "MAX_UTILIZATION"]),
        "grow_limit": st.sampled_from([None, 0]),
        "graph_replay": st.booleans(),
        "partial_reuse": st.booleans(),
        "num_blocks": st.sampled_from([6, 40]),
    }
)


def do(executor, move, requests):
    verb, *args = move
    if verb == "submit":
        length, new = args
        requests.append(executor.submit(tokens(length), new))
        return
    if verb == "step":
        for _ in range(args[0]):
            if executor.has_work:
                executor.step()
        return
    live = [request for request in requests if not request.is_finished]
    if not live:
        return
    request = live[args[0] % len(live)]
    if verb in ("destroy", "forget"):
        parked = RequestState.DISAGG_GENERATION_TRANS_IN_PROGRESS
        if executor.cache.holds(request) and request.state is not parked:
            executor.destroy(request, forget=verb == "forget")
    else:
        getattr(executor, verb)(request)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("preset", ["llama", "gemma3"])
def test_no_schedule_changes_a_token_or_loses_a_page(preset, is_async):
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(options=OPTIONS, moves=st.lists(MOVES, max_size=14), polls=st.integers(0, 3))
    def run(options, moves, polls):
        pair = memory_pair({}, is_async=is_async, polls=polls)
        executor = Executor(_model(preset), *pair, **options)
        requests = []
        for move in moves:
            # A load that outlives its cancelled request writes to pages that may be another's by then: the connector's to avoid.
            if not (is_async and move[0] == "cancel"):
                do(executor, move, requests)
        for request in requests:
            executor.resume(request)
        executor.run(max_idle_passes=50)
        for request in requests:
            assert request.error is None
            assert request.is_finished
            if not request.is_cancelled:
                assert request.output_tokens == expected(preset, request.orig_prompt_len, request.max_new_tokens)
        for pool in executor.cache.pools:
            assert all(pool.holders(slot) == 0 for slot in range(pool.num_slots))
            assert pool.available == pool.num_slots

    run()

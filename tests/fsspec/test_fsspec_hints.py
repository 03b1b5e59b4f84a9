"""An enqueued request is hashed and staged before its query; engines that only load, and engines that only save."""

from __future__ import annotations

import pytest

from tests.fsspec.engine import B, Engine, prompt
from tracekv.contract import enqueue, on_enqueue
from tracekv.journal.records import Drop, Lookup
from tracekv.journal.vocabulary import MissReason
from tracekv_fsspec.requests import OtherPrompt

WAIT_S = 30


@pytest.fixture
def engines(configure, monkeypatch, tmp_path):
    """Make engines; none waits for the store in its query, all listen to enqueues."""
    monkeypatch.setenv("TRACEKV_ENQUEUE_HOOK", "1")
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    made = []

    def make(**settings):
        configure(**{"offer_wait_ms": 0, **settings})
        made.append(Engine())
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def stored(engines, tokens):
    """An engine that ended after it had stored a prompt."""
    engine = engines()
    engine.finish(engine.prefill(1, tokens))
    assert engine.scheduler.flush(WAIT_S)
    engine.stop()


def enqueued(engine, request_id, tokens, **told):
    """Tell an enqueue, and wait until it was worked on."""
    on_enqueue(request_id, None, tokens, None, **told)
    prefetcher = engine.scheduler._engine.stager.prefetcher
    hint = prefetcher._of_request[request_id]
    prefetcher.wait(hint, WAIT_S, hint.begun + WAIT_S)


def test_an_enqueued_prompt_is_offered_without_waiting(engines, records):
    tokens = prompt(6)
    stored(engines, tokens)
    engine = engines()
    enqueued(engine, 7, tokens)
    running = engine.prefill(7, tokens)
    assert running.offered == 6 * B
    assert engine.holds_its_kv(running)
    assert engine.scheduler._requests.get(7).is_hinted
    assert records.of(Lookup)[-1].waited_ns == 0


def test_without_a_hint_the_first_touch_is_a_miss_not_staged(engines, records):
    tokens = prompt(6)
    stored(engines, tokens)
    assert engines().admit(7, tokens).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.NOT_STAGED


@pytest.mark.parametrize("change", [lambda tokens: tokens[:-1], lambda tokens: [tokens[0] + 1, *tokens[1:]]])
def test_another_prompt_than_the_enqueued_one_is_hashed_by_its_query(engines, change):
    tokens = prompt(6)
    stored(engines, tokens)
    engine = engines()
    enqueued(engine, 7, change(tokens))
    running = engine.prefill(7, tokens)
    assert not engine.scheduler._requests.get(7).is_hinted
    assert engine.holds_its_kv(running)


def test_a_prompt_that_differs_where_the_query_doesnt_look_stops_the_engine_before_a_page_is_loaded(engines):
    tokens = prompt(16)
    stored(engines, tokens)
    engine = engines()
    enqueued(engine, 7, tokens)
    other = [*tokens]
    other[5] += 1
    running = engine.admit(7, other)
    assert running.offered
    with pytest.raises(OtherPrompt, match="TRACEKV_ENQUEUE_HOOK") as stopped:
        engine.run_pass((running, 1))
    assert str(other[5]) not in str(stopped.value)


def test_a_request_with_an_adapter_or_images_of_the_front_process_is_not_hinted(engines):
    engine = engines()

    class Front:
        lora_request = object()

    on_enqueue(7, None, prompt(6), None, request=Front())
    assert 7 not in engine.scheduler._engine.stager.prefetcher._of_request


def test_after_shutdown_nobody_listens(engines):
    engine = engines()
    assert enqueue._token_subscribers
    engine.stop()
    assert enqueue._token_subscribers == []


def test_an_ended_request_leaves_nothing_behind(engines):
    tokens = prompt(6)
    stored(engines, tokens)
    engine = engines()
    enqueued(engine, 7, tokens)
    engine.finish(engine.prefill(7, tokens))
    prefetcher = engine.scheduler._engine.stager.prefetcher
    assert 7 not in prefetcher._of_request
    assert 7 not in prefetcher._asked


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing(engines, records, tmp_path):
    tokens = prompt(6)
    producer = engines(role="producer", offer_wait_ms=20_000)
    producer.finish(producer.prefill(1, tokens))
    assert producer.scheduler.flush(WAIT_S)
    assert producer.admit(2, tokens).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.ROLE
    segments = list((tmp_path / "kv").rglob("*.seg"))
    consumer = engines(role="consumer", offer_wait_ms=20_000)
    loaded = consumer.prefill(1, [*tokens, *prompt(3, seed=5)])
    assert loaded.offered == 6 * B
    assert consumer.holds_its_kv(loaded)
    consumer.finish(loaded)
    assert consumer.scheduler.flush(WAIT_S)
    assert list((tmp_path / "kv").rglob("*.seg")) == segments
    assert records.of(Drop) == []

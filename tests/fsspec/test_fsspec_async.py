"""OFFER=async in the reference executor: parked while staged, right whatever happens meanwhile, stopped where it can't be."""

from __future__ import annotations

import random
import threading
from time import monotonic

import pytest

from tests.fsspec.engine import B, prompt
from tracekv.harness import Executor, build_model
from tracekv.harness.versions import RuntimeVersion
from tracekv.journal.records import Lookup
from tracekv.settings import SettingsError
from tracekv_fsspec import Scheduler, Worker
from tracekv_fsspec.parked import ParkedLoadFailed
from tracekv_fsspec.planning import OfferLost
from tracekv_fsspec.requests import Offer, Request, Requests

BLOCK, NEW = 32, 6
MODELS = {}


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    return model_of(request.param)


def model_of(name):
    if name not in MODELS:
        MODELS[name] = build_model(name)
    return MODELS[name]


def tokens(count, seed=1):
    return random.Random(seed).choices(range(2048), k=count)


PROMPT = tokens(6 * BLOCK + 9)


class Store:
    """The faulty file system, its reads of segments held up or failing."""

    def __init__(self, faulty):
        self.faulty = faulty
        self.may_read = threading.Event()
        self.may_read.set()
        self.error = None
        faulty.before = staticmethod(self.before)

    def before(self, operation, path):
        if operation == "read" and path.endswith(".seg"):
            assert self.may_read.wait(30)
            if self.error is not None:
                raise self.error


@pytest.fixture
def store(faulty, configure):
    configure(url="faulty://kv", arena_bytes=64 << 20, offer="async", offer_wait_ms=0, read_deadline_ms=20_000)
    return Store(faulty)


class Noted(Scheduler):
    """Notes its answers and plans."""

    def __init__(self, llm_args=None):
        super().__init__(llm_args)
        self.answers, self.plans = [], []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.answers.append(super().get_num_new_matched_tokens(request, num_computed_tokens))
        return self.answers[-1]

    def build_connector_meta(self, scheduler_output):
        self.plans.append(super().build_connector_meta(scheduler_output))
        return self.plans[-1]


@pytest.fixture
def executors():
    made = []

    def make(model, **options):
        made.append(Executor(model, Noted, Worker, **options))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def alone(model, prompt_tokens, new=NEW):
    executor = Executor(model)
    request = executor.submit(prompt_tokens, new)
    executor.run()
    return request


def saved(executors, model, prompt_tokens=PROMPT):
    executor = executors(model)
    executor.submit(prompt_tokens, NEW)
    executor.run()
    executor.shutdown()


def wait_until(is_so):
    deadline = monotonic() + 30
    while not is_so():
        assert monotonic() < deadline
        threading.Event().wait(0.002)


def nothing_is_pinned(executor):
    stager = executor.scheduler._engine.stager
    assert stager.copies.wait(20)
    assert stager.writer.flush(20)
    return all(stager.arena.free_slots(shard) == stager.arena.slots_per_shard for shard in stager.arena.shards)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [None, 64])
def test_a_parked_request_is_served_when_its_blocks_are_there(store, executors, model, overlap, chunk):
    saved(executors, model)
    executor = executors(model, overlap=overlap, chunk_tokens=chunk)
    store.may_read.clear()
    request = executor.submit(PROMPT, NEW)
    for _ in range(5):
        executor.step()
    assert executor.scheduler.answers == [(6 * BLOCK, True)]
    assert executor.scheduler.plans[0].parked
    builds, polls = executor.calls["scheduler.build_connector_meta"], executor.calls["worker.get_finished"]
    for _ in range(10):
        executor.step()  # idle: the only hook that still runs is get_finished
    assert executor.calls["scheduler.build_connector_meta"] == builds
    assert executor.calls["worker.get_finished"] == polls + 10
    assert request.output_tokens == []
    store.may_read.set()
    executor.run()
    assert request.error is None
    assert request.honoured_tokens == 6 * BLOCK
    assert request.output_tokens == alone(model, PROMPT).output_tokens
    assert len(executor.scheduler.answers) == 1
    assert sum(len(plan.parked) for plan in executor.scheduler.plans) == 1
    wait_until(lambda: nothing_is_pinned(executor))


def test_what_follows_a_parked_load_is_saved_when_it_is_computed_and_no_earlier(store, executors, model):
    """Its record counts the load as computed already; to count it twice would save pages that hold nothing yet."""
    saved(executors, model)
    longer = PROMPT + tokens(5 * BLOCK, seed=2)
    second = executors(model, chunk_tokens=64)
    second.submit(longer, NEW)
    second.run()
    second.shutdown()
    third = executors(model)
    request = third.submit(longer, NEW)
    third.run()
    assert request.honoured_tokens == len(longer) // BLOCK * BLOCK
    assert request.output_tokens == alone(model, longer).output_tokens


def test_what_is_staged_already_is_offered_without_parking(store, executors):
    model = model_of("llama")
    saved(executors, model)
    executor = executors(model, num_blocks=24)
    for number in range(2):
        request = executor.submit(PROMPT, NEW)
        executor.run()
        assert request.output_tokens == alone(model, PROMPT).output_tokens
        for seed in range(3):  # the device forgets it meanwhile
            executor.submit(tokens(600, seed=10 + 3 * number + seed), 2)
            executor.run()
    hits = [answer for answer in executor.scheduler.answers if answer[0]]
    assert hits == [(6 * BLOCK, True), (6 * BLOCK, False)]


@pytest.mark.parametrize(("chunk", "honoured"), [(64, 32), (32, 0)])
def test_less_than_promised_may_be_honoured_or_nothing(store, executors, model, chunk, honoured):
    saved(executors, model)
    executor = executors(model, chunk_tokens=chunk, grow_limit=0)
    request = executor.submit(PROMPT, NEW)
    executor.run()
    assert request.honoured_tokens == honoured
    assert request.output_tokens == alone(model, PROMPT).output_tokens
    wait_until(lambda: nothing_is_pinned(executor))


POISON = float("nan")


@pytest.mark.parametrize(("preset", "overlap"), [("llama", False), ("gemma3", True)])
@pytest.mark.parametrize("phase", ["pending", "staged", "named", "loading", "loaded"])
def test_a_request_cancelled_in_any_phase_changes_nobody_elses_page(
    store, executors, monkeypatch, preset, phase, overlap
):
    model = model_of(preset)
    monkeypatch.setattr("tracekv_fsspec.parking.PINS_S", 0.2)
    saved(executors, model)
    executor = executors(model, overlap=overlap, chunk_tokens=64)
    other_prompt = tokens(3 * BLOCK + 3, seed=7)
    other = executor.submit(other_prompt, 40)
    for _ in range(3):
        executor.step()
    store.may_read.clear()
    parked = executor.submit(PROMPT, NEW)
    executor.step()
    executor.step()
    assert executor.scheduler.answers[-1] == (6 * BLOCK, True)
    (ticket,) = [number for plan in executor.scheduler.plans for _, number in plan.parked]
    if phase != "pending":
        store.may_read.set()
        table = executor.scheduler._engine.stager.parked
        wait_until(lambda: table.state(ticket).name == "STAGED")
    if phase in ("named", "loading", "loaded"):
        for _ in range({"named": 1, "loading": 2, "loaded": 3}[phase]):
            executor.step()
    executor.cancel(parked)
    executor.step()
    executor.step()
    store.may_read.set()
    after = len(executor.scheduler.plans)
    poisoned = 0
    while executor.has_work:
        for pool in executor.cache.pools:
            slots = executor.cache.unheld(pool.shape.layer_group_id)
            pool.tensor[slots] = POISON
            poisoned += len(slots)
        executor.step()
        for pool in executor.cache.pools:
            still = [slot for slot in slots if slot in executor.cache.unheld(pool.shape.layer_group_id)]
            assert pool.tensor[still].isnan().all()
    assert parked.is_cancelled
    assert poisoned
    assert not [copy for plan in executor.scheduler.plans[after:] for copy in plan.loads]
    assert other.output_tokens == alone(model, other_prompt, 40).output_tokens
    wait_until(lambda: nothing_is_pinned(executor))
    fresh = executors(model)  # what is stored is right, too
    again = fresh.submit(PROMPT, NEW)
    fresh.run()
    assert again.honoured_tokens == 6 * BLOCK
    assert again.output_tokens == alone(model, PROMPT).output_tokens


def test_poison_of_a_held_page_is_noticed(store, executors):
    """The negative control of the poison."""
    model = model_of("llama")
    other_prompt = tokens(3 * BLOCK + 3, seed=7)
    executor = executors(model)
    other = executor.submit(other_prompt, 20)
    executor.step()
    executor.cache.pools[0].tensor[executor.cache.slots(other)[0][1]] = POISON
    executor.run()
    assert other.output_tokens != alone(model, other_prompt, 20).output_tokens


@pytest.mark.parametrize("gone", ["before", "after"])
def test_a_store_that_dies_while_a_request_is_parked_stops_the_engine(store, executors, configure, model, gone):
    saved(executors, model)
    configure(url="faulty://kv", arena_bytes=64 << 20, offer="async", offer_wait_ms=0, read_deadline_ms=50)
    executor = executors(model)
    if gone == "after":
        store.may_read.clear()
    store.error = ConnectionResetError(104, "reset")
    request = executor.submit(PROMPT, NEW)
    executor.step()
    assert executor.scheduler.answers == [(6 * BLOCK, True)]
    store.may_read.set()
    with pytest.raises(ParkedLoadFailed, match="TRACEKV_FSSPEC__OFFER=staged"):
        executor.run()
    assert request.output_tokens == []


def test_a_store_that_comes_back_in_time_serves_the_parked_request(store, executors, model):
    saved(executors, model)
    executor = executors(model)
    store.error = ConnectionResetError(104, "reset")
    request = executor.submit(PROMPT, NEW)
    for _ in range(5):
        executor.step()
    store.error = None
    executor.run()
    assert request.output_tokens == alone(model, PROMPT).output_tokens
    assert request.honoured_tokens == 6 * BLOCK


def test_staged_computes_where_async_would_stop(store, executors, configure, model):
    saved(executors, model)
    configure(url="faulty://kv", arena_bytes=64 << 20, offer="staged", offer_wait_ms=100, read_deadline_ms=50)
    store.error = ConnectionResetError(104, "reset")
    executor = executors(model)
    request = executor.submit(PROMPT, NEW)
    executor.run()
    assert request.honoured_tokens == 0
    assert request.output_tokens == alone(model, PROMPT).output_tokens


@pytest.mark.parametrize("passes", [1, 2])
def test_a_request_that_is_destroyed_behind_its_parked_load_is_replayed_rightly(store, executors, model, passes):
    saved(executors, model)
    executor = executors(model, chunk_tokens=64)
    request = executor.submit(PROMPT, NEW)
    while not request.passes:
        executor.step()
    for _ in range(passes - 1):
        executor.step()
    executor.destroy(request, forget=True)
    executor.run()
    assert request.replays == 1
    assert request.output_tokens == alone(model, PROMPT).output_tokens


def test_a_version_that_rewinds_the_cursor_wastes_the_load_and_stays_right(store, executors):
    model = model_of("llama")
    saved(executors, model)
    executor = executors(model, version=RuntimeVersion(served_position_survives=False))
    request = executor.submit(PROMPT, NEW)
    executor.run()
    assert request.passes[0][0] == 0
    assert request.output_tokens == alone(model, PROMPT).output_tokens


SMALL = prompt(6)


@pytest.fixture
def parked(store, engines):
    """An engine with one parked request, its blocks staged."""
    first = engines()
    first.prefill(1, SMALL)
    assert first.scheduler.flush(20)
    first.stop()
    engine = engines()
    store.may_read.clear()
    running = engine.admit(5, SMALL, may_park=True)
    assert running.is_parked
    store.may_read.set()
    plan = engine.run_pass()
    ((_, number),) = plan.parked
    wait_until(lambda: engine.scheduler._engine.stager.parked.state(number).name == "STAGED")
    return engine, running


def test_the_query_reports_what_is_stored_and_what_was_staged_by_then(records, parked):
    lookup = records.of(Lookup)[-1]
    assert (lookup.stored_tokens, lookup.offered_tokens, lookup.reason) == (6 * B, 6 * B, None)
    assert lookup.staged_tokens < 6 * B


def test_no_page_is_touched_before_the_request_is_reported_again(parked):
    engine, running = parked
    assert not any(plan.loads for plan in engine.plans)
    assert not engine.holds_its_kv(running, 0, 6)
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 6)


def test_a_request_that_is_first_reported_among_the_cached_ones_is_loaded_too(parked):
    """contract-v2.md section 11, 10."""
    engine, running = parked
    engine.run_pass((running, 1), forward=False, as_cached=True)
    assert engine.holds_its_kv(running, 0, 6)


def test_pins_that_ran_out_are_taken_anew(parked, monkeypatch):
    engine, running = parked
    stager = engine.scheduler._engine.stager
    ((number, _),) = [(number, run) for number, run in stager.parking._runs.items()]
    stager.parking.forget(number)
    engine.run_pass((running, 1), forward=False)
    assert engine.holds_its_kv(running, 0, 6)


def test_blocks_that_are_gone_when_their_request_comes_back_stop_the_engine(parked, store, configure, monkeypatch):
    engine, running = parked
    monkeypatch.setattr("tracekv_fsspec.planning._RECOVER_S", 0.2)
    stager = engine.scheduler._engine.stager
    (number,) = stager.parking._runs
    stager.parking.forget(number)
    monkeypatch.setattr(stager.arena, "pin_whole", lambda shard, keys: None)
    monkeypatch.setattr(stager.arena, "pin_run", lambda shard, keys: [None] * len(keys))
    store.error = FileNotFoundError(2, "gone")
    with pytest.raises(OfferLost, match="going on would serve wrong KV"):
        engine.run_pass((running, 1))


def test_nothing_honoured_needs_nothing(parked, store):
    engine, running = parked
    running.honoured, running.position = 0, 0
    running.request.py_num_connector_matched_tokens = 0
    engine.scheduler.update_state_after_alloc(running.request, list(running.pages[0]))
    stager = engine.scheduler._engine.stager
    (number,) = stager.parking._runs
    stager.parking.forget(number)
    store.error = FileNotFoundError(2, "gone")
    assert not engine.run_pass((running, len(SMALL))).loads


def test_a_record_without_pages_for_what_was_honoured_stops_the_engine(parked):
    engine, running = parked
    running.reported_blocks = len(running.pages[0])
    with pytest.raises(OfferLost, match="no pages to load all of them to"):
        engine.run_pass((running, 1))


def test_a_parked_request_whose_books_went_for_want_of_room_stops_the_engine(parked, monkeypatch):
    engine, running = parked
    monkeypatch.setattr("tracekv_fsspec.requests.MAX_REQUESTS", 3)
    for number in range(10, 14):
        engine.admit(number, prompt(1, seed=number))
    with pytest.raises(OfferLost, match="wrong KV"):
        engine.run_pass((running, 1))


def test_parked_requests_that_are_cancelled_dont_pile_up(monkeypatch):
    monkeypatch.setattr("tracekv_fsspec.requests.MAX_REQUESTS", 3)
    monkeypatch.setattr("tracekv_fsspec.requests.MAX_PROMISED", 5)
    books = Requests(lambda request: None)
    for number in range(20):
        books.add(Request(number, None, None)).owed = Offer(None, 0, 1, 0, B, B)
    assert [number for number in range(20) if books.was_promised(number)] == [12, 13, 14, 15, 16]


def test_a_request_that_was_announced_as_finished_is_forgotten_with_its_promise(parked):
    engine, running = parked
    engine.finish(running)
    stager = engine.scheduler._engine.stager
    assert all(stager.arena.free_slots(shard) == stager.arena.slots_per_shard for shard in stager.arena.shards)
    assert not engine.scheduler._requests.was_promised(5)


def test_the_risk_is_said_once_when_the_engine_starts(store, engines, caplog):
    engines()
    said = [record.getMessage() for record in caplog.records if "OFFER=async" in record.message]
    assert len(said) == 1
    assert "this engine stops rather than serve wrong KV" in said[0]


def test_leaving_out_what_windows_have_passed_is_refused(store, engines, configure):
    configure(url="faulty://kv", offer="async", window_lookup="window")
    engine = engines((None, 9), start=False)
    with pytest.raises(SettingsError, match="TRACEKV_FSSPEC__OFFER=async"):
        engine.start()

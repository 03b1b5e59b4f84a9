"""An S3 server that misbehaves in every way a proxy can make it: each ends in a miss within the deadline, or is got over."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from tests.store.node import FULL, Node, keys
from tracekv.journal.records import Drop, StoreOperation
from tracekv.journal.vocabulary import DropReason, MissReason, Operation, Outcome
from tracekv.testing import faults
from tracekv.testing.faults import FaultProxy, first, on
from tracekv_fsspec.store import AlreadyExists, Deadlines, SlowDown, StoreError, open_engine, open_store, read_whole
from tracekv_fsspec.testing import read
from tracekv_fsspec.wrappers.breaker import FAILURES

pytestmark = pytest.mark.s3

#: A deadline, and what a test on a busy machine may take beyond it.
DEADLINES, MARGIN_S = Deadlines(1.5, 8.0), 10.0
CLIENTS = pytest.mark.parametrize("client", ["obstore", "s3fs"])


@pytest.fixture
def proxy(s3, monkeypatch):
    with FaultProxy(s3.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def made(proxy, s3_url):
    nodes = []

    def make(client="obstore", **settings):
        nodes.append(Node(s3_url, deadlines=DEADLINES, s3_client=client, **settings))
        return nodes[-1]

    yield make
    proxy.fault = None
    for each in nodes:
        each.stager.close()


def segment_reads(records):
    return [r for r in records.of(StoreOperation) if r.operation is Operation.READ and r.nbytes > 10_000]


@CLIENTS
@pytest.mark.parametrize(
    ("fault", "reason", "outcomes"),
    [
        pytest.param(faults.status(503, "SlowDown"), MissReason.STORE_DOWN, {Outcome.UNAVAILABLE}, id="503 storm"),
        pytest.param(faults.status(500, "InternalError"), MissReason.STORE_DOWN, {Outcome.UNAVAILABLE}, id="500"),
        pytest.param(
            faults.cut_after(5000), MissReason.STORE_DOWN, {Outcome.UNAVAILABLE, Outcome.TIMEOUT}, id="cut body"
        ),
        pytest.param(faults.altered_at(9000), MissReason.CORRUPT, {Outcome.ALTERED}, id="altered body"),
        pytest.param(faults.altered_at(100), MissReason.CORRUPT, {Outcome.ALTERED}, id="altered header"),
        pytest.param(
            faults.slowed_to(4000), MissReason.STORE_DOWN, {Outcome.TIMEOUT, Outcome.UNAVAILABLE}, id="slow body"
        ),
        pytest.param(faults.stalled, MissReason.STORE_DOWN, {Outcome.TIMEOUT, Outcome.UNAVAILABLE}, id="no answer"),
        pytest.param(faults.status(404, "NoSuchKey"), MissReason.NOT_STORED, {Outcome.MISSING}, id="404 after lookup"),
        pytest.param(faults.status(403, "AccessDenied"), MissReason.STORE_DOWN, {Outcome.DENIED}, id="permission lost"),
        pytest.param(
            faults.status(416, "InvalidRange"), MissReason.CORRUPT, {Outcome.TRUNCATED}, id="range not satisfiable"
        ),
    ],
)
def test_a_read_that_goes_wrong_is_a_miss_within_the_deadline(made, proxy, records, client, fault, reason, outcomes):
    made(client).save(keys(8))
    reader = made(client)
    assert reader.stager.prefix(FULL, keys(8), 0) == 8
    proxy.fault = on("GET", fault, ".seg")
    began = time.monotonic()
    _, staged, why = reader.stage(keys(8))
    took = time.monotonic() - began
    assert staged < 8
    assert staged == 0 or outcomes == {Outcome.ALTERED}  # blocks before an altered one are right
    assert why is reason
    assert took < DEADLINES.read_s + MARGIN_S
    assert {record.outcome for record in segment_reads(records)} <= outcomes
    proxy.fault = None
    if reason is MissReason.STORE_DOWN:
        assert reader.stage(keys(8))[1] == 8


@pytest.mark.parametrize(
    "fault", [faults.status(503, "SlowDown"), faults.cut_after(5000), faults.status(500, "InternalError")]
)
def test_what_goes_wrong_once_is_got_over_and_counted_as_an_attempt(made, proxy, records, fault):
    made().save(keys(8))
    reader = made()
    proxy.fault = first(1, on("GET", fault, ".seg"))
    ticket, staged, _ = reader.stage(keys(8))
    assert staged == 8
    assert reader.is_right(ticket, 8)
    (operation,) = segment_reads(records)
    assert (operation.outcome, operation.attempts, operation.requests) == (Outcome.OK, 2, 2)


def test_a_put_whose_answer_was_lost_is_stored_once_and_committed(made, proxy, records):
    node = made()
    proxy.fault = first(1, on("PUT", faults.stalled, ".seg"))
    node.save(keys(4))
    assert [drop.reason for drop in records.of(Drop)] == []
    assert made().stage(keys(4))[1] == 4


def test_a_retried_create_that_had_won_is_told_as_existing(proxy, s3_url):
    store = open_store(s3_url, deadlines=DEADLINES)
    proxy.fault = first(1, on("PUT", faults.cut_after(0)))
    with contextlib.suppress(AlreadyExists):
        store.put("a", b"once", create_only=True)
    assert read_whole(store, "a", 4) == b"once"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (faults.status(503, "SlowDown"), DropReason.STORE_DOWN),
        (faults.status(403, "AccessDenied"), DropReason.STORE_REFUSED),
        (faults.status(404, "NoSuchBucket"), DropReason.STORE_REFUSED),
    ],
    ids=["503 storm", "permission lost mid-run", "bucket gone"],
)
def test_a_save_that_goes_wrong_is_dropped_and_the_next_is_stored(made, proxy, records, fault, reason):
    node = made()
    proxy.fault = on("PUT", fault)
    node.save(keys(4))
    assert {drop.reason for drop in records.of(Drop)} == {reason}
    proxy.fault = None
    node.save(keys(4, seed=1))
    assert made().stage(keys(4, seed=1))[1] == 4


def test_a_manifest_that_fails_leaves_nothing_that_could_be_found(made, proxy):
    node = made()
    proxy.fault = on("PUT", faults.status(403, "AccessDenied"), ".man")
    node.save(keys(4))
    assert [entry.path for entry in node.store.list("")] == []


def test_a_store_that_is_down_costs_no_requests_until_it_is_back(made, proxy):
    made().save(keys(2 * FAILURES))
    reader = made()
    proxy.fault = on("GET", faults.status(500, "InternalError"), ".seg")
    for key in keys(FAILURES):
        assert reader.stage([key])[2] is MissReason.STORE_DOWN
    before = len(proxy.calls)
    began = time.monotonic()
    assert reader.stage(keys(2 * FAILURES))[1:] == (0, MissReason.STORE_DOWN)
    assert len(proxy.calls) <= before + 1  # the cool-off may be over, and then one asks
    assert time.monotonic() - began < DEADLINES.read_s + MARGIN_S
    proxy.fault = None
    again = threading.Event()
    for _ in range(200):
        if reader.stage(keys(2 * FAILURES))[1] == 2 * FAILURES:
            again.set()
            break
        again.wait(0.1)
    assert again.is_set()


def test_a_range_that_comes_short_in_good_order_is_truncated(proxy, s3_url):
    store = open_engine(s3_url, deadlines=DEADLINES)
    store.put("a", bytes(10_000), create_only=True)
    proxy.fault = on("GET", faults.shortened_to(5000))
    with pytest.raises(StoreError) as caught:
        read(store, "a", (0, 10_000))
    assert caught.value.outcome in (Outcome.TRUNCATED, Outcome.UNAVAILABLE)


@CLIENTS
def test_slow_down_is_told_apart_from_other_errors(proxy, s3_url, client):
    store = open_engine(s3_url, s3_client=client, deadlines=DEADLINES)
    store.put("a", bytes(10), create_only=True)
    proxy.fault = faults.status(503, "SlowDown")
    with pytest.raises(SlowDown):
        read(store, "a", (0, 10))
    proxy.fault = faults.status(500, "InternalError")
    with pytest.raises(StoreError) as caught:
        read(store, "a", (0, 10))
    assert not isinstance(caught.value, SlowDown)
    proxy.fault = None


def test_operations_carry_their_bucket_digest_and_times(made, records, s3):
    node = made()
    node.save(keys(4))
    reader = made()
    reader.stage(keys(4))
    (operation,) = segment_reads(records)
    assert (operation.engine, operation.bucket, operation.breaker) == ("s3", s3.bucket, "closed")
    assert (len(operation.key), operation.blocks, operation.requests) == (16, 4, 1)
    assert operation.transfer_ns > 0
    assert operation.verify_ns > 0
    assert operation.queued_ns >= 0
    whole = operation.ended_ns - operation.started_ns
    assert operation.transfer_ns + operation.verify_ns <= whole

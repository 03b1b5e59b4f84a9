"""A connector traced on two ranks: two journals, one trace per request and per step."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest

from tests.ranks.test_tensor_parallel import HERE, connected, tokens
from tracekv.harness.ranks import Prompt
from tracekv.journal.opening import open_journals
from tracekv.journal.records import BindCall, Enqueued, RunJoined, SettingsSeen, Transfer
from tracekv.views import names
from tracekv.views.otlp import read_trace_file
from tracekv.views.sampling import Callers
from tracekv.views.spans import SpanView

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def run(two_ranks, tmp_path_factory):
    """A warm run of two requests whose beginnings an untraced one has stored; the second one has a caller."""
    folder = tmp_path_factory.mktemp("traced")
    cold = connected("gemma3", "v2")
    environ = {
        "TRACEKV_AGENT": "thread",
        "TRACEKV_TRACE_FILE": str(folder / "trace.jsonl"),
        "TRACEKV_JOURNAL_DIR": str(folder / "journals"),
        "TRACEKV_STEP_SAMPLE": "1",
        "TRACEKV_ENQUEUE_HOOK": "1",
    }
    warm = Prompt(tokens(500) + tokens(100, seed=6), 2, {"client_id": 9})
    called = Prompt(tokens(500, seed=8) + tokens(60, seed=7), 1, {"trace_headers": {"traceparent": PARENT}})
    two_ranks.run(dataclasses.replace(cold, rounds=[[Prompt(tokens(500)), Prompt(tokens(500, seed=8))]]))
    results = two_ranks.run(
        dataclasses.replace(cold, traced=True, environ=environ, rounds=[[warm], [called]], observe=f"{HERE}:forget")
    )
    return folder, results


@pytest.fixture(scope="module")
def journals(run):
    """The records of each rank, by rank."""
    found = {}
    for reader in open_journals(run[0] / "journals", patience_ns=0):
        records, cursor = [], 0
        while True:
            more, cursor, lost = reader.read(cursor)
            assert lost == 0
            if not more:
                break
            records += more
        reader.close()
        (joined,) = of(records, RunJoined)
        found[joined.rank] = records
    return found


@pytest.fixture(scope="module")
def traces(run):
    """Spans of the shared trace file, by trace id."""
    found = defaultdict(list)
    for span in read_trace_file(run[0] / "trace.jsonl"):
        found[span.trace_id].append(span)
    return found


def of(records, kind):
    return [record for record in records if isinstance(record, kind)]


def ranks_of(spans, name):
    return sorted({span.attributes[names.RANK] for span in spans if span.name == name})


def test_each_rank_joins_the_leaders_run(journals):
    joined = {rank: of(records, RunJoined)[0] for rank, records in journals.items()}
    assert sorted(joined) == [0, 1]
    assert [joined[rank].world for rank in (0, 1)] == [2, 2]
    assert joined[0].run_id == joined[1].run_id != b""


def test_both_ranks_bind_metadata_of_one_digest(journals):
    leader, other = ([(b.step, b.nbytes, b.digest) for b in of(journals[rank], BindCall)] for rank in (0, 1))
    assert leader == other
    assert [step for step, _, _ in leader] == [1, 2, 3]
    assert all(nbytes > 0 and digest for _, nbytes, digest in leader)
    assert len({digest for _, _, digest in leader}) > 1
    assert of(journals[0], SettingsSeen) == of(journals[1], SettingsSeen)


def test_the_trace_of_a_request_has_spans_of_both_ranks(traces, journals):
    (spans,) = [
        spans
        for spans in traces.values()
        for s in spans
        if s.name == "request" and s.attributes[names.REQUEST_ID] == "1"
    ]
    (root,) = [span for span in spans if span.name == "request"]
    assert root.parent_span_id is None
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}
    assert ranks_of(spans, "load") == ranks_of(spans, "save") == [0, 1]
    assert ranks_of(spans, "get_num_new_matched_tokens") == [0]
    for rank in (0, 1):
        moved = [record for record in of(journals[rank], Transfer) if record.request_id == 1]
        told = [s for s in spans if s.name in ("load", "save") and s.attributes[names.RANK] == rank]
        assert len(told) == len(moved) > 0


def test_the_trace_of_a_step_has_the_callbacks_of_both_ranks(traces):
    steps = {
        root.attributes[names.STEP_NUMBER]: spans for spans in traces.values() for root in spans if root.name == "step"
    }
    assert sorted(steps) == [1, 2, 3]
    for spans in steps.values():
        for callback in ("bind_connector_meta", "start_load_kv", "wait_for_save"):
            assert ranks_of(spans, callback) == [0, 1]
        assert ranks_of(spans, "build_connector_meta") == [0]


def test_only_the_leader_tells_the_enqueue(journals, run):
    assert [e[1:] for e in map(dataclass_tuple, of(journals[0], Enqueued))] == [
        (1, 9, 600, None),
        (2, None, 560, PARENT),
    ]
    assert of(journals[1], Enqueued) == []
    assert [request.honoured_tokens for request in run[1][1].requests] == [480, 480]


def dataclass_tuple(record):
    return tuple(getattr(record, name) for name in record.__struct_fields__)


def test_read_by_one_agent_the_callers_trace_holds_both_ranks(journals):
    callers, spans = Callers(), []
    for rank in (0, 1):
        view = SpanView(callers=callers)
        for record in journals[rank]:
            spans += view.feed(record)
        spans += view.close()
    called = [span for span in spans if span.trace_id.hex() == PARENT.split("-")[1]]
    assert ranks_of(called, "load") == [0, 1]
    (root,) = [span for span in called if span.name == "request"]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    assert root.attributes[names.REQUEST_ID] == "2"


def test_no_token_of_a_prompt_is_in_a_journal_or_the_trace_file(two_ranks, tmp_path):
    """Marked input: 1777 is the prompt's only token, and no id, size or count of this run."""
    environ = {
        "TRACEKV_AGENT": "thread",
        "TRACEKV_TRACE_FILE": str(tmp_path / "trace.jsonl"),
        "TRACEKV_JOURNAL_DIR": str(tmp_path / "journals"),
        "TRACEKV_ENQUEUE_HOOK": "1",
    }
    marked = Prompt([1777] * 40, 1, {"trace_headers": {"traceparent": PARENT, "x-user": "marked-user"}})
    two_ranks.run(dataclasses.replace(connected("llama", "v2"), traced=True, environ=environ, rounds=[[marked]]))
    # A msgpack uint16, as a list of tokens would hold it, twice in a row.
    token = b"\xcd" + (1777).to_bytes(2, "big")
    rings = [path.read_bytes() for path in (tmp_path / "journals").glob("*.tkvring")]
    assert len(rings) == 2
    for data in (*rings, (tmp_path / "trace.jsonl").read_bytes()):
        assert token * 2 not in data
        assert b"1777, 1777" not in data
        assert b"marked-user" not in data
    assert any(PARENT.encode() in data for data in rings)

"""Each program of ``examples/`` as its page says to run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.collector import Sink, attributes_of, collector

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "examples" / "memory_backend"


def run(module, *arguments, **environ):
    """``python -m module`` from the checkout, with nothing of tracekv's or OpenTelemetry's set but ``environ``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**clean, "OMP_NUM_THREADS": "1", **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """What wrapping a connector printed, and its journals."""
    journals = tmp_path_factory.mktemp("traced") / "journals"
    return run("examples.trace_a_connector", "--journals", journals), journals


def test_an_existing_connector_is_wrapped_and_its_requests_are_told_and_told_again(traced):
    told, journals = traced
    assert "miss: nothing was offered, and the connector doesn't say why" in told
    assert "hit: 288 of 300 prompt tokens came from the store" in told
    assert run("examples.request_story", 1, journals) == told


def test_a_request_that_nobody_knows_is_said_so(traced):
    command = [sys.executable, "-m", "examples.request_story", "99", traced[1]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "no run here has a request 99\n")


@pytest.mark.slow
@pytest.mark.s3
def test_kv_in_a_bucket_is_found_by_a_fresh_engine_and_not_by_another_tenant(s3):
    told = run("examples.kv_in_s3", f"s3://{s3.bucket}/example", **s3.environ())
    first, second, other = re.findall(r": +(\d+) tokens", told)
    assert (first, second, other) == ("0", "288", "0")


@pytest.fixture
def installed_backend(tmp_path):
    """The backend as ``pip install`` would leave it, by its own pyproject.toml; the variables with which it is found."""
    project = tomllib.loads((BACKEND / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (group,) = project["entry-points"].items()
    info = tmp_path / f"kv_memory-{project['version']}.dist-info"
    info.mkdir()
    name, points = group
    lines = [f"[{name}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    facts = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(facts, encoding="utf-8")
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{BACKEND}", "TRACEKV_JOURNAL_DIR": str(tmp_path / "journals")}


@pytest.mark.slow
def test_a_backend_behind_an_entry_point_is_found_and_does_what_it_says(installed_backend):
    told = run("tracekv.cli", "doctor", TRACEKV_CONNECTOR="memory", **installed_backend)
    assert "connector memory" in told
    cells = json.loads(run("tracekv.cli", "test", "memory", "--cells", "v1/[sw]a*", "--json", **installed_backend))
    verdicts = {cell["name"]: cell["verdict"] for cell in cells["cells"]}
    assert verdicts == {"v1/warm": "ok", "v1/salt": "ok"}


@pytest.mark.slow
def test_a_backend_s_setting_is_checked_like_our_own(installed_backend):
    """Also that it is really read: one block of room saves one block."""
    with pytest.raises(AssertionError, match="Did you mean TRACEKV_MEMORY__MAX_BLOCKS"):
        run("examples.trace_a_connector", "--connector", "memory", TRACEKV_MEMORY__MAX_BLOKS="1", **installed_backend)
    told = run(
        "examples.trace_a_connector", "--connector", "memory", TRACEKV_MEMORY__MAX_BLOCKS="1", **installed_backend
    )
    assert "hit: 32 of 300" in told


@pytest.mark.slow
def test_traces_arrive_behind_a_collector_with_what_the_example_says_to_look_for(tmp_path):
    sink = Sink()
    try:
        with collector(sink.url, tmp_path) as there:
            told = run("examples.traces_in_jaeger", "--endpoint", there.http, "--jaeger", "http://jaeger:16686")
            printed = re.findall(r"http://jaeger:16686/trace/([0-9a-f]{32})", told)
            assert len(set(printed)) == 2
            sink.wait_for_spans(40)
    finally:
        sink.close()
    roots = [span for span in sink.spans if span.name == "request"]
    assert {span.trace_id.hex() for span in roots} == set(printed)
    honoured = sorted(attributes_of(span)["tracekv.honoured_tokens"] for span in roots)
    assert honoured == [0, 288]
    assert any("tracekv.miss_reason" in attributes_of(span) for span in roots)
    assert {"load", "save", "store.read", "store.put", "step"} <= set(sink.span_names)
    assert any(span.links for span in sink.spans if span.name == "step")


def test_every_example_is_on_their_page():
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "examples").iterdir():
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            assert f"({path.name}{'/' if path.is_dir() else ''})" in page, path.name

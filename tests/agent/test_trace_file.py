"""The trace file: whole lines, shared by processes, and never a reason to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.views.sample_run import spans_of, the_run
from tracekv.agent.exporters import TraceFileExporter
from tracekv.views.model import Span
from tracekv.views.otlp import read_trace_file

SPANS = [Span(f"span-{n}", bytes([n]) * 16, bytes([n]) * 8, None, n, n + 1, {"n": n}) for n in range(1, 4)]

_WRITER = """
import sys
from tracekv.agent.exporters import TraceFileExporter
from tracekv.views.model import Span
path, name = sys.argv[1:]
exporter = TraceFileExporter(path)
for n in range(200):
    exporter.export([Span(name, b"t" * 16, n.to_bytes(8), None, n, n, {"x": "y" * 5000})], {"service.name": name})
exporter.close(0)
print(exporter.exported)
"""


def test_spans_come_back_from_the_file_as_they_were(tmp_path: Path) -> None:
    exporter = TraceFileExporter(tmp_path / "trace.jsonl")
    spans = spans_of(the_run())
    exporter.export(spans, {"service.name": "tracekv"})
    exporter.close(0)

    read = list(read_trace_file(tmp_path / "trace.jsonl"))
    assert [(s.name, s.trace_id, s.span_id, s.parent_span_id, s.start_ns, s.end_ns) for s in read] == [
        (s.name, s.trace_id, s.span_id, s.parent_span_id, s.start_ns, s.end_ns) for s in spans
    ]
    assert [span.attributes for span in read] == [span.attributes for span in spans]
    assert exporter.exported == len(spans)


def test_parent_folders_are_made_and_a_second_exporter_appends(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "trace.jsonl"
    for span in SPANS:
        exporter = TraceFileExporter(path)
        exporter.export([span], {})
        exporter.close(0)

    assert [span.name for span in read_trace_file(path)] == ["span-1", "span-2", "span-3"]


def test_two_processes_share_a_file_without_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(path), name], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    assert [writer.communicate()[0] for writer in writers] == ["200\n", "200\n"]

    names = [span.name for span in read_trace_file(path)]
    assert (names.count("one"), names.count("two")) == (200, 200)


def test_a_path_that_can_not_be_written_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    exporter = TraceFileExporter(tmp_path / "file" / "trace.jsonl")
    exporter.export(SPANS, {})
    exporter.export(SPANS, {})

    assert (exporter.exported, exporter.failed) == (0, 6)
    assert len(caplog.records) == 1
    assert "TRACEKV_TRACE_FILE" in caplog.text


def test_a_full_disk_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    exporter = TraceFileExporter("/dev/full")
    exporter.export(SPANS, {})
    exporter.export(SPANS, {})
    exporter.close(0)

    assert exporter.failed == 6
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_after_a_line_that_was_cut_off_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    exporter = TraceFileExporter(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    exporter.export(SPANS[:1], {})
    monkeypatch.undo()
    exporter.export(SPANS[1:], {})
    exporter.close(0)

    assert (exporter.exported, exporter.failed) == (2, 1)
    assert [span.name for span in read_trace_file(path)] == ["span-2", "span-3"]


def test_after_a_writer_that_was_killed_within_a_line_the_next_one_s_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = TraceFileExporter(path)
    first.export(SPANS, {})
    first.close(1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    second = TraceFileExporter(path)
    second.export(SPANS, {})
    second.export(SPANS, {})
    second.close(1)

    assert len(list(read_trace_file(path))) == 3 * len(SPANS)
    assert path.read_bytes().count(b"\n") == 4

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
from typer.testing import CliRunner

from tracekv.agent.lock import AgentLock
from tracekv.cli.app import app


@pytest.fixture
def doctor(monkeypatch, tmp_path):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "TRACEKV_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    monkeypatch.setenv("TRACEKV_TRACE_FILE", str(tmp_path / "trace.jsonl"))
    monkeypatch.setenv("TRACEKV_CONNECTOR", "tests.support.connectors:FlatScheduler,TensorWorker")

    def run(*arguments, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        found = json.loads(done.stdout)
        assert done.exit_code == (1 if found["problems"] else 0)
        return {(line["check"], line["subject"]): line for line in found["results"]}

    return run


def test_a_sound_installation_has_no_problem(doctor, tmp_path):
    found = doctor()
    assert {line["severity"] for line in found.values()} == {"ok"}
    assert {check for check, _ in found} == {"settings", "runtime", "connector", "journal", "export", "agent"}


@pytest.mark.parametrize(
    ("environ", "check", "said"),
    [
        ({"TRACEKV_DETALE": "full"}, "settings", "Did you mean TRACEKV_DETAIL"),
        ({"TRACEKV_CONNECTOR": "no.such:A,B"}, "connector", "can't be imported"),
        ({"TRACEKV_JOURNAL_DIR": "/dev/null/journals"}, "journal", "can't be written"),
        ({"TRACEKV_TRACE_FILE": "/dev/null/trace.jsonl"}, "export", "can't be written"),
        ({"WORLD_SIZE": "4"}, "runtime", "WORLD_SIZE=4"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "export", "can't be reached"),
    ],
)
def test_each_fault_is_a_problem_that_says_what_to_do(doctor, environ, check, said):
    problems = [line for (of, _), line in doctor(**environ).items() if of == check and line["severity"] == "problem"]
    assert said in problems[0]["what"]
    assert problems[0]["remedy"]


def test_whoever_reads_the_journals_is_named_with_its_endpoint(doctor, tmp_path):
    folder = tmp_path / "journals"
    folder.mkdir()
    assert doctor()["agent", str(folder)]["what"] == "nobody reads the journals now; the first engine starts an agent"
    assert doctor(TRACEKV_AGENT="external")["agent", str(folder)]["severity"] == "advice"
    lock = AgentLock(folder)
    assert lock.acquire()
    lock.tell("")
    (folder / "metrics-endpoint").write_text("http://127.0.0.1:9464/metrics\n")
    found = doctor()["agent", str(folder)]
    lock.close()
    assert found["severity"] == "ok"
    assert found["what"] == f"pid {os.getpid()} reads the journals, metrics at http://127.0.0.1:9464/metrics"


def test_an_endpoint_that_answers_is_fine(doctor):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        port = server.getsockname()[1]
        found = doctor(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
        assert found[("export", f"127.0.0.1:{port}")]["severity"] == "ok"


def test_the_engines_arguments_are_looked_at_too(doctor, tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("kv_cache_config: {enable_block_reuse: false}\nkv_connector_config: {connector_module: other}\n")
    found = doctor("--llm-args", str(path))
    assert found[("L3", "kv_cache_config.enable_block_reuse")]["severity"] == "problem"
    assert found[("arguments", "kv_connector_config")]["severity"] == "advice"


def test_engines_whose_settings_differ_are_named(doctor, tmp_path):
    from tracekv.journal.directory import start_journal
    from tracekv.journal.records import RunJoined, SettingsSeen

    journals = []
    for rank, digest in enumerate((b"a" * 16, b"b" * 16)):
        journal = start_journal(tmp_path / "journals")
        journal.write(SettingsSeen(digest))
        journal.write(RunJoined(b"r" * 16, rank, 2))
        journals.append(journal)
    found = doctor()
    folder = str(tmp_path / "journals")
    assert found[("engines", folder)]["what"] == "Their settings differ: rank 0; rank 1."
    for journal in journals:
        journal.close()


def test_a_person_reads_lines_with_what_to_do(doctor, monkeypatch):
    monkeypatch.setenv("TRACEKV_DETALE", "full")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "PROBLEM settings" in done.stdout
    assert "-> Correct or remove it" in done.stdout
    assert done.stdout.rstrip().endswith("1 problem")


def test_the_backends_store_and_room_are_looked_at(doctor, tmp_path):
    found = doctor(
        TRACEKV_CONNECTOR="fsspec",
        TRACEKV_FSSPEC__MODEL_ID="m",
        TRACEKV_FSSPEC__URL=(tmp_path / "kv").as_uri(),
        TRACEKV_FSSPEC__ARENA_DIR=str(tmp_path),
        TRACEKV_FSSPEC__ARENA_BYTES="1048576",
    )
    said = {subject: line["what"] for (check, subject), line in found.items() if check == "store"}
    assert said[(tmp_path / "kv").as_uri()] == "can be written, read and listed"
    assert said[str(tmp_path)].endswith("MiB free for an arena of 1 MiB")


def test_a_backend_that_can_not_work_is_a_problem(doctor, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    found = doctor(
        TRACEKV_CONNECTOR="fsspec",
        TRACEKV_FSSPEC__URL=(tmp_path / "file" / "kv").as_uri(),
        TRACEKV_FSSPEC__ARENA_DIR=str(tmp_path),
        TRACEKV_FSSPEC__ARENA_BYTES=str(1 << 60),
    )
    said = {subject: line for (check, subject), line in found.items() if check == "store"}
    assert {line["severity"] for line in said.values()} == {"problem"}
    assert "Name the weights" in said["TRACEKV_FSSPEC__MODEL_ID"]["what"]
    assert "TRACEKV_FSSPEC__ARENA_BYTES" in said[str(tmp_path)]["what"]
    assert (tmp_path / "file" / "kv").as_uri() in said

"""No prompt token, salt or credential in anything that tracing leaves behind: files, requests to the endpoint, logs."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.agent import live
from tests.support.collector import Sink
from tracekv.journal.opening import open_journals
from tracekv.journal.records import QueryCall, Transfer

SALT = "marked-salt-5f0e"
CREDENTIAL = "marked-credential-91c7"
#: So many tokens in order are no chance.
WINDOW = 4


def encodings(tokens: Sequence[int]) -> list[bytes]:
    """How these tokens, in order, might lie in a file."""
    texts = [separator.join(map(str, tokens)).encode() for separator in (",", ", ", " ", "\n")]
    binary = [struct.pack(f"<{len(tokens)}{kind}", *tokens) for kind in "iqIQ"]
    return [*texts, *binary, b"".join(map(msgspec.msgpack.encode, tokens))]


def traces_of(tokens: Sequence[int], haystack: bytes) -> list[Sequence[int]]:
    """Runs of ``tokens`` that ``haystack`` holds."""
    windows = [tokens[start : start + WINDOW] for start in range(len(tokens) - WINDOW + 1)]
    return [window for window in windows if any(needle in haystack for needle in encodings(window))]


def test_the_search_finds_tokens_that_are_there() -> None:
    tokens = [70_001, 12, 900, 31_999, 5, 6, 7, 8_000]
    for planted in encodings(tokens[2:]) + encodings(tokens):
        assert tokens[4:] in traces_of(tokens, b"before" + planted + b"after")
    assert traces_of(tokens, b"70001 12, 900;31999;5,6,7") == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "thread"])
def test_nothing_that_tracing_leaves_holds_tokens_salt_or_credentials(mode: str, tmp_path: Path) -> None:
    from tracekv.harness.models import build_model

    seed, length = 77, 1100
    vocabulary = build_model("llama").config.vocab_size
    prompt = random.Random(seed).choices(range(vocabulary), k=length)
    journals, trace = tmp_path / "journals", tmp_path / "trace.jsonl"
    sink = Sink()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TRACEKV_", "OTEL_"))} | {
        "TRACEKV_AGENT": mode,
        "TRACEKV_DETAIL": "full",
        "TRACEKV_STEP_SAMPLE": "1",
        "TRACEKV_JOURNAL_DIR": str(journals),
        "TRACEKV_TRACE_FILE": str(trace),
        "TRACEKV_FSSPEC__URL": (tmp_path / "store").as_uri(),
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{CREDENTIAL}",
        "AWS_SECRET_ACCESS_KEY": CREDENTIAL,
        "AWS_SESSION_TOKEN": CREDENTIAL,
        "OTEL_LOG_LEVEL": "debug",
    }
    job = {
        "preset": "llama",
        "model": None,
        "prompt_tokens": length,
        "prompt_seed": seed,
        "salt": SALT,
        "phase": "save",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tracekv.cli.demo_process"],
            input=json.dumps(job), env=environ, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        if mode == "auto":
            live.ended(journals)
        assert sink.headers[0]["authorization"] == f"Bearer {CREDENTIAL}"
        left = {
            # A ring that isn't full is mostly zeros, which hold nothing and take long to search.
            **{path.name: re.sub(rb"\0{64,}", bytes(64), path.read_bytes()) for path in journals.iterdir()},
            "trace file": trace.read_bytes(),
            "standard error": done.stderr.encode(),
            **{f"request {number}": body for number, body in enumerate(sink.bodies)},
        }
    finally:
        sink.close()

    # The run was a real one: asked, saved, told and exported.
    (reader,) = open_journals(journals)
    kinds = {type(record) for record in reader.read(0, 1 << 20)[0]}
    assert {QueryCall, Transfer} <= kinds
    assert told["saved_bytes"] > 0
    assert b'"request"' in left["trace file"]
    assert any("request" in sink.span_names for _ in sink.requests)
    for name, haystack in left.items():
        assert SALT.encode() not in haystack, name
        assert CREDENTIAL.encode() not in haystack, name
        assert traces_of(prompt, haystack) == [], name
        assert traces_of(told["tokens"], haystack) == [], name

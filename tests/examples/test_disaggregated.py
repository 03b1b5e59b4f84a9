"""A prefill engine and a decode engine over one store, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def run(*options, **environ):
    done = subprocess.run(
        [sys.executable, "-m", "examples.disaggregated", "--prompts", "2", "--tokens", "300", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hinted_decode_engine_loads_what_the_prefill_engine_just_committed():
    answers = run(TRACEKV_FSSPEC__REFRESH_MS="3600000")  # only the hint can bring the news
    assert [answer["staged_blocks"] for answer in answers] == [9, 9]
    assert [answer["loaded_tokens"] for answer in answers] == [288, 288]
    assert all(0 < answer["commit_to_offer_ms"] < 60_000 for answer in answers)


@pytest.mark.slow
def test_without_a_hint_or_a_refresh_it_computes():
    answers = run("--no-hint", TRACEKV_FSSPEC__REFRESH_MS="3600000")
    assert [answer["loaded_tokens"] for answer in answers] == [0, 0]
    assert {answer["commit_to_offer_ms"] for answer in answers} == {0.0}


@pytest.mark.slow
@pytest.mark.s3
def test_the_store_may_be_a_bucket(s3):
    answers = run("--store", f"s3://{s3.bucket}/disaggregated")
    assert [answer["loaded_tokens"] for answer in answers] == [288, 288]

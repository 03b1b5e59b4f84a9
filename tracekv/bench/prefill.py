"""What the flow of ``tracekv_fsspec`` costs an engine and how soon it brings KV: saving, idle steps, queries, warm first tokens,
staging, and the way from one engine's commit to another's offer.

Everything that is compared takes turns in one process (:mod:`tracekv.bench.prefill_engine`); its model computes on one thread, so that
the connector's own threads have the other core, as they have beside a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

ROUNDS = 9
#: Prefills of each kind in a round, of which the median counts: a single one varies by more than what saving it costs.
SAVE_TURNS = 4


class PrefillCost(msgspec.Struct):
    """Medians of interleaved rounds; spreads as ``[low, high]`` by field. A number that wasn't measured is None.

    Attributes:
        kv_bytes_per_token, page_bytes, tokens_per_block, layers: The named configuration, of the model that computes.
        save_slowdown_pct: What a prefill of ``save_tokens`` loses to being saved, beside an engine without a connector.
        save_thread_cpu_pct: The same in processor time of the engine's thread, which other work on the machine doesn't touch.
        idle_step_us: Inside the connector per decoding step of ``idle_requests`` requests and ``idle_layers`` layers, nothing to move.
        query_us_1024: A query that finds 1,024 blocks staged, whose prompt a hint had named.
        query_unhinted_us_1024: The same without a hint: its 32,769 tokens are hashed in it.
        warm_ttft_ratio_arena, warm_ttft_ratio_hint, warm_ttft_ratio_store: Time to the first token beside the floor, which is copying
            the same bytes and computing the rest: staged before; stored and hinted; stored, and read while the query waits.
        warm_thread_cpu_ratio_arena: The first of them in processor time of the engine's thread.
        staging_ratio_disk, staging_ratio_s3: A hint's staging beside what ``bench store`` reads, in bytes per second.
        commit_to_offer_ms: From the commit of a prompt's last block to its offer by another engine that was hinted.
    """

    rounds: int
    layers: int
    tokens_per_block: int
    kv_bytes_per_token: int
    page_bytes: int
    save_tokens: int
    warm_tokens: int
    rest_tokens: int
    idle_requests: int
    idle_layers: int
    staged_mib: int
    save_slowdown_pct: float
    save_thread_cpu_pct: float
    prefill_ms: float
    idle_step_us: float
    query_us_1024: float
    query_unhinted_us_1024: float
    floor_ms: float
    warm_ttft_ratio_arena: float
    warm_ttft_ratio_hint: float
    warm_ttft_ratio_store: float
    warm_thread_cpu_ratio_arena: float
    staging_ratio_disk: float
    staging_ratio_s3: float | None
    staging_mb_s_disk: float
    staging_mb_s_s3: float | None
    commit_to_offer_ms: float
    spread: dict[str, list[float]]


def measure(rounds: int = ROUNDS, s3_url: str | None = None) -> PrefillCost:
    """Measure in a process of its own, with stores below a temporary folder that is removed.

    Args:
        s3_url: Where on S3 blocks may be stored and removed again, with the AWS variables as for the backend; None leaves S3 out.

    Raises:
        RuntimeError: The process failed; with what it wrote last.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEKV_"))}
    command = [sys.executable, "-m", "tracekv.bench.prefill_engine", str(rounds), s3_url or ""]
    done = subprocess.run(command, capture_output=True, check=False, env=environ)
    if done.returncode:
        raise RuntimeError(f"tracekv: the benchmark's process failed:\n{done.stderr.decode(errors='replace')[-3000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=PrefillCost)

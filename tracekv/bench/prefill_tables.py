"""``bench prefill`` as Markdown, with the goals beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekv.bench import page
from tracekv.bench.prefill import SAVE_TURNS

if TYPE_CHECKING:
    from tracekv.bench.prefill import PrefillCost

#: By field: what it is called, its unit, and its goal.
_ROWS = (
    ("save_slowdown_pct", "a prefill that is saved, slower than without a connector by", "%", "<= 3"),
    ("save_thread_cpu_pct", "the same in processor time of the engine's thread", "%", ""),
    ("idle_step_us", "inside the connector per step with nothing to move", "µs", "<= 200"),
    ("query_us_1024", "a query with 1,024 staged blocks, its prompt hinted", "µs", "<= 300"),
    ("query_unhinted_us_1024", "the same not hinted: its tokens are hashed in it", "µs", ""),
    ("warm_ttft_ratio_arena", "first token, KV staged, to the floor", "", "<= 1.15"),
    ("warm_thread_cpu_ratio_arena", "the same in processor time of the engine's thread", "", ""),
    ("warm_ttft_ratio_hint", "first token, KV stored and hinted, to the floor", "", ""),
    ("warm_ttft_ratio_store", "first token, KV read while the query waits, to the floor", "", ""),
    ("floor_ms", "the floor: copying the same bytes and computing the rest", "ms", ""),
    ("staging_ratio_disk", "a hint's staging to what `bench store` reads, disk", "", ">= 0.9"),
    ("staging_ratio_s3", "the same, S3 (SeaweedFS on the loopback address)", "", ">= 0.9"),
    ("staging_mb_s_disk", "a hint's staging, disk", "MB/s", ""),
    ("staging_mb_s_s3", "the same, S3", "MB/s", ""),
    ("commit_to_offer_ms", "from one engine's commit to the offer of another that was hinted", "ms", "<= 2000"),
)


def prefill_body(cost: PrefillCost) -> str:
    """The part of the page."""
    rows = [_row(cost, *row) for row in _ROWS if getattr(cost, row[0]) is not None]
    described = page.machine("torch", "transformers", "obstore", "fsspec")
    note = (
        f"A Llama of {cost.layers} layers with random weights on one thread, {cost.kv_bytes_per_token:,} bytes of KV per token "
        f"(float32), pages of {cost.tokens_per_block} tokens ({cost.page_bytes >> 10} KiB). *Saved*: prompts of "
        f"{cost.save_tokens:,} tokens, {cost.prefill_ms:.0f} ms each without a connector, the median of {SAVE_TURNS} in a round, in "
        f"turns. *First token*: {cost.warm_tokens:,} tokens are loaded and {cost.rest_tokens} computed. *Per step*: "
        f"{cost.idle_requests} generating requests, {cost.idle_layers} layers with two hooks each, the median of a turn's steps. "
        f"*Query*: the fastest of five. *Staging*: {cost.staged_mib} MiB in blocks of 256 KiB, cold. *Commit*: the index is "
        "refreshed every 2,000 ms; only the hint brings an offer sooner."
    )
    rounds = f"{cost.rounds} interleaved rounds."
    return f"{described}. {rounds}\n\n{page.table(('', 'median', 'range', 'goal'), rows)}\n\n{note}"


def _row(cost: PrefillCost, name: str, label: str, unit: str, goal: str) -> tuple[str, str, str, str]:
    low, high = cost.spread[name]
    measured = f"{getattr(cost, name):.3g} {unit}".rstrip()
    return label, measured, f"[{low:.3g}, {high:.3g}]", f"{goal} {unit}".strip() if goal else ""

"""What a round of the demo found out, as JSON and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import convert
from rich.console import Console
from rich.table import Table

from tracekv.views import names
from tracekv.views.amounts import duration, size
from tracekv.views.durations import Durations
from tracekv.views.otlp import read_trace_file


@dataclass
class Round:
    """One prompt, saved by one process and restored by another; ``differences`` is empty when all is equal."""

    differences: list[str]
    max_logit_diff: float
    saved: dict[str, Any]
    loaded: dict[str, Any]
    callbacks: dict[str, dict[str, int]]
    trace_file: Path
    store: str

    @classmethod
    def judge(
        cls,
        job: dict[str, Any],
        saved: dict[str, Any],
        loaded: dict[str, Any],
        trace: tuple[Path, int],
        store: str,
        tolerance: float,
    ) -> Round:
        """Compare the restored run with the runs without a connector, and the calls made with the spans in the file.

        ``trace`` is the file and the size that it had before this round.
        """
        differences = []
        if loaded["tokens"] != loaded["cold_tokens"]:
            at = next(
                i
                for i, pair in enumerate(zip(loaded["tokens"], loaded["cold_tokens"], strict=True))
                if pair[0] != pair[1]
            )
            differences.append(
                f"the restored run generates another token than the run without a connector at position {at}"
            )
        if saved["tokens"] != loaded["cold_tokens"]:
            differences.append("the saving run generates other tokens than the run without a connector")
        if not loaded["honoured_tokens"]:
            differences.append(
                f"nothing was restored: {loaded['honoured_tokens']} of {job['prompt_tokens']} tokens honoured"
            )
        elif not loaded["bit_equal_to_reuse"]:
            differences.append(
                "the first token's logits are not bit-equal to those of a run in which device reuse supplies the same "
                f"prefix (largest difference {loaded['reuse_logit_diff']:.3g})"
            )
        if loaded["max_logit_diff"] > tolerance:
            differences.append(
                f"the first token's logits differ by {loaded['max_logit_diff']:.3g} from the cold run (allowed {tolerance})"
            )
        callbacks = _count_callbacks(saved, loaded, *trace)
        for name, count in callbacks.items():
            if count["calls"] != count["spanned_calls"]:
                differences.append(
                    f"{name} was called {count['calls']} times, the trace holds {count['spanned_calls']}"
                )
        return cls(differences, loaded["max_logit_diff"], saved, loaded, callbacks, trace[0], store)

    def as_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        loaded, saved = self.loaded, self.saved
        groups = {group["id"]: group for group in saved["layer_groups"]}
        return {
            "outputs_match": not self.differences,
            "max_logit_diff": self.max_logit_diff,
            "bit_equal_to_reuse": loaded["bit_equal_to_reuse"],
            "prompt_tokens": loaded["prompt_tokens"],
            "device_tokens": loaded["device_tokens"],
            "offered_tokens": loaded["offered_tokens"],
            "honoured_tokens": loaded["honoured_tokens"],
            "loaded_tokens": loaded["loaded_tokens"],
            "saved_bytes": saved["saved_bytes"],
            "loaded_bytes": loaded["loaded_bytes"],
            "layer_groups": [
                {
                    "id": group["id"],
                    "window": group["window"],
                    "saved_bytes": groups[group["id"]]["saved_bytes"],
                    "loaded_bytes": group["loaded_bytes"],
                    "saved_pages": groups[group["id"]]["saved_pages"],
                    "loaded_pages": group["loaded_pages"],
                }
                for group in loaded["layer_groups"]
            ],
            "callbacks": self.callbacks,
            "ttft_cold_s": loaded["ttft_cold_s"],
            "ttft_warm_s": loaded["ttft_warm_s"],
            "trace_file": str(self.trace_file),
            "store": self.store,
            "differences": self.differences,
        }


def _count_callbacks(
    saved: dict[str, Any], loaded: dict[str, Any], trace_file: Path, offset: int
) -> dict[str, dict[str, int]]:
    """Per callback: the executors' own count of calls, and the spans that the trace file holds for them."""
    calls = Counter(saved["calls"]) + Counter(loaded["calls"])
    spans: Counter[str] = Counter()
    spanned: Counter[str] = Counter()
    for span in read_trace_file(trace_file, offset):
        name = span.attributes.get(names.CALLBACK)
        if isinstance(name, str) and not name.endswith(".__init__"):
            spans[name] += 1
            calls_of_span = span.attributes.get(names.CALLS, 1)
            assert isinstance(calls_of_span, int)
            spanned[name] += calls_of_span
    expected = {name for name in calls if name in saved["implemented"]}
    return {
        name: {"calls": calls[name], "spans": spans[name], "spanned_calls": spanned[name]}
        for name in sorted(expected | set(spans))
    }


def print_round(console: Console, outcome: Round) -> None:
    """The tables that a person reads."""
    loaded, saved = outcome.loaded, outcome.saved
    table = _table("Callbacks, both processes", "callback", "calls", "spans", "total", "p50", "p99")
    for side in ("scheduler", "worker"):
        table.add_row(side)
        for name, count in outcome.callbacks.items():
            if name.startswith(f"{side}."):
                times = _times([each["durations"].get(name) for each in (saved, loaded)])
                method = name.removeprefix(f"{side}.")
                table.add_row(f" {method}", str(count["calls"]), str(count["spans"]), *times)
    console.print(table)

    table = _table("KV by layer group", "layer group", "window", "pages saved", "saved", "pages loaded", "loaded")
    for before, after in zip(saved["layer_groups"], loaded["layer_groups"], strict=True):
        window = "full" if after["window"] is None else str(after["window"])
        moved = (
            before["saved_pages"],
            size(before["saved_bytes"]),
            after["loaded_pages"],
            size(after["loaded_bytes"]),
        )
        table.add_row(str(after["id"]), window, *map(str, moved))
    console.print(table)

    columns = ("queried", "on the device", "offered", "honoured", "loaded", "computed")
    table = _table("Prompt tokens of the restored request", *columns)
    told = ("prompt_tokens", "device_tokens", "offered_tokens", "honoured_tokens", "loaded_tokens")
    computed = loaded["prompt_tokens"] - loaded["device_tokens"] - loaded["honoured_tokens"]
    table.add_row(*(str(loaded[name]) for name in told), str(computed))
    console.print(table)

    cold, warm = loaded["ttft_cold_s"], loaded["ttft_warm_s"]
    console.print(f"time to first token: {cold * 1e3:.0f} ms cold, {warm * 1e3:.0f} ms warm ({cold / warm:.1f}x)")
    if not outcome.differences:
        console.print("tokens: equal to a run without a connector")
        console.print(f"first logits: bit-equal to device reuse, within {outcome.max_logit_diff:.1e} of the cold run")
    console.print(f"store  {outcome.store}", soft_wrap=True, markup=False)
    console.print(f"trace  {outcome.trace_file}", soft_wrap=True, markup=False)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, padding=(0, 1, 0, 0), title_style="bold")
    table.add_column(first, no_wrap=True, header_style="dim")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
    return table


def _times(parts: Sequence[dict[str, Any] | None]) -> tuple[str, str, str]:
    """Total, median and 99th percentile of a callback's calls in both processes."""
    merged = Durations()
    for part in parts:
        if part is not None:  # its names came as JSON
            merged.merge(convert(part, Durations, strict=False))
    if not merged.calls:
        return "-", "-", "-"
    return duration(merged.total_ns), duration(merged.p50_ns), duration(merged.p99_ns)

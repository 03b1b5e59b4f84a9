"""The tables of ``tracekv bench overhead``, as Markdown."""

from __future__ import annotations

from tracekv.bench import page
from tracekv.bench.overhead import CaptureCost
from tracekv.bench.steps import StepCost


def callbacks_body(cost: CaptureCost) -> str:
    """What a pass and a callback cost more."""

    def row(label: str, value: float, name: str, goal: str) -> tuple[str, str, str, str]:
        low, high = cost.spread[name]
        return label, f"{value:.1f}", f"[{low:.1f}, {high:.1f}]", goal

    callbacks = cost.added_us_per_callback
    alloc, build, idle = callbacks
    rows = [
        row(f"bare pass of {cost.layers} layers x 2 hooks, µs", cost.bare_us_per_pass, "bare_us_per_pass", ""),
        row("traced, µs", cost.traced_us_per_pass, "traced_us_per_pass", ""),
        row("an SDK span per hook, µs", cost.span_per_hook_us_per_pass, "span_per_hook_us_per_pass", ""),
        row("added per pass, µs", cost.added_us_per_pass, "added_us_per_pass", "<= 30"),
        row("SDK span per hook / traced", cost.ratio_span_per_hook, "ratio_span_per_hook", ""),
        row(f"added: {alloc}, µs", callbacks[alloc], "alloc", "<= 35"),
        row(f"added: {build}, µs", callbacks[build], "build", "<= 30"),
        row(f"added: {idle}, µs", callbacks[idle], "idle", ""),
    ]
    clock = f"One clock reading took {cost.clock_ns:.0f} ns in the same rounds; each hook reads the clock twice."
    described = page.machine("msgspec", "opentelemetry-sdk")
    return f"{described}. {cost.rounds} rounds.\n\n{page.table(('', 'median', 'range', 'goal'), rows)}\n\n{clock}"


def steps_body(cost: StepCost) -> str:
    """What a running engine loses, and what its agent takes."""

    def interval(values: list[float]) -> str:
        return f"[{values[0]:.2f}, {values[1]:.2f}]"

    slower, cpu = interval(cost.step_slowdown_pct_interval), interval(cost.engine_cpu_us_per_step_interval)
    rows = [
        ("slower by, median of a step, %", f"{cost.step_slowdown_pct_median:.2f}", slower, "<= 1"),
        ("slower by, 99th percentile, %", f"{cost.step_slowdown_pct_p99:.2f}", "", ""),
        ("engine thread's CPU per step, µs", f"{cost.engine_cpu_us_per_step:.0f}", cpu, "<= 100"),
        ("spans exported per second", f"{cost.spans_exported_per_s:.0f}", "", "12,200"),
        ("spans dropped", str(cost.spans_dropped), "", "0"),
        ("agent, % of a core", f"{cost.agent_cpu_pct_of_core:.1f}", "", "<= 40"),
        ("agent's peak memory, MB", f"{cost.agent_rss_mb:.0f}", "", "<= 150"),
        ("engine's private memory added, MB", f"{cost.engine_rss_added_mb:.1f}", "", "<= 20"),
    ]
    steps = (
        f"A running engine: {cost.steps} traced steps of {cost.step_ms_bare:.1f} ms, {cost.steps_per_s:.0f} a second, full detail for "
        "every request, exported through a real collector; engine on one core, agent, collector and sink on the other. In brackets "
        "the median's interval over turns."
    )
    return f"{steps}\n\n{page.table(('', 'measured', 'interval', 'goal'), rows)}"

"""Overview: is KV being reused, what does it cost, and is anything wrong right now."""

from __future__ import annotations

from dashboards.board import Board
from dashboards.panels import Panel, Query, Traces
from dashboards.promql import SHOWN, events, now, rate, ratio, series, zero_if_watched
from dashboards.shapes import at_present, per_second, percentiles
from dashboards.units import SHARE, unit_of
from tracekv.views import names

QUERIED, COMPUTED = names.METRIC_PROMPT_TOKENS_QUERIED, names.METRIC_PROMPT_TOKENS_COMPUTED
HONOURED = names.METRIC_PROMPT_TOKENS_HONOURED

#: What is said at bring-up of the engine's arguments and the connector's code isn't a rule that was broken: `tracekv doctor` tells it.
CONTRACT = "!" + "|".join(f"L{number}" for number in range(2, 9))

BREAKER = {"0": ("closed", "green"), "1": ("half open", "orange"), "2": ("open", "red")}


def breaker_state() -> str:
    """0 closed, 1 half open, 2 open, by engine: the worst of the ranks."""
    parts = {
        word: now(names.METRIC_STORE_BREAKER_STATE, ["store_engine"], store_breaker=word)
        for word in ("half_open", "open")
    }
    return f"{parts['half_open']} + 2 * {parts['open']}"


_NOW = [
    per_second(
        "Prompts",
        names.METRIC_PROMPTS,
        question="Is there traffic at all?",
        answer="Prompts settled in a second, over the time shown.",
        legend="prompts",
        window=SHOWN,
        kind="stat",
        width=4,
        height=4,
    ),
    Panel(
        title="Hit ratio",
        question="Which share of the prompt tokens came from the connector?",
        answer="Honoured over queried, over the time shown. Where it fell: *Why lookups missed* below.",
        queries=[Query(ratio(rate(HONOURED, window=SHOWN), rate(QUERIED, window=SHOWN)), "hit ratio")],
        unit=SHARE,
        kind="stat",
        width=4,
        height=4,
        most=1,
    ),
    Panel(
        title="Engine time stalled",
        question="How much of its time does an engine wait for KV?",
        answer="Seconds that forward passes waited for transfers in a second, per process, as the connector reports them.",
        queries=[
            Query(
                f"{rate(names.METRIC_TRANSFER_STALL, window=SHOWN)} / "
                f"count(count by (instance, tracekv_rank) ({series(names.METRIC_PASSES)}))",
                "stalled",
            )
        ],
        unit=SHARE,
        kind="stat",
        width=4,
        height=4,
        limits=(0.02, 0.1),
    ),
    at_present(
        "Oldest held pages",
        names.METRIC_HELD_AGE,
        question="Is a finished request keeping device pages that nobody gives back?",
        answer="Age of the oldest. If it only grows, `get_finished` never returns that id: see *Held pages* of the requests.",
        legend="oldest",
        kind="stat",
        width=4,
        height=4,
        absent="no scheduler",
        limits=(10, 60),
    ),
    Panel(
        title="Broken rules",
        question="Did the connector or the runtime break their contract?",
        answer="Findings, the advice at bring-up left out; 0 only where journals are being read. `tracekv check` tells each.",
        queries=[Query(zero_if_watched(events(names.METRIC_FINDINGS, rule=CONTRACT)), "findings")],
        unit=unit_of(names.METRIC_FINDINGS),
        kind="stat",
        width=4,
        height=4,
        absent="nobody looks",
        limits=(1, 10),
    ),
    Panel(
        title="Store",
        question="Does the store answer?",
        answer="State of the circuit breaker, the worst of all ranks. Open: nothing is read or written, every lookup misses.",
        queries=[Query(breaker_state(), "{{tracekv_store_engine}}")],
        unit="short",
        kind="stat",
        width=4,
        height=4,
        absent="no store used",
        words=BREAKER,
    ),
]

_REUSE = [
    Panel(
        title="Where prompt tokens came from",
        question="What is the device spared?",
        answer="Prompt tokens in a second: found on the device, honoured from the connector, and computed.",
        queries=[
            Query(rate(COMPUTED), "on the device already"),
            Query(rate(HONOURED), "from the connector"),
            Query(f"{rate(QUERIED)} - {rate(COMPUTED)} - {rate(HONOURED)}", "computed"),
        ],
        unit=unit_of(QUERIED, "a second"),
        kind="stack",
        width=12,
        traces=Traces('{ name = "request" && span.tracekv.honoured_tokens > 0 }'),
    ),
    per_second(
        "Why lookups missed",
        names.METRIC_LOOKUP_MISSES,
        ["miss_reason"],
        question="What keeps the hit ratio down?",
        answer="Lookups in a second that offered less than the prompt allows, by reason; the words are in docs/telemetry.md. "
        "A miss is no error.",
        kind="stack",
        width=12,
        absent="none seen",
        traces=Traces(
            '{ name = "request" && span.tracekv.miss_reason = "${__field.labels.tracekv_miss_reason}" }',
            tags={"tracekv.miss_reason": "${__field.labels.tracekv_miss_reason}"},
        ),
    ),
    percentiles(
        "Time to first token",
        names.METRIC_PROMPT_DURATION,
        (0.5, 0.99),
        ["prompt_hit"],
        question="Are requests slow, and does a hit make them faster?",
        answer="From the first query to the end of the prompt, as the scheduler sees it: median and 99th percentile.",
        width=12,
        traces=Traces('{ name = "request" } | select(span.tracekv.honoured_tokens)'),
    ),
    per_second(
        "KV bandwidth",
        names.METRIC_TRANSFER_IO,
        ["direction"],
        question="How many bytes move, and which way?",
        answer="From or to the device's pages, by the source chosen above.",
        where={"source": "$source"},
        width=12,
    ),
]

_TROUBLE = [
    Panel(
        title="Alerts that fire",
        question="What is wrong, and where is its runbook?",
        answer="The annotation `runbook_url` of each alert leads to its page in docs/runbooks.",
        queries=[
            Query('ALERTS{alertname=~"Tracekv.+", alertstate="firing", job=~"$job|"}', "{{alertname}} {{tracekv_rank}}")
        ],
        unit="short",
        kind="table",
        width=12,
        absent="none",
    ),
    per_second(
        "Bytes given up",
        names.METRIC_DROP_IO,
        ["direction", "reason"],
        "{{tracekv_direction}}: {{tracekv_reason}}",
        question="What was not saved, and why?",
        answer="Bandwidth of dropped blocks by reason. They are computed again when they are asked for.",
        kind="stack",
        width=12,
        absent="none seen",
        traces=Traces(
            '{ event:name = "drop" && event.tracekv.reason = "${__field.labels.tracekv_reason}" }',
        ),
    ),
]

OVERVIEW = Board(
    "tracekv-overview",
    "tracekv: overview",
    "Is KV being reused, what does it cost, and is anything wrong right now?",
    [("Now", _NOW), ("Reuse", _REUSE), ("Trouble", _TROUBLE)],
)

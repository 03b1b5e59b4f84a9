"""Tracer health: whether what the other dashboards show can be believed."""

from __future__ import annotations

from dashboards.board import Board
from dashboards.panels import Panel, Query, Traces
from dashboards.promql import STEP, events, rate, ratio, zero_if_watched
from dashboards.shapes import at_present, per_second
from dashboards.units import SHARE, unit_of
from tracekv.views import names

_RANK = "rank {{tracekv_rank}}"
_LOST, _READ = names.METRIC_TRACER_RECORDS_LOST, names.METRIC_TRACER_RECORDS_READ

_COMPLETE = [
    at_present(
        "Journals being read",
        names.METRIC_PROCESSES,
        ["rank"],
        _RANK,
        question="Is every rank seen?",
        answer="Processes by rank; -1 hasn't told its rank yet. A rank that isn't here writes no journal, or not in this folder.",
        how="sum",
        kind="stat",
        width=6,
        height=6,
        absent="none",
    ),
    Panel(
        title="Share of records lost",
        question="Can the counters be believed?",
        answer="Records that were overwritten before they were read, of all: every counter is too small by what they held.",
        queries=[Query(ratio(rate(_LOST, ["rank"]), f"({rate(_READ, ['rank'])} + {rate(_LOST, ['rank'])})"), _RANK)],
        unit=SHARE,
        width=6,
        height=6,
        absent="nothing written",
        limits=(0.0001, 0.01),
    ),
    at_present(
        "Lag",
        names.METRIC_TRACER_LAG,
        ["rank"],
        _RANK,
        question="Is the agent behind?",
        answer="Age of the newest record read. It also grows while an engine does nothing.",
        width=6,
        height=6,
        absent="nothing read",
    ),
    at_present(
        "Ranks with other settings",
        names.METRIC_SETTINGS_DIFFERING,
        question="Do all ranks run with the same settings?",
        answer="Processes whose settings differ from the lowest rank's. `tracekv doctor` shows them as resolved.",
        legend="differing",
        kind="stat",
        width=6,
        height=6,
        absent="no agent",
        limits=(1, 2),
    ),
]

_WORK = [
    per_second(
        "Records read",
        _READ,
        ["rank"],
        _RANK,
        question="How much is written?",
        answer="Records in a second.",
    ),
    per_second(
        "Journal bandwidth",
        names.METRIC_TRACER_WRITTEN,
        ["rank"],
        _RANK,
        question="How fast does a ring fill?",
        answer="Bytes written to journals in a second. The ring's size over it is the time that an agent may be away.",
    ),
    at_present(
        "What tracing costs",
        names.METRIC_TRACER_COST,
        ["rank"],
        _RANK,
        question="Is tracing in the engine's way?",
        answer="Share of the engine thread, as told when the budget guard last acted; no line before it has.",
        absent="guard never acted",
        limits=(0.03, 0.1),
    ),
    at_present(
        "Counters only",
        names.METRIC_TRACER_REDUCED,
        ["rank"],
        _RANK,
        question="Has the budget guard cut the records down?",
        answer="1: this rank keeps counters only, so that requests' stories have holes. TRACEKV_BUDGET_PCT is the limit.",
        kind="states",
        absent="nothing read",
        words={"0": ("all records", "green"), "1": ("counters only", "orange")},
    ),
    per_second(
        "The agent's processor time",
        names.METRIC_TRACER_CPU,
        question="What does the agent cost?",
        answer="Share of one core. Absent where the agent is a thread of an engine.",
        legend="agent",
        absent="no agent process",
    ),
    Panel(
        title="Exported",
        question="Do spans and metrics arrive?",
        answer="Items handed on in a second, and items that were given up since the collector didn't take them.",
        queries=[
            Query(rate(names.METRIC_TRACER_EXPORTED, ["signal"]), "{{tracekv_signal}}"),
            Query(rate(names.METRIC_TRACER_EXPORT_FAILED, ["signal"]), "{{tracekv_signal}} given up"),
        ],
        unit=unit_of(names.METRIC_TRACER_EXPORTED, "a second"),
        absent="no exporter",
    ),
]

_WRONG = [
    Panel(
        title="tracekv's own faults",
        question="Did tracekv break?",
        answer="Instruments that failed and were removed, records that can't be decoded, and records on which the metrics failed.",
        queries=[
            Query(rate(names.METRIC_TRACER_FAULTS, ["rank"]), f"removed on {_RANK}"),
            Query(rate(names.METRIC_TRACER_RECORDS_UNDECODABLE, ["rank"]), f"undecodable on {_RANK}"),
            Query(rate(names.METRIC_TRACER_VIEW_FAULTS), "metrics failed"),
        ],
        unit="suffix: faults/s",
        width=12,
        absent="nothing read",
        traces=Traces('{ name = "tracer_fault" }', "tracer_fault"),
    ),
    Panel(
        title="Broken rules",
        question="Which rules of the contract are broken?",
        answer="Findings by rule; docs/rules.md tells what each means and what to do.",
        queries=[
            Query(
                zero_if_watched(events(names.METRIC_FINDINGS, ["rule", "rank"], STEP)),
                "{{tracekv_rule}} on rank {{tracekv_rank}}",
            )
        ],
        unit=unit_of(names.METRIC_FINDINGS),
        width=12,
        absent="nobody looks",
        traces=Traces('{ event:name = "finding" && event.tracekv.rule = "${__field.labels.tracekv_rule}" }'),
    ),
]

TRACER = Board(
    "tracekv-tracer",
    "tracekv: tracer health",
    "Can the other dashboards be believed: is every rank seen, is anything lost, and what does tracing cost?",
    [("Is it complete", _COMPLETE), ("Its work", _WORK), ("What is wrong", _WRONG)],
)

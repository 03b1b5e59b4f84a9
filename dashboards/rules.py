"""Recording and alert rules for Prometheus, and what each alert's runbook is called.

Thresholds are first guesses that suit most engines; each runbook says which number to change. Rates of rare events are written so that
the first one counts, though its series begins with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import yaml

from tracekv import rules as contract
from tracekv.rules import Severity

#: Where the runbooks are, from the top of the checkout; ``python -m dashboards --runbooks URL`` tells where you publish them.
RUNBOOKS = "docs/runbooks/"
#: Labels by which a process is told from others.
_PROCESS = "job, instance, tracekv_rank"
_INSTANCE = "job, instance"


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        waits: How long the expression has to hold.
        summary: What is wrong, in one line with the labels.
        runbook: Name of its page in docs/runbooks, without the suffix.
    """

    name: str
    expr: str
    waits: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    runbook: str

    def as_rule(self, runbooks: str) -> dict[str, Any]:
        """The rule as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.waits,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook_url": f"{runbooks}{self.runbook}.md"},
        }


def _rate(metric: str, by: str, where: str = "", window: str = "5m") -> str:
    return f"sum by ({by}) (rate({metric}{where}[{window}]))"


def _events(metric: str, by: str, where: str = "", window: str = "10m") -> str:
    """Rare events in a window, the first one of a series included."""
    series = f"{metric}{where}"
    return f"sum by ({by}) (({series} unless {series} offset {window}) or increase({series}[{window}]))"


def _p99(metric: str, by: str, window: str = "5m") -> str:
    # NaN, where nothing was counted, is no value.
    return f"histogram_quantile(0.99, sum by (le, {by}) (rate({metric}_bucket[{window}]))) >= 0"


def _broken(severity: Severity) -> str:
    ids = "|".join(sorted(rule.id for rule in contract.RULES if rule.severity is severity))
    return f'{{tracekv_rule=~"{ids}"}}'


_OPERATIONS = "tracekv_store_operations_total"
_FAILED = '{tracekv_store_outcome!~"ok|exists|missing"}'
_ENGINE = "job, instance, tracekv_store_engine"
_LOST, _READ = "tracekv_tracer_records_lost_total", "tracekv_tracer_records_read_total"
_FAULTS = (
    "tracekv_tracer_faults_total",
    "tracekv_tracer_records_undecodable_total",
    "tracekv_tracer_view_faults_total",
)

#: Name -> expression.
RECORDED: dict[str, str] = {
    "instance:tracekv_hit:ratio_rate5m": f"{_rate('tracekv_prompt_tokens_honoured_total', _INSTANCE)} / "
    f"({_rate('tracekv_prompt_tokens_queried_total', _INSTANCE)} > 0)",
    "instance_hit:tracekv_prompt_duration_seconds:p99_5m": _p99(
        "tracekv_prompt_duration_seconds", f"{_INSTANCE}, tracekv_prompt_hit"
    ),
    "instance_rank:tracekv_transfer_stall:rate5m": _rate("tracekv_transfer_stall_seconds_total", _PROCESS),
    "instance_direction:tracekv_finished_skew_seconds:p99_5m": _p99(
        "tracekv_finished_skew_seconds", f"{_INSTANCE}, tracekv_direction"
    ),
    "instance_engine:tracekv_store_failures:ratio_rate5m": f"({_rate(_OPERATIONS, _ENGINE, _FAILED)} "
    f"or 0 * {_rate(_OPERATIONS, _ENGINE)}) / ({_rate(_OPERATIONS, _ENGINE)} > 0)",
    "instance_rank:tracekv_records_lost:ratio_rate5m": f"{_rate(_LOST, _PROCESS)} / "
    f"(({_rate(_READ, _PROCESS)} + {_rate(_LOST, _PROCESS)}) > 0)",
}

_HIT = "instance:tracekv_hit:ratio_rate5m"

ALERTS: list[Alert] = [
    Alert(
        "TracekvForwardPassStalled",
        "instance_rank:tracekv_transfer_stall:rate5m > 0.1",
        "10m",
        "warning",
        "Rank {{ $labels.tracekv_rank }} of {{ $labels.instance }} waits for KV for {{ $value | humanizePercentage }} of its time",
        "forward-pass-stalled",
    ),
    Alert(
        "TracekvHitRatioCollapsed",
        f"avg_over_time({_HIT}[15m]) < 0.5 * (avg_over_time({_HIT}[1d] offset 15m) > 0.1)",
        "15m",
        "warning",
        "The hit ratio of {{ $labels.instance }} fell to {{ $value | humanizePercentage }}, less than half of the last day's",
        "hit-ratio-collapsed",
    ),
    Alert(
        "TracekvHeldPagesNotReturned",
        f"max by ({_PROCESS}) (tracekv_held_age_seconds) > 60",
        "2m",
        "critical",
        "{{ $labels.instance }} keeps device pages of a request that finished {{ $value | humanizeDuration }} ago",
        "held-pages-not-returned",
    ),
    Alert(
        "TracekvRequestStuckInFlight",
        f"max by ({_PROCESS}, tracekv_direction) (tracekv_request_in_flight_age_seconds) > 60",
        "2m",
        "critical",
        "Rank {{ $labels.tracekv_rank }} of {{ $labels.instance }} hasn't ended a {{ $labels.tracekv_direction }} "
        "for {{ $value | humanizeDuration }}",
        "request-stuck-in-flight",
    ),
    Alert(
        "TracekvRanksFarApart",
        "instance_direction:tracekv_finished_skew_seconds:p99_5m > 1",
        "10m",
        "warning",
        "Ranks of {{ $labels.instance }} end a {{ $labels.tracekv_direction }} up to {{ $value | humanizeDuration }} apart",
        "ranks-far-apart",
    ),
    Alert(
        "TracekvStoreBreakerOpen",
        f'max by ({_ENGINE}) (tracekv_store_breaker_state{{tracekv_store_breaker="open"}}) == 1',
        "1m",
        "critical",
        "The circuit breaker of {{ $labels.instance }} to its {{ $labels.tracekv_store_engine }} store is open: all lookups miss",
        "store-breaker-open",
    ),
    Alert(
        "TracekvStoreFailing",
        "instance_engine:tracekv_store_failures:ratio_rate5m > 0.05",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the {{ $labels.tracekv_store_engine }} store's operations fail "
        "for {{ $labels.instance }}",
        "store-failing",
    ),
    Alert(
        "TracekvSavesDropped",
        f"{_rate('tracekv_drop_blocks_total', 'job, instance, tracekv_reason')} > 0",
        "15m",
        "warning",
        "{{ $labels.instance }} gives up blocks all the time: {{ $labels.tracekv_reason }}",
        "saves-dropped",
    ),
    Alert(
        "TracekvContractViolated",
        f"{_events('tracekv_findings_total', 'job, instance, tracekv_rule', _broken(Severity.VIOLATION))} > 0",
        "0m",
        "critical",
        "Rule {{ $labels.tracekv_rule }} of the connector contract is broken on {{ $labels.instance }}",
        "contract-violated",
    ),
    Alert(
        "TracekvContractSuspect",
        f"{_events('tracekv_findings_total', 'job, instance, tracekv_rule', _broken(Severity.SUSPECT))} > 10",
        "10m",
        "info",
        "Rule {{ $labels.tracekv_rule }} of the connector contract seems to be broken often on {{ $labels.instance }}",
        "contract-suspect",
    ),
    Alert(
        "TracekvCallbackRaises",
        f"{_events('tracekv_callback_exceptions_total', 'job, instance, tracekv_callback')} > 0",
        "0m",
        "critical",
        "The connector raised in {{ $labels.tracekv_callback }} on {{ $labels.instance }}",
        "callback-raises",
    ),
    Alert(
        "TracekvRecordsLost",
        "instance_rank:tracekv_records_lost:ratio_rate5m > 0",
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the records of rank {{ $labels.tracekv_rank }} of {{ $labels.instance }} "
        "are lost unread",
        "records-lost",
    ),
    Alert(
        "TracekvTracerFault",
        " or ".join(f"{_events(metric, _INSTANCE)} > 0" for metric in _FAULTS),
        "0m",
        "warning",
        "A part of tracekv failed on {{ $labels.instance }}; the engine goes on without it",
        "tracer-fault",
    ),
    Alert(
        "TracekvTracingReduced",
        f"max by ({_PROCESS}) (tracekv_tracer_reduced) == 1",
        "10m",
        "info",
        "The budget guard of rank {{ $labels.tracekv_rank }} of {{ $labels.instance }} keeps counters only",
        "tracing-reduced",
    ),
    Alert(
        "TracekvExportFailing",
        f"{_rate('tracekv_tracer_export_failed_total', 'job, instance, tracekv_signal')} > 0",
        "10m",
        "warning",
        "{{ $labels.instance }} gives up {{ $labels.tracekv_signal }} that the collector doesn't take",
        "export-failing",
    ),
    Alert(
        "TracekvSettingsDiffer",
        f"max by ({_INSTANCE}) (tracekv_settings_differing) > 0",
        "5m",
        "warning",
        "{{ $value }} processes of {{ $labels.instance }} have other settings than their run's lowest rank",
        "settings-differ",
    ),
    Alert(
        "TracekvAgentDown",
        "up == 0 and on (job, instance) last_over_time(tracekv_settings_differing[1h])",
        "5m",
        "warning",
        "{{ $labels.instance }} served tracekv's metrics within the hour and doesn't answer",
        "agent-down",
    ),
]


def as_yaml(runbooks: str = RUNBOOKS) -> str:
    """The rule file; ``runbooks`` comes before the name of each page."""
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    groups = [
        {"name": "tracekv.recorded", "interval": "30s", "rules": recorded},
        {"name": "tracekv.alerts", "rules": [alert.as_rule(runbooks) for alert in ALERTS]},
    ]
    head = "# Made by `python -m dashboards` from dashboards/rules.py; what to do is in docs/runbooks.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)

"""Store: does it answer, how fast is it beside what it can give, and what was given up."""

from __future__ import annotations

from dashboards.board import Board
from dashboards.boards.overview import BREAKER, breaker_state
from dashboards.panels import Panel, Query, Traces
from dashboards.promql import now, rate, ratio, share
from dashboards.shapes import per_second, percentiles
from dashboards.units import SHARE, unit_of
from tracekv.views import names

_OPERATION = ["store_engine", "operation"]
_LEGEND = "{{tracekv_store_engine}} {{tracekv_operation}}"
_SPANS = '{ name =~ "store\\\\..+" && duration > 100ms }'
_WELL = "ok|exists|missing"


def _achieved(operation: str) -> str:
    return rate(names.METRIC_STORE_IO, ["store_engine"], operation=operation)


def _of_ceiling(operation: str, direction: str) -> str:
    return ratio(_achieved(operation), now(names.METRIC_STORE_CEILING, ["store_engine"], direction=direction))


_ANSWERS = [
    Panel(
        title="Circuit breaker",
        question="Does the store answer, and since when not?",
        answer="The worst state of all ranks at their last operation. Open: nothing is asked of it for a while, lookups miss with "
        "`store_down`.",
        queries=[Query(breaker_state(), "{{tracekv_store_engine}}")],
        unit="short",
        kind="states",
        width=12,
        height=6,
        absent="no store used",
        words=BREAKER,
    ),
    Panel(
        title="Failed operations",
        question="What does the store refuse?",
        answer="Share of the operations that ended badly; an object that is missing, or there already, is no failure.",
        queries=[
            Query(
                share(
                    rate(names.METRIC_STORE_OPERATIONS, _OPERATION, store_outcome=f"!{_WELL}"),
                    rate(names.METRIC_STORE_OPERATIONS, _OPERATION),
                ),
                _LEGEND,
            )
        ],
        unit=SHARE,
        width=12,
        height=6,
        limits=(0.01, 0.1),
        traces=Traces('{ name =~ "store\\\\..+" && status = error }', "store.read", {"error": "true"}),
    ),
    per_second(
        "Operations",
        names.METRIC_STORE_OPERATIONS,
        [*_OPERATION, "store_outcome"],
        question="What is asked of the store, and how does it end?",
        answer="In a second, by outcome.",
        kind="stack",
    ),
    per_second(
        "Requests",
        names.METRIC_STORE_REQUESTS,
        _OPERATION,
        question="What does the bill count?",
        answer="Asked of the server in a second, retries and the parts of large objects included. Over operations: how well blocks "
        "are put together into objects.",
        kind="stack",
    ),
    Panel(
        title="Attempts of an operation",
        question="Is it retried?",
        answer="1 is no retry. More: throttling, time-outs or a bad network.",
        queries=[
            Query(
                ratio(rate(names.METRIC_STORE_ATTEMPTS, _OPERATION), rate(names.METRIC_STORE_OPERATIONS, _OPERATION)),
                _LEGEND,
            )
        ],
        unit="short",
        limits=(1.1, 2),
        traces=Traces('{ name =~ "store\\\\..+" && span.tracekv.store.attempts > 1 }', "store.read"),
    ),
]

_SPEED = [
    percentiles(
        "Duration of an operation",
        names.METRIC_STORE_OPERATION_DURATION,
        (0.99,),
        _OPERATION,
        question="Is the store slow?",
        answer="99th percentile of one logical operation, its attempts included.",
        traces=Traces(_SPANS, "store.read"),
    ),
    Panel(
        title="Bandwidth and ceiling",
        question="How much of what the store can give is used?",
        answer="Bytes read and written in a second, beside the store's best as measured: run `tracekv bench store` once on "
        "the node, with its TRACEKV_JOURNAL_DIR.",
        queries=[
            Query(_achieved("read"), "{{tracekv_store_engine}} read"),
            Query(_achieved("put"), "{{tracekv_store_engine}} written"),
            Query(
                now(names.METRIC_STORE_CEILING, ["store_engine", "direction"]),
                "{{tracekv_store_engine}} {{tracekv_direction}} ceiling",
            ),
        ],
        unit=unit_of(names.METRIC_STORE_IO, "a second"),
    ),
    Panel(
        title="Share of the ceiling",
        question="Is the store the bottleneck?",
        answer="Near 100 %: it is; more clients won't help. Far below while lookups wait: the store is slow per operation.",
        queries=[
            Query(_of_ceiling("read", "load"), "{{tracekv_store_engine}} read"),
            Query(_of_ceiling("put", "save"), "{{tracekv_store_engine}} written"),
        ],
        unit=SHARE,
        absent="ceiling not measured",
    ),
]

_AHEAD = [
    per_second(
        "Blocks read ahead",
        names.METRIC_PREFETCH_BLOCKS,
        ["prefetch_fate"],
        question="Is reading ahead of use worth it?",
        answer="Useful, late and wasted blocks in a second.",
        kind="stack",
        absent="none read ahead",
        width=6,
        traces=Traces(
            '{ event:name = "prefetch" && event.tracekv.prefetch.fate = "${__field.labels.tracekv_prefetch_fate}" }'
        ),
    ),
    Panel(
        title="Useful share of reading ahead",
        question="How much of it is used in time?",
        answer="Useful blocks over all that were read ahead.",
        queries=[
            Query(
                share(rate(names.METRIC_PREFETCH_BLOCKS, prefetch_fate="useful"), rate(names.METRIC_PREFETCH_BLOCKS)),
                "useful",
            )
        ],
        unit=SHARE,
        most=1,
        absent="none read ahead",
        width=6,
    ),
    percentiles(
        "Lead of useful blocks",
        names.METRIC_PREFETCH_LEAD,
        (0.5, 0.99),
        question="Are blocks staged just in time, or long before?",
        answer="From staged to first use. Seconds: the arena holds what nobody needs yet.",
        absent="none read ahead",
        width=6,
    ),
    percentiles(
        "From commit to offer",
        names.METRIC_LOOKUP_COMMIT_TO_OFFER,
        (0.5, 0.99),
        question="How soon is another engine's KV offered here?",
        answer="From its commit to its first offer here, by both wall clocks. More than a refresh of the index: hint prompts.",
        absent="nothing of other engines",
        width=6,
    ),
    per_second(
        "Blocks given up",
        names.METRIC_DROP_BLOCKS,
        ["direction", "reason"],
        "{{tracekv_direction}}: {{tracekv_reason}}",
        question="What was not stored, and why?",
        answer="In a second, by reason. `queue_full`, `queue_slow`: saves come faster than the store takes them.",
        kind="stack",
        absent="none seen",
        width=12,
    ),
    per_second(
        "Misses for the store's sake",
        names.METRIC_LOOKUP_MISSES,
        ["miss_reason"],
        question="Which misses would a better store have avoided?",
        answer="Lookups in a second that missed although the KV is stored, or because the store didn't answer.",
        where={"miss_reason": "not_ready|not_staged|arena_full|corrupt|store_down|rank_missing|error"},
        kind="stack",
        absent="none seen",
        width=12,
        traces=Traces(
            '{ name = "lookup" && span.tracekv.miss_reason = "${__field.labels.tracekv_miss_reason}" }', "lookup"
        ),
    ),
]

STORE = Board(
    "tracekv-store",
    "tracekv: store",
    "Does the store answer, how fast is it beside what it can give, and what was given up?",
    [("Does it answer", _ANSWERS), ("Speed", _SPEED), ("Read ahead and given up", _AHEAD)],
)

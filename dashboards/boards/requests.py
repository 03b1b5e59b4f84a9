"""Requests: how long they take, where they wait, and whose pages are kept."""

from __future__ import annotations

from dashboards.board import Board
from dashboards.panels import Panel, Query, Traces
from dashboards.promql import STEP, events, mean, quantile, rate, ratio, zero_if_watched
from dashboards.shapes import at_present, per_second, percentiles
from dashboards.units import SHARE, unit_of
from tracekv.views import names

_SLOW = Traces('{ name = "request" && duration > 1s }')
_WAIT = "worker.wait_for_layer_load"

_LATENCY = [
    percentiles(
        "Time to first token",
        names.METRIC_PROMPT_DURATION,
        (0.5, 0.9, 0.99),
        ["prompt_hit"],
        question="How slow are the slow ones, and is it hits or misses?",
        answer="From the first query until the prompt is settled, as the scheduler sees it.",
        width=12,
        traces=_SLOW,
    ),
    percentiles(
        "Waiting for pages",
        names.METRIC_PROMPT_WAIT,
        (0.5, 0.99),
        question="Are requests blocked before they start?",
        answer="From the first query until pages were allocated. If it grows the device's pages are full: look at held pages.",
        width=6,
        traces=_SLOW,
    ),
    Panel(
        title="Waiting in a lookup",
        question="Does the scheduler wait for the store?",
        answer="Mean wait of a lookup for bytes to be staged; at most TRACEKV_FSSPEC__OFFER_WAIT_MS. The whole engine waits with it.",
        queries=[Query(ratio(rate(names.METRIC_LOOKUP_WAIT), rate(names.METRIC_LOOKUPS)), "mean wait")],
        unit=unit_of(names.METRIC_LOOKUP_WAIT),
        width=6,
        traces=Traces('{ name = "lookup" && span.tracekv.time.waited_ns > 0 }', "lookup"),
    ),
]

_STALLS = [
    per_second(
        "Forward pass stalled",
        names.METRIC_TRANSFER_STALL,
        ["direction", "rank"],
        "{{tracekv_direction}} on rank {{tracekv_rank}}",
        question="Which rank waits for KV, and for loads or saves?",
        answer="Share of the time that forward passes waited, as the connector reports it.",
        limits=(0.02, 0.1),
        traces=Traces('{ name =~ "load|save" && span.tracekv.time.stall_ns > 0 }', "load"),
    ),
    Panel(
        title="wait_for_layer_load per pass",
        question="Does a layer wait for its KV, whatever the connector reports?",
        answer="Measured: time inside the hook, per forward pass.",
        queries=[
            Query(
                ratio(
                    rate(names.METRIC_LAYER_HOOK_TIME, ["rank"], callback=_WAIT), rate(names.METRIC_PASSES, ["rank"])
                ),
                "rank {{tracekv_rank}}",
            )
        ],
        unit=unit_of(names.METRIC_LAYER_HOOK_TIME),
        traces=Traces('{ name = "wait_for_layer_load" }', "wait_for_layer_load"),
    ),
    Panel(
        title="Hidden behind compute",
        question="Do transfers run while the engine computes?",
        answer="Share of the transfers' time in which no callback held the engine thread. Low: it copies inside the callbacks.",
        queries=[
            Query(
                ratio(
                    rate(names.METRIC_TRANSFER_HIDDEN, ["direction"]), rate(names.METRIC_TRANSFER_TIME, ["direction"])
                ),
                "{{tracekv_direction}}",
            )
        ],
        unit=SHARE,
        most=1,
    ),
    percentiles(
        "Duration of a transfer",
        names.METRIC_TRANSFER_DURATION,
        (0.99,),
        ["direction", "tier"],
        question="Is a tier slow?",
        answer="99th percentile of reported transfers, by direction and tier.",
        traces=Traces('{ name = "${__field.labels.tracekv_direction}" && duration > 10ms }', "load"),
    ),
    per_second(
        "Time in callbacks",
        names.METRIC_CALLBACK_DURATION,
        ["callback"],
        question="Which callback takes the engine's time?",
        answer="Share of the time inside each callback, all ranks together.",
        suffix="_sum",
        kind="stack",
        traces=Traces('{ span.tracekv.callback = "${__field.labels.tracekv_callback}" }'),
    ),
    Panel(
        title="The query",
        question="Does asking the connector slow the scheduler?",
        answer="Time inside `get_num_new_matched_tokens`, mean and 99th percentile.",
        queries=[
            Query(
                quantile(0.99, names.METRIC_CALLBACK_DURATION, callback="scheduler.get_num_new_matched_tokens"), "p99"
            ),
            Query(mean(names.METRIC_CALLBACK_DURATION, callback="scheduler.get_num_new_matched_tokens"), "mean"),
        ],
        unit=unit_of(names.METRIC_CALLBACK_DURATION),
        traces=Traces('{ name = "get_num_new_matched_tokens" }', "get_num_new_matched_tokens"),
    ),
]

_PROMISED = [
    Panel(
        title="Offered, honoured, loaded",
        question="Does the runtime take what is offered, and is it loaded then?",
        answer="Prompt tokens in a second. Honoured far below offered: pages are scarce. Loaded below honoured breaks rule W2.",
        queries=[
            Query(rate(names.METRIC_PROMPT_TOKENS_OFFERED), "offered"),
            Query(rate(names.METRIC_PROMPT_TOKENS_HONOURED), "honoured"),
            Query(rate(names.METRIC_PROMPT_TOKENS_LOADED), "loaded"),
            Query(rate(names.METRIC_PROMPT_TOKENS_SAVED), "saved"),
        ],
        unit=unit_of(names.METRIC_PROMPT_TOKENS_OFFERED, "a second"),
        width=12,
        traces=Traces('{ name = "request" && span.tracekv.offered_tokens > span.tracekv.honoured_tokens }'),
    ),
    Panel(
        title="Failed transfers",
        question="Do transfers fail?",
        answer="Reported with an error, by direction and tier; 0 only where journals are being read.",
        queries=[
            Query(
                zero_if_watched(events(names.METRIC_TRANSFER_ERRORS, ["direction", "tier"], STEP)),
                "{{tracekv_direction}} {{tracekv_tier}}",
            )
        ],
        unit=unit_of(names.METRIC_TRANSFER_ERRORS),
        width=12,
        absent="nobody looks",
        traces=Traces('{ name =~ "load|save" && status = error }', "load", {"error": "true"}),
    ),
]

_KEPT = [
    at_present(
        "In flight",
        names.METRIC_REQUEST_IN_FLIGHT,
        ["direction", "rank"],
        "{{tracekv_direction}} on rank {{tracekv_rank}}",
        question="How many requests wait for their load or save to end?",
        answer="Announced to `get_finished` and not returned by it yet.",
        how="sum",
        absent="no worker",
    ),
    at_present(
        "Oldest in flight",
        names.METRIC_REQUEST_IN_FLIGHT_AGE,
        ["direction", "rank"],
        "{{tracekv_direction}} on rank {{tracekv_rank}}",
        question="Is one of them forgotten?",
        answer="A line that grows by a second a second is a request that this rank never returns: `tracekv dump` names it.",
        absent="no worker",
        limits=(10, 60),
    ),
    at_present(
        "Held pages",
        names.METRIC_HELD_PAGES,
        ["layer_group_id"],
        "layer group {{tracekv_layer_group_id}}",
        question="How many device pages do finished requests keep?",
        answer="From `request_finished` answering True until every rank has returned the id.",
        how="sum",
        kind="stack",
        absent="no scheduler",
    ),
    percentiles(
        "Rank skew",
        names.METRIC_FINISHED_SKEW,
        (0.5, 0.99),
        ["direction"],
        question="Do ranks give requests back at different times?",
        answer="From the first rank's `get_finished` that returned a request to the last one's. Only with several ranks on a node.",
        absent="one rank",
    ),
    per_second(
        "Last rank",
        names.METRIC_FINISHED_LAST,
        ["rank"],
        "rank {{tracekv_rank}}",
        question="Is it always the same rank that is last?",
        answer="Requests in a second of which this rank was the last to return them; even lines are fine.",
        absent="one rank",
    ),
    Panel(
        title="Exceptions",
        question="Does the connector raise?",
        answer="Callbacks in which it raised; 0 only where journals are being read.",
        queries=[
            Query(zero_if_watched(events(names.METRIC_CALLBACK_EXCEPTIONS, ["callback"], STEP)), "{{tracekv_callback}}")
        ],
        unit=unit_of(names.METRIC_CALLBACK_EXCEPTIONS),
        absent="nobody looks",
        traces=Traces("{ span.tracekv.callback != nil && status = error }", tags={"error": "true"}),
    ),
]

REQUESTS = Board(
    "tracekv-requests",
    "tracekv: request latency and stalls",
    "Why are requests slow: where do they wait, what stalls the forward pass, and which pages are kept?",
    [("Latency", _LATENCY), ("Stalls", _STALLS), ("Promised and kept", _PROMISED), ("In flight and held", _KEPT)],
)

"""Layer groups: which one moves the bytes, ends the hits, and makes the others wait."""

from __future__ import annotations

from dashboards.board import Board
from dashboards.panels import Panel, Query, Traces
from dashboards.promql import rate, ratio
from dashboards.shapes import at_present, per_second
from dashboards.units import SHARE
from tracekv.views import names

_BY = ["layer_group_id", "direction"]
_LEGEND = "group {{tracekv_layer_group_id}} {{tracekv_direction}}"
_GROUP = "group {{tracekv_layer_group_id}}"

_MOVED = [
    per_second(
        "Bandwidth",
        names.METRIC_TRANSFER_IO,
        _BY,
        _LEGEND,
        question="Which layer group moves the bytes?",
        answer="By the source chosen above.",
        where={"source": "$source"},
        width=12,
        traces=Traces(
            '{ name =~ "load|save" && span.tracekv.layer_group.id = ${__field.labels.tracekv_layer_group_id} }', "load"
        ),
    ),
    per_second(
        "Pages",
        names.METRIC_TRANSFER_PAGES,
        _BY,
        _LEGEND,
        question="How many pages is that?",
        answer="Pages in a second that hold KV. A group with a window should move far fewer than one with full attention.",
        where={"source": "$source"},
        width=12,
    ),
    per_second(
        "Bytes by tier",
        names.METRIC_TRANSFER_IO,
        [*_BY, "tier"],
        f"{_LEGEND} {{{{tracekv_tier}}}}",
        question="Where does a group's KV come from and go to?",
        answer="As the connector reports it.",
        where={"source": "reported"},
        kind="stack",
        width=12,
        absent="nothing reported",
    ),
    per_second(
        "Blocks without a page",
        names.METRIC_CALLBACK_ABSENT_PAGES,
        ["layer_group_id"],
        _GROUP,
        question="How much of a window group's blocks has left its window?",
        answer="Entries of -1 that callbacks were handed. They must be skipped: -1 is a valid index, of another request's page.",
        width=12,
        absent="none seen",
    ),
]

_WAITS = [
    per_second(
        "Group that ended the hit",
        names.METRIC_LOOKUP_BOUNDED,
        ["layer_group_id"],
        _GROUP,
        question="Does one group bound every hit?",
        answer="Lookups in a second whose stored prefix this group ended. One group far above the others: its saves are lost.",
        absent="none seen",
        traces=Traces('{ name = "lookup" && span.tracekv.bounding_layer_group >= 0 }', "lookup"),
    ),
    per_second(
        "Stalls",
        names.METRIC_TRANSFER_STALL,
        _BY,
        _LEGEND,
        question="Which group makes the pass wait?",
        answer="Share of the time, as the connector reports it.",
        traces=Traces('{ name =~ "load|save" && span.tracekv.time.stall_ns > 0 }', "load"),
    ),
    per_second(
        "Time in the per-layer hooks",
        names.METRIC_LAYER_HOOK_TIME,
        ["layer_group_id", "callback"],
        f"{_GROUP} {{{{tracekv_callback}}}}",
        question="In which group's layers is the time spent?",
        answer="Measured inside `wait_for_layer_load` and `save_kv_layer`, as a share of the time.",
        absent="no hooks",
    ),
    Panel(
        title="Hidden behind compute",
        question="Which group's transfers aren't hidden?",
        answer="Share of the transfers' time in which no callback held the engine thread.",
        queries=[Query(ratio(rate(names.METRIC_TRANSFER_HIDDEN, _BY), rate(names.METRIC_TRANSFER_TIME, _BY)), _LEGEND)],
        unit=SHARE,
        most=1,
    ),
    Panel(
        title="Layer hooks that were called",
        question="Do CUDA graphs skip the hooks?",
        answer="Called over expected. Below 100 % nothing waits for these layers' KV: save and load outside of the hooks then.",
        queries=[
            Query(
                ratio(
                    rate(names.METRIC_LAYER_HOOK_SEEN, ["callback"]),
                    rate(names.METRIC_LAYER_HOOK_EXPECTED, ["callback"]),
                ),
                "{{tracekv_callback}}",
            )
        ],
        unit=SHARE,
        most=1,
        absent="no hooks",
    ),
    at_present(
        "Held pages",
        names.METRIC_HELD_PAGES,
        ["layer_group_id"],
        _GROUP,
        question="Which group's pages are kept by finished requests?",
        answer="Pages, all ranks together.",
        how="sum",
        absent="no scheduler",
    ),
]

LAYER_GROUPS = Board(
    "tracekv-layer-groups",
    "tracekv: layer groups",
    "Which layer group moves the bytes, ends the hits, and makes the others wait?",
    [("Moved", _MOVED), ("Waits and bounds", _WAITS)],
)

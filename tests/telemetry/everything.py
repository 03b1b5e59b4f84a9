"""Records that make the views say everything that they can say."""

from __future__ import annotations

from tests.views.sample_run import allocated, call, dropped, finished, looked_up, polled, queried, stored
from tests.views.test_any_stream import EVERYTHING as USUAL
from tracekv import rules
from tracekv.journal.records import (
    CallCounts,
    CancelLoadCall,
    Drop,
    Enqueued,
    Finding,
    Prefetch,
    Record,
    SettingsSeen,
    StoreCeiling,
    TracingReduced,
)
from tracekv.journal.vocabulary import Callback, Direction, DropReason, MissReason, Operation, Outcome, PrefetchFate

RULES = [*(rule.id for rule in rules.RULES), "L2", "L3", "L4", "L5", "L6", "L7", "L8"]
SEVERITIES = ["violation", "suspect", "problem", "advice", "note"]

EVERYTHING: list[Record] = [
    SettingsSeen(b"\x0a\x0b"),
    *USUAL,
    Enqueued(6990, 20, 21, 10, None),
    queried(7000, 7010, 20, lora_id=5, answer="(float, bool)", is_async=True),
    allocated(7011, 7012, 20),
    CancelLoadCall(Callback.CANCEL_LOAD, 7020, 7030, 4, None, 20, 32, 64),
    *(stored(7100, 7110, operation=operation, engine="local") for operation in Operation),
    *(stored(7100, 7110, outcome=outcome, engine="memory") for outcome in Outcome),
    *(looked_up(7000, 7005, 20, reason=reason, commit_to_offer_ns=7) for reason in MissReason),
    *(Prefetch(7200, 20, fate, 1, 1, 1) for fate in PrefetchFate),
    *(Drop(7200, Direction.SAVE, reason, 20, 0, 3, 300) for reason in DropReason),
    stored(7110, 7120, breaker="half_open"),
    StoreCeiling(7130, "s3", "bucket", Direction.LOAD, 65536, 1_000_000, 900_000),
    finished(7300, 7310, 20),
    dropped(7311, 20),
    polled(7320, 7330, answer="tuple", loading_given=[20]),
    *(call(callback, 7400, 7410, 4) for callback in Callback),
    CallCounts(5, 7500, 7600, [(Callback.GET_FINISHED, 3, 30, 12)]),
    queried(7610, 7620, 21),
    *(
        Finding(7630, rule, severity, "scheduler.get_num_new_matched_tokens", "said", 21, 4, rule)
        for rule in RULES
        for severity in SEVERITIES
    ),
    Finding(7640, "S14", "suspect", "runtime", "said", 999_999, 0),
    Finding(7650, "L3", "problem", "kv_cache_config.enable_block_reuse", "said"),
    TracingReduced(7700, is_reduced=True, cost_ppm=41_000, limit_ppm=30_000),
]

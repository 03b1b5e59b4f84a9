"""Where versions of the runtime disagree: one switch each, set to what the newest text that was read does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RuntimeVersion:
    """Choices of :class:`~tracekv.harness.Executor` that differ between versions of TensorRT-LLM.

    Attributes:
        served_position_survives: After an asynchronous load the request goes on behind what was honoured. False: it goes back
            to what the device held, and the load was for nothing (V2; not with sliding windows).
        v2_policy: A capacity policy other than GUARANTEED_NO_EVICT under V2 is accepted, or refused; or every policy is
            coerced to MAX_UTILIZATION.
        v1_policy: The same under V1 is refused, or only warned of (and nothing is evicted).
        probes_layer_groups: Bring-up looks for the per-layer-group forms before the layout is registered.
        refuses_drafts: Speculative decoding with a connector is refused (V2).
        knows_attention_dp: Attention data parallelism is allowed on V2 to connectors that declare it; False: to none.
        lists_of_released: The finish call of a released request has an empty list per layer group; False: an empty list, so that
            the flat form is called (V2).
        tells_of_cancelled_loads: A scheduler that has the methods is told what of its offer is not honoured (``cancel_load``), and
            that a request begins anew (``request_reset``). Only branches do; which tokens they name is inferred.
        deadlines_span_passes: With attention data parallelism a transfer's time goes on from pass to pass, saves included. False, as
            in the first version: loads have a deadline only while a rank waits for them inside the pass that began them.

    Source: contract-v2.md sections 1.4, 2 and 3; contract.md section 1.2; the last: upstream's tests (#19164, #19369).
    """

    served_position_survives: bool = True
    v2_policy: Literal["accepted", "refused", "coerced"] = "accepted"
    v1_policy: Literal["refused", "warned"] = "refused"
    probes_layer_groups: bool = True
    refuses_drafts: bool = True
    knows_attention_dp: bool = True
    lists_of_released: bool = True
    tells_of_cancelled_loads: bool = False
    deadlines_span_passes: bool = True

"""What the runtime reports about requests, of the same shape as TensorRT-LLM's own records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestData:
    """One request as ``build_connector_meta`` sees it: deltas against what was reported before.

    Attributes:
        request_id: The id every callback is keyed on.
        new_tokens: Token ids appended since the last report; the first report carries the whole prompt.
        new_block_ids: Page slots appended since the last report; empty where there is more than one layer group.
        computed_position: Where this pass begins. On the pass of a committed synchronous load it is where the
            *load* begins; after an asynchronous load it includes the loaded tokens.
        num_scheduled_tokens: Tokens the pass computes: the chunk in prefill, 1 + drafts in generation.
        block_hashes: The cache manager's chain; empty under the V2 manager.
        priorities: One per new block, or None where no retention is honoured.
        cache_salt: Tenant salt; has to be part of every key.
        new_block_ids_by_layer_group: ``[g][i]`` is the page slot of the i-th appended block in layer group g.

    Source: contract.md section 1.3.
    """

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """What is scheduled for the next pass.

    Attributes:
        new_requests: Requests reported for the first time (or again after a replay).
        cached_requests: Later chunks and every generation request.
        attention_dp_rank: Set under attention data parallelism only.

    Source: contract.md section 1.3.
    """

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


#: TensorRT-LLM's ``LlmRequest`` where it is installed; any object with its attributes elsewhere.
LlmRequest = Any

"""What each request has been told so far, so that a report carries only what is new.

Source: contract.md section 1.3; contract-v2.md section 11, points 10 to 15.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tracekv.contract import RequestData, SchedulerOutput
from tracekv.harness.requests import CONTEXT_STATES, Batch, Request

_log = logging.getLogger("tracekv.harness")


class PageLists(Protocol):
    """What a cache tells about a request's pages."""

    def page_indices(self, request: Request) -> tuple[list[int], list[list[int]] | None]:
        """The flat list of page slots, and the lists per layer group where the cache has them."""
        ...

    def block_hashes(self, request: Request) -> list[int]:
        """The cumulative chain of full blocks, or an empty list."""
        ...

    def block_priorities(self, request: Request, ordinals: range) -> list[int]:
        """What the request's retention config says of some of its blocks; asked only where there are no lists per group."""
        ...


@dataclass
class _Reported:
    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class DeltaReports:
    """Builds the scheduler output of each pass.

    A list that shrank counts from the longest one seen, and changed ids are never restated. A request id is forgotten only
    by :meth:`reset`: so an id that is used again is reported as cached, with an empty delta, as the runtime does.
    """

    def __init__(self) -> None:
        self._reported: dict[int, _Reported] = {}
        self._has_warned = False

    @property
    def kept(self) -> list[int]:
        """The ids of which something is remembered; on V1 nothing ever forgets one (contract.md section 1.8)."""
        return sorted(self._reported)

    def reset(self, request_id: int) -> None:
        """Report the request as new again."""
        self._reported.pop(request_id, None)

    def build(
        self, batch: Batch, cache: PageLists, parked: Mapping[int, Request], external: Mapping[int, int]
    ) -> SchedulerOutput:
        """The report of a batch.

        Args:
            batch: The requests of the pass.
            cache: Where their pages are looked up.
            parked: Requests whose asynchronous load was committed; they are left out.
            external: Honoured tokens by request id: the position reported is where the *load* begins.
        """
        output = SchedulerOutput()
        for request in batch.context:
            if request.request_id in parked:
                continue
            is_new = request.request_id not in self._reported
            reports = output.new_requests if is_new else output.cached_requests
            reports.append(self._report(request, cache, external))
        # A request first seen in generation is cached too, with everything it has as its delta.
        output.cached_requests += [self._report(request, cache, external) for request in batch.generation]
        return output

    def _priorities(self, request: Request, cache: PageLists, is_grouped: bool, ordinals: range) -> list[int] | None:
        """Those of the new blocks; none without a retention config, and with lists per group (V2), which has no use for it."""
        if request.kv_cache_retention_config is None:
            return None
        if not is_grouped:
            return cache.block_priorities(request, ordinals)
        if not self._has_warned:
            self._has_warned = True
            _log.warning("KvCacheRetentionConfig has no effect with a KV connector on the V2 cache manager")
        return None

    def _report(self, request: Request, cache: PageLists, external: Mapping[int, int]) -> RequestData:
        reported = self._reported.setdefault(request.request_id, _Reported())
        tokens = request.get_tokens(0)
        flat, by_group = cache.page_indices(request)
        lists = by_group or [flat]
        reported.blocks += [0] * (len(lists) - len(reported.blocks))
        known = reported.blocks[0]
        new = [slots[seen:] for slots, seen in zip(lists, reported.blocks, strict=True)]
        new_tokens = tokens[reported.tokens :]
        reported.blocks = [max(seen, len(slots)) for slots, seen in zip(lists, reported.blocks, strict=True)]
        reported.tokens = max(reported.tokens, len(tokens))

        if request.state in CONTEXT_STATES:
            position = request.context_current_position - external.get(request.request_id, 0)
            scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            position = len(tokens) - 1
            scheduled = 1 + len(request.py_draft_tokens)
        return RequestData(
            request_id=request.request_id,
            new_tokens=new_tokens,
            # With one layer group both fields are the very same list.
            new_block_ids=new[0] if len(new) == 1 else [],
            computed_position=position,
            num_scheduled_tokens=scheduled,
            block_hashes=cache.block_hashes(request),
            priorities=self._priorities(request, cache, by_group is not None, range(known, len(lists[0]))),
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=new if by_group else [],
        )

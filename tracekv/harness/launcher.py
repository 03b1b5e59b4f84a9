"""From a scheduled batch to its forward: pages, metadata, loads, and what parking leaves of it."""

from __future__ import annotations

import functools
import logging

from tracekv.harness.agreement import Agreement
from tracekv.harness.cache import PagedCache
from tracekv.harness.ending import Requests
from tracekv.harness.forward import ForwardStep, Launched
from tracekv.harness.requests import Batch
from tracekv.harness.stream import Streams

_log = logging.getLogger("tracekv.harness")


class Launcher:
    """Launches batches.

    Args:
        cache: Has the connector asked about first chunks, and places them.
        streams: ``start_load_kv`` gets ``current``.
        forward: Computes what is left.
        requests: End where a forward fails; their manager is the way to the connector.
        agreement: Starts the loads.

    Source: contract-v2.md section 1.1, steps 3 to 7.
    """

    def __init__(
        self, cache: PagedCache, streams: Streams, forward: ForwardStep, requests: Requests, agreement: Agreement
    ) -> None:
        self._cache = cache
        self._streams = streams
        self._forward = forward
        self._requests = requests
        self._agreement = agreement

    def launch(self, batch: Batch, *, is_padded: bool) -> Launched | None:
        """Prepare a batch, hand its metadata over, and run what parking leaves of it; None where nothing ran.

        ``is_padded``: where that is nothing, a row of no request is computed.
        """
        manager = self._requests.manager
        self._cache.prepare_resources(batch, manager)
        if manager is not None:
            report = functools.partial(manager.report, batch, self._cache)
            load = functools.partial(manager.call, "worker", "start_load_kv", self._streams.current)
            report()
            prepared = batch.context
            manager.take_scheduled_requests_pending_load(batch)
            manager.handle_metadata()
            self._agreement.start(batch, prepared, load, report)
        if not batch and not is_padded:
            return None
        try:
            return self._forward.run(batch, is_padded=not batch)
        except Exception as error:
            # The runtime logs it, fails every active request and goes on (contract.md section 1.5).
            _log.exception("tracekv: a forward failed; %d active requests end here", len(self._requests.active))
            self._requests.fail(error)
            return None

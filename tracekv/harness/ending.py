"""How requests end: announced to the connector, kept while they are saved, cancelled, failed; or begin anew."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tracekv.harness.cache import PagedCache
from tracekv.harness.forward import Launched
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import Batch, Request, RequestState

_log = logging.getLogger("tracekv.harness")


class Requests:
    """Every request of an executor that hasn't ended, and the steps that move it on.

    Args:
        cache: Holds their pages.
        left: Called with a request that has given its pages back.
        cancel_waits_for_transfers: A cancelled request with a transfer under way stays until that is done (attention data
            parallelism); otherwise its pages go at once, whatever moves in them.
        tells_of_resets: The connector is told of requests that begin anew.

    Attributes:
        manager: The connector's, or None.
        incoming: Submitted, not yet seen by a pass.
        active: Waiting, running or parked, in order of arrival.
        saving: Finished, their pages kept until the connector has returned the id.
        is_closing: The engine is to shut down: nothing more is submitted.

    Source: contract-v2.md sections 4 and 6.
    """

    def __init__(
        self,
        cache: PagedCache,
        left: Callable[[Request], None],
        *,
        cancel_waits_for_transfers: bool = False,
        tells_of_resets: bool = False,
    ) -> None:
        self._cache = cache
        self._left = left
        self._cancel_waits_for_transfers = cancel_waits_for_transfers
        self._tells_of_resets = tells_of_resets
        self.manager: KvCacheConnectorManager | None = None
        self.incoming: list[Request] = []
        self.active: list[Request] = []
        self.saving: dict[int, Request] = {}
        self.is_closing = False
        self._to_cancel: set[int] = set()
        self._to_destroy: dict[int, tuple[Request, bool]] = {}

    def begin_pass(self) -> None:
        """Take in what was submitted, and destroy what had to wait for a token in flight."""
        self.active += self.incoming
        self.incoming.clear()
        for request, forget in list(self._to_destroy.values()):
            self.destroy(request, forget=forget)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def advance(self, launched: Launched) -> None:
        """The states behind a forward: positions, what generates now, and tokens that the host is yet to be told."""
        for request in launched.batch.context:
            is_last = request.is_last_context_chunk
            request.context_current_position += request.context_chunk_size
            if is_last:
                request.state = RequestState.GENERATION_IN_PROGRESS
        for sample in launched.samples:
            request = sample.request
            if request.is_finished:
                continue  # it stopped while this pass was already under way
            request.token_in_flight = sample.token
            if len(request.output_tokens) + 1 >= request.max_new_tokens:
                request.state = RequestState.GENERATION_TO_COMPLETE

    def commit_context(self, batch: Batch) -> None:
        """What was prefilled is final."""
        for request in batch.context:
            self._cache.history_moved(request, request.context_current_position)

    def take_tokens(self, launched: Launched) -> None:
        """The host learns the tokens of a pass; those of requests that have ended meanwhile are dropped."""
        for sample in launched.samples:
            request = sample.request
            if request.is_finished or request.token_in_flight is None:
                continue
            request.append_sample(sample.token, sample.logits)
            if request.is_done:
                request.state = RequestState.GENERATION_COMPLETE

    def commit_generation(self, batch: Batch) -> None:
        """All but the last token of what goes on generating is final."""
        for request in batch.generation:
            if request.state in (RequestState.GENERATION_IN_PROGRESS, RequestState.GENERATION_TO_COMPLETE):
                self._cache.history_moved(request, request.num_tokens - 1)

    # -- the end ------------------------------------------------------------------------------------------------------

    def announce(self, batch: Batch) -> None:
        """``request_finished`` for every request of a batch that reads as finished.

        In the overlap loop that is the batch before, where a request may have been announced, cancelled or freed already: V2
        announces it (again) with empty lists, or with its pages while they are being saved; V1 lets it be once it was freed.
        """
        if self.manager is None:
            return
        for request in batch:
            if not request.is_finished:
                continue
            try:
                flat, by_group = self._cache.page_indices(request)
            except KeyError:
                _log.warning(
                    "Unable to get cache blocks for request %d. Skipping asynchronous saving.", request.request_id
                )
                continue
            if self.manager.request_finished(request, flat, by_group):
                self.saving[request.request_id] = request

    def cancel(self, request: Request) -> None:
        """Let a request end as soon as the loop looks; one that no pass has seen yet ends here."""
        if request in self.incoming:
            self.incoming.remove(request)
            request.is_cancelled = True
            request.state = RequestState.GENERATION_COMPLETE
        elif request in self.active:
            self._to_cancel.add(request.request_id)

    def is_to_be_cancelled(self, request: Request) -> bool:
        """It was cancelled, and the loop has not ended it yet."""
        return request.request_id in self._to_cancel

    def handle_cancelled(self) -> None:
        """End the cancelled requests; the connector isn't told, and one whose load is under way is no exception."""
        for request in [request for request in self.active if self.is_to_be_cancelled(request)]:
            if self._cancel_waits_for_transfers and self.manager and self.manager.has_pending_transfers(request):
                continue
            self._to_cancel.discard(request.request_id)
            if request.is_finished:  # of itself, in this very pass
                continue
            written = request.written_tokens
            request.is_cancelled = True
            self._end(request, written)

    def respond(self) -> None:
        """Finished requests leave; their pages too, unless they are being saved."""
        for request in [request for request in self.active if request.is_finished]:
            self.active.remove(request)
            if request.request_id not in self.saving:
                self.free(request)

    def fail(self, error: Exception) -> None:
        """End every active request; failed requests are not announced to the connector."""
        for request in list(self.active):
            request.error = error
            self._end(request, 0)

    def poll(self) -> None:
        """``get_finished``; requests whose save is done give their pages back."""
        if self.manager is None:
            return
        for request in self.manager.get_finished():
            self.saving.pop(request.request_id, None)
            self.free(request)

    def free(self, request: Request, written: int | None = None, *, forget: bool = False) -> None:
        """Give a request's pages back, if it has any; on V2 the connector's reports of it begin anew."""
        self._cache.free_resources(
            request, request.written_tokens if written is None else written, self.manager, forget
        )
        self._left(request)

    def _end(self, request: Request, written: int) -> None:
        request.state = RequestState.GENERATION_COMPLETE
        request.token_in_flight = None
        self.active.remove(request)
        self._to_destroy.pop(request.request_id, None)
        self.free(request, written)

    # -- and anew -----------------------------------------------------------------------------------------------------

    def destroy(self, request: Request, *, forget: bool = False) -> bool:
        """Take a running request's pages away and let it begin anew; False where its token in flight is waited for.

        Source: contract-v2.md section 1.4, "cache destroyed and replayed".
        """
        request.awaits_replay = request.token_in_flight is not None
        if request.awaits_replay:
            self._to_destroy[request.request_id] = (request, forget)
            return False
        self._to_destroy.pop(request.request_id, None)
        if request in self.active and not request.is_finished:
            self.free(request, forget=forget)
            request.reset_for_recompute()
            if self._tells_of_resets and self.manager is not None:
                self.manager.request_reset(request)
        return True

    # -- what there is to wait for --------------------------------------------------------------------------------------

    @property
    def have_work(self) -> bool:
        """Something to run, to wait for, or to be told."""
        active = any(not request.is_suspended or request.request_id in self._to_destroy for request in self.active)
        return bool(self.incoming or self.saving or active or self._have_transfers)

    @property
    def wait_for_transfers(self) -> bool:
        """A transfer, or a token in flight, may make room or let a request run."""
        return bool(self.saving or self._to_destroy or self._have_transfers)

    @property
    def _have_transfers(self) -> bool:
        return self.manager is not None and bool(self.manager.get_pending_transfer_requests())

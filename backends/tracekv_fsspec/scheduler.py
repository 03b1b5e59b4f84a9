"""The leader's half: looks prompts up, promises what is verified in memory, plans loads and saves."""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import tracekv
from tracekv.contract import KvCacheConnectorScheduler
from tracekv.contract.enqueue import subscribe_tokens, unsubscribe_tokens
from tracekv.contract.reading import honoured_tokens, prompt_length
from tracekv.journal.vocabulary import MissReason
from tracekv.settings import SettingsError, load, load_section
from tracekv_fsspec import modes, offers, seats
from tracekv_fsspec.collected import WhenCollected
from tracekv_fsspec.enqueued import EnqueueHints
from tracekv_fsspec.keys import Deployment
from tracekv_fsspec.node import runtime_of
from tracekv_fsspec.plan import StepPlan
from tracekv_fsspec.planning import Planner
from tracekv_fsspec.requests import Request, Requests
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.stager import Stager
from tracekv_fsspec.store import Deadlines, Store, check_usable, open_store

_log = logging.getLogger("tracekv.fsspec")


class Scheduler(KvCacheConnectorScheduler):
    """The scheduler half of the persistent connector. Called on the executor's thread.

    It opens and tries the store when it is constructed, and offers nothing before :meth:`wait_for_initialization`. Dropped without
    :meth:`shutdown`, it is ended as that would have done it, in the background, once it is garbage.

    Args:
        llm_args: The engine's arguments; what pairs it with the worker of its process (see ``seats``).

    Raises:
        SettingsError: ``TRACEKV_FSSPEC__MODEL_ID`` is missing, or a setting is wrong.
        StoreUnusable: The store can't be reached, written or read.
        UnknownRuntime: The rank can't be told.
    """

    #: See ``node.runtime_of``.
    supports_attention_dp = True

    def __init__(self, llm_args: Any = None) -> None:
        super().__init__(llm_args)
        self._settings = load_section("fsspec", Settings)
        if not self._settings.model_id:
            raise SettingsError(
                "tracekv: TRACEKV_FSSPEC__MODEL_ID is not set. Name the weights that make the KV (model and revision, or a "
                "digest): blocks of other weights would be served as this model's, so there is no default."
            )
        runtime_of(llm_args)  # refused before anything is opened
        self._store: Store = open_configured(self._settings)
        check_usable(self._store)
        self._engine: offers.Engine | None = None
        self._planner: Planner | None = None
        self._requests = Requests(self._release)
        self._hints: EnqueueHints | None = None
        self._collected: WhenCollected | None = None
        self._step = 0
        self._has_said_error = False

    def wait_for_initialization(self) -> None:
        """Take what the ranks agreed on from the worker of this process, and read what the store holds for it.

        Raises:
            RuntimeError: No worker of this process has registered its caches.
        """
        seat = seats.take_seat(self._llm_args)
        node = seat.node if seat else None
        if seat is None or node is None:
            raise RuntimeError(
                "tracekv: no worker of this process has registered its KV caches, so tracekv_fsspec can't know their layout. "
                "The runtime has to construct tracekv_fsspec's Worker beside its Scheduler and register the caches first."
            )
        deployment = Deployment(
            model_id=self._settings.model_id or "",
            dtype=node.layout.dtype,
            tokens_per_block=node.layout.tokens_per_block,
            layout=node.fingerprint,
            world=node.world,
            kv_scales=self._settings.kv_scales,
        )
        stager = Stager(self._settings, self._store, deployment, node.page_bytes, node=node)
        self._engine = offers.Engine(self._settings, stager, node.layout, tuple(node.page_bytes))
        self._planner = Planner(self._engine, self._requests)
        modes.announce(self._settings)
        self._listen(self._engine)
        seat.lead(stager)
        hints = self._hints
        self._collected = WhenCollected(self, lambda: _end(stager, hints))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Offer whole blocks that are verified in host memory, at most ``prompt - 1 - computed`` tokens.

        With ``TRACEKV_FSSPEC__OFFER=async`` those that are stored, too; then the request is parked while they are staged.

        Never raises: an internal error is an offer of nothing, said once.
        """
        try:
            return self._query(request, num_computed_tokens)
        except Exception:
            if not self._has_said_error:
                self._has_said_error = True
                _log.exception("tracekv: a lookup failed; the request is computed instead (said once)")
            self._report_unanswered(request, num_computed_tokens, MissReason.ERROR)
            return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Note what was honoured. The pages come with the first record."""
        self._after_alloc(request)

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: list[list[int]]) -> None:
        """As :meth:`update_state_after_alloc`."""
        self._after_alloc(request)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Plan the pass. What earlier passes' metadata named and nobody took up is given back."""
        self._step += 1
        if self._planner is None:
            return StepPlan(self._step, [], [])
        return self._planner.plan(self._step, scheduler_output)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Forget the request. Its pages aren't kept: no copy outlives the pass that names them. May come twice."""
        self._ended(int(request.request_id))
        return False

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: list[list[int]]) -> bool:
        """As :meth:`request_finished`."""
        self._ended(int(request.request_id))
        return False

    def flush(self, seconds: float) -> bool:
        """Wait until every save that was issued is stored or dropped; False if that took longer than ``seconds``."""
        return self._engine.stager.flush(seconds) if self._engine else True

    def shutdown(self) -> None:
        """Store what is left, for a bounded time, and end every thread. May be called again; also runs at exit."""
        if self._collected is not None:
            self._collected.is_done()
        if self._engine is not None:
            _end(self._engine.stager, self._hints)
        else:
            self._store.close()

    def _query(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        if self._engine is None or self._planner is None:
            self._report_unanswered(request, computed_tokens, MissReason.NOT_READY)
            return 0, False
        before = self._requests.get(int(request.request_id))
        if before is not None and before.offer is not None and before.offer.parked is not None:
            self._requests.forget(before.request_id)  # asked again without having been parked
        books = self._requests.add(offers.query(self._engine, request, computed_tokens))
        offer = books.offer
        if offer is None:
            return 0, False
        self._planner.offered(books)
        return offer.tokens, offer.parked is not None

    def _listen(self, engine: offers.Engine) -> None:
        """Take hints: from outside, and from the engine's enqueue where that is wanted."""
        if engine.settings.role == "producer":
            return
        engine.stager.prefetcher.has_partial_blocks = engine.has_partial_blocks
        own = load()
        engine.stager.listen(Path(own.journal_dir) if own.journal_dir else None)
        if own.enqueue_hook:
            self._hints = EnqueueHints(engine)
            subscribe_tokens(self._hints)

    def _release(self, request: Request) -> None:
        if self._planner is not None:
            self._planner.release(request)

    def _ended(self, request_id: int) -> None:
        books = self._requests.get(request_id)
        self._requests.forget(request_id)
        if self._engine is not None:
            self._engine.stager.writer.request_ended(request_id)
            chain = books.chain if books else None
            may_load = self._settings.read_ahead and self._settings.role != "producer"
            self._engine.stager.prefetcher.ended(request_id, chain.keys if chain else (), read_ahead=may_load)

    def _after_alloc(self, request: Any) -> None:
        # A request that was never queried (a dummy, one whose KV another engine sends) is none of ours: it isn't saved.
        books = self._requests.get(int(request.request_id))
        if books is not None and books.offer is not None:
            books.offer.is_allocated = True
            books.offer.honoured_tokens = honoured_tokens(request)

    def _report_unanswered(self, request: Any, computed_tokens: int, reason: MissReason) -> None:
        tracekv.lookup(
            int(getattr(request, "request_id", -1)),
            prompt_tokens=prompt_length(request) or 0,
            computed_tokens=computed_tokens,
            stored_tokens=0,
            staged_tokens=0,
            offered_tokens=0,
            started_ns=perf_counter_ns(),
            reason=reason,
        )


def _end(stager: Stager, hints: EnqueueHints | None) -> None:
    if hints is not None:
        unsubscribe_tokens(hints)
    stager.close()


def open_configured(settings: Settings) -> Store:
    """The store that the settings name.

    Raises:
        StoreUnusable: As :func:`tracekv_fsspec.store.open_store`.
    """
    deadlines = Deadlines(settings.read_deadline_ms / 1000, settings.write_deadline_ms / 1000)
    return open_store(settings.url, settings.storage_options, s3_client=settings.s3_client, deadlines=deadlines)

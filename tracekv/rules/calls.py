"""Which callback comes when, where, and what becomes of it when it raises."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.journal.vocabulary import Callback
from tracekv.rules.events import Alloc, Failed, Register, Scheduled, Start
from tracekv.rules.model import By, Hit, Rule, Severity

_FAILS_REQUESTS = {
    Callback.WAIT_FOR_LAYER_LOAD,
    Callback.SAVE_KV_LAYER,
    Callback.WAIT_FOR_SAVE,
    Callback.FORWARD_PASS_CALLABLE,
}
_FAILS_START = {
    Callback.SCHEDULER_INIT,
    Callback.WORKER_INIT,
    Callback.REGISTER_FORWARD_PASS_CALLABLE,
    Callback.REGISTER_KV_CACHES,
    Callback.REGISTER_KV_CACHE_LAYOUT,
    Callback.WAIT_FOR_INITIALIZATION,
}


class AllocWithoutQuery(Rule):
    """Pages are told after a query, unless the request is of a kind that is never asked about.

    Contract: ``update_state_after_alloc`` follows ``get_num_new_matched_tokens`` (contract.md 10 S6); dummies, generation-only
        requests and drafts are told without being asked about (contract-v2.md 1.2).
    Runtime: goes on.
    Fix: ignore requests that you weren't asked about.
    """

    id = "S6"
    by = By.RUNTIME

    def on_alloc(self, event: Alloc) -> Iterator[Hit]:
        """Pages were told."""
        if event.request is None and event.run.is_known and event.record.is_never_asked is False:
            yield self.finding(event.record, pages=sum(map(len, event.record.pages)))


class AllocOfUnknownKind(Rule):
    """Pages are told after a query, where the request doesn't say what kind it is of.

    Contract: as S6; whether it is a dummy isn't known, since its object has no ``is_dummy_request``.
    Runtime: goes on.
    Fix: ignore requests that you weren't asked about.
    """

    id = "S6c"
    severity = Severity.SUSPECT
    by = By.RUNTIME

    def on_alloc(self, event: Alloc) -> Iterator[Hit]:
        """Pages were told."""
        if event.request is None and event.run.is_known and event.record.is_never_asked is None:
            yield self.finding(event.record, pages=sum(map(len, event.record.pages)))


class FlatPagesOfSeveralGroups(Rule):
    """With several layer groups the flat list is empty.

    Contract: a page slot counts within its layer group, so one list can't name pages of two (contract.md 10 S6).
    Runtime: a scheduler without both per-layer-group forms is refused at bring-up.
    Fix: implement ``update_state_after_alloc_by_layer_group`` and ``request_finished_by_layer_group``.
    """

    id = "S6b"
    by = By.RUNTIME

    def on_alloc(self, event: Alloc) -> Iterator[Hit]:
        """Pages were told."""
        record = event.record
        if len(event.run.groups) > 1 and record.callback == Callback.UPDATE_STATE_AFTER_ALLOC and any(record.pages):
            yield self.finding(record, groups=len(event.run.groups), pages=len(record.pages[0]))


class SchedulerOffLeader(Rule):
    """The scheduler is called on the leader only.

    Contract: rank 0 answers, the others hear it in a broadcast (contract.md 1.2, 10 S15). Under attention data parallelism
        each rank leads a run of its own.
    Runtime: two schedulers plan for the same pages.
    Fix: construct the scheduler on rank 0 only; don't call it from the worker.
    """

    id = "S15"
    by = By.RUNTIME

    def on_scheduled(self, event: Scheduled) -> Iterator[Hit]:
        """A scheduler callback of another rank."""
        yield self.finding(event.record, rank=event.source.rank)


class RegisteredTwice(Rule):
    """A worker's caches are registered once.

    Contract: one call of one of the two registrations, at bring-up (contract.md 10 W1).
    Runtime: none known does it; addresses of the first registration are stale.
    Fix: raise in the second call.
    """

    id = "W1"
    by = By.RUNTIME

    def on_register(self, event: Register) -> Iterator[Hit]:
        """A registration."""
        if event.before is not None:
            yield self.finding(event.record, event.before)


class LoadedUnregistered(Rule):
    """Nothing is loaded before the caches are registered.

    Contract: registration is part of bring-up, before the first request (contract.md 4.1, 10 W1).
    Runtime: none known does it.
    Fix: start nothing in the constructor; wait for ``register_kv_caches`` or ``register_kv_cache_layout``.
    """

    id = "W1b"
    by = By.RUNTIME

    def on_start(self, event: Start) -> Iterator[Hit]:
        """``start_load_kv``."""
        if event.source.register is None and event.source.saw_worker:
            yield self.finding(event.record)


class LoadedUnbound(Rule):
    """Each ``start_load_kv`` has metadata of its own.

    Contract: metadata is bound, then loads start, in the same pass; nobody clears what was bound (contract.md 1.1, 10 W2).
    Runtime: the worker sees the metadata of an earlier pass and loads into pages that may be another request's by now.
    Fix: number the metadata and act on a number once.
    """

    id = "W2c"
    by = By.RUNTIME
    follows = frozenset({"W10", "W1b"})

    def on_start(self, event: Start) -> Iterator[Hit]:
        """``start_load_kv``."""
        if event.is_bound is False:
            yield self.finding(event.record, event.source.start)


class Raised(Rule):
    """No callback raises.

    Contract: there is no way to tell the runtime of a failed load (contract.md 1.5, 10 W10).
    Runtime: in a layer hook, ``wait_for_save`` or the forward callable: every active request fails, the loop goes on. At
        bring-up: the start fails. Anywhere else: the event loop dies and the server with it, and with several ranks the
        others wait for the hang detector.
    Fix: catch it, offer nothing next time, and never let a promised block be missing: verify bytes before the offer.
    """

    id = "W10"
    follows = frozenset({"S1", "S1b", "S2", "S6b", "L1", "S8", "S8b", "W1b", "W2c", "N4"})

    def on_failed(self, event: Failed) -> Iterator[Hit]:
        """A callback raised."""
        record = event.record
        if event.built is None:
            if record.callback in _FAILS_REQUESTS:
                effect = "every active request fails"
            elif record.callback in _FAILS_START:
                effect = "the start fails"
            else:
                effect = "the event loop dies"
            yield self.finding(record, error=record.error, effect=effect)

"""Whether everything that was promised was loaded in time, and everything that could be saved was."""

from __future__ import annotations

from collections.abc import Iterator

from tracekv.journal.vocabulary import Direction, Source
from tracekv.rules.events import Loaded, Pass, Settled
from tracekv.rules.model import By, Hit, Rule, Severity
from tracekv.rules.promise import loaded_ranks

_MOST_NAMED = 16
_LOAD = Direction.LOAD


class LaterChunksUnsaved(Rule):
    """Blocks of later chunks are saved as those of the first are.

    Contract: the first chunk of a prompt is in ``new_requests``, the others are in ``cached_requests`` (contract.md 1.7, 10 S9).
    Runtime: none; a long prompt is cached up to its first chunk only.
    Fix: read both lists; append the deltas of ``cached_requests`` to what is known of the request.
    """

    id = "S9"
    severity = Severity.SUSPECT
    follows = frozenset({"S8", "S8b", "L1", "W10", "W9", "S11b"})

    def on_left(self, event: Settled) -> Iterator[Hit]:
        """A request has gone, and its saves are told."""
        run, request = event.run, event.request
        if len(request.chunks) < 2 or not run.block or not request.is_whole or request.request_id in run.dropped:
            return
        first_end = request.chunks[0][2] // run.block
        last_end = min(request.chunks[-1][2], request.prompt or 0) // run.block
        if first_end >= last_end or request.finish is None:
            return
        saved = 0
        for (_, group), lists in request.saved.items():
            slots = request.pages[group] if group < len(request.pages) else []
            pages = set[int]().union(*lists)
            if not pages.isdisjoint(slots[first_end:last_end]):
                return
            saved = max(saved, *(ordinal + 1 for ordinal, page in enumerate(slots[:first_end]) if page in pages), 0)
        if saved:
            yield self.finding(
                request.finish,
                request.first_build,
                saved_blocks=saved,
                first_chunk_blocks=first_end,
                prompt_blocks=last_end,
                chunks=len(request.chunks),
            )


class PromisedNotLoaded(Rule):
    """Every block that was honoured is loaded, in each layer group.

    Contract: honoured tokens count as computed; there is no way back (contract.md 1.5, 10 W2).
    Runtime: none; the model attends to whatever the pages held before.
    Fix: load blocks ``[computed, computed + honoured)`` of every group but for those without a page; take the honoured number,
        not the offered one, and round the offer to whole blocks.
    """

    id = "W2"
    follows = frozenset({"S1b", "S2", "S3", "S3b", "S8", "S8b", "S10b", "L1", "L1b", "W10", "N4", "S7d"})

    def on_loaded(self, event: Loaded) -> Iterator[Hit]:
        """A request's loads are told."""
        request = event.request
        wanted = event.promised
        if wanted is None:
            return
        for rank in loaded_ranks(request):
            missing: dict[int, int] = {}
            for group, pages in wanted.items():
                left = pages.difference(*request.loaded.get((rank, group), ()))
                if left:
                    missing[group] = len(left)
            if missing and request.alloc is not None:
                yield self.finding(
                    request.alloc, request.query, request.first_build, *[each for _, each in request.transfers], rank=rank,
                    missing_pages_by_group=missing, honoured=request.honoured,
                )  # fmt: skip
                return


class LoadedTooLate(Rule):
    """What was honoured is loaded before the first layer needs it.

    Contract: work on ``start_load_kv``'s stream is ordered before the forward; a layer's own hook is the last chance
        (contract.md 4.3, 10 W2).
    Runtime: none; the pass has computed on what the pages held before.
    Fix: issue loads in ``start_load_kv``; layer by layer, wait in ``wait_for_layer_load`` of the first layer of each group.
    """

    id = "W2b"
    follows = frozenset({"W10"})

    def on_loaded(self, event: Loaded) -> Iterator[Hit]:
        """A request's loads are told."""
        run, request = event.run, event.request
        if event.promised is None or request.is_async or request.first_build is None:
            return
        step = request.first_build.step
        for source in run.sources:
            end = source.ended.get(step)
            if end is None:
                continue
            for teller, each in request.transfers:
                # Another rank's layers run at other times.
                if teller is not source or each.direction is not _LOAD or each.step != step:
                    continue
                group = run.groups.get(each.layer_group)
                # Part of the pages' bytes: a layer-wise load, each layer in its own hook.
                needed_ns = end.record.started_ns
                if (
                    group is not None
                    and each.source is Source.REPORTED
                    and each.nbytes >= len(each.pages) * group.bytes_per_page
                ):
                    needed_ns = end.needed_by(group)
                if each.started_ns > needed_ns:
                    yield self.finding(
                        each, request.first_build, end.record, late_ns=each.started_ns - needed_ns, rank=source.rank
                    )
                    return


class HooksMissing(Rule):
    """Per-layer hooks come in prefill passes, if they come at all.

    Contract: hooks run in eager forwards only (contract.md 4.4, 10 W7).
    Runtime: a pass that replays a CUDA graph runs none.
    Fix: don't load or save in per-layer hooks alone; or turn the graphs off (rule L6 of ``tracekv doctor``).
    """

    id = "W7"
    severity = Severity.SUSPECT
    by = By.RUNTIME
    once = True
    follows = frozenset({"W10"})

    def on_pass(self, event: Pass) -> Iterator[Hit]:
        """A forward has ended."""
        if event.hooks is None and event.run.hooked_prefills and not event.source.is_blind:
            yield self.finding(event.record, prefilled_tokens=event.prefilled)


class HooksOfSomeLayers(Rule):
    """In a pass with hooks every layer has them.

    Contract: one pair per decoder layer, all layers in eager passes, none in a replayed graph (contract.md 10 W7).
    Runtime: none; a layer-wise connector lacks some layers.
    Fix: count the layers that you saved before you call a block stored.
    """

    id = "W7b"
    severity = Severity.SUSPECT
    by = By.RUNTIME
    once = True
    follows = frozenset({"W10"})

    def on_pass(self, event: Pass) -> Iterator[Hit]:
        """A forward has ended."""
        if event.hooks is None or not event.run.layers:
            return
        for name, starts in (("wait_for_layer_load", event.waits), ("save_kv_layer", event.saves)):
            if not any(starts):  # a duck-typed worker that lacks this one
                continue
            called = {layer for layer, start in enumerate(starts) if start}
            missing = sorted(event.run.layers - called)
            strange = sorted(called - event.run.layers)
            if missing or strange:
                yield self.finding(
                    event.record, event.hooks, hook=name, missing=missing[:_MOST_NAMED], unknown=strange[:_MOST_NAMED]
                )
                return


class SavedBeforeWait(Rule):
    """A layer is waited for before it is saved.

    Contract: ``wait_for_layer_load`` before the layer, ``save_kv_layer`` after it (contract.md 10 W7).
    Runtime: it broke this itself.
    Fix: save in ``wait_for_save`` instead.
    """

    id = "W7c"
    by = By.RUNTIME
    once = True
    follows = frozenset({"W7b"})

    def on_pass(self, event: Pass) -> Iterator[Hit]:
        """A forward has ended."""
        early = (n for n, (wait, save) in enumerate(zip(event.waits, event.saves, strict=False)) if 0 < save < wait)
        layer = next(early, None)
        if layer is not None:
            yield self.finding(event.record, event.hooks, layer=layer)

"""What an explanation comes down to, in one sentence in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from tracekv.journal.vocabulary import Direction, MissReason
from tracekv.views.amounts import duration
from tracekv.views.explain import Broken, Explanation

#: Why a lookup gave less than the prompt allows, and what to do about it.
MISSES: dict[MissReason, tuple[str, str]] = {
    MissReason.NOT_READY: (
        "the connector wasn't ready when it was asked",
        "the first requests after a start find it so; let the engine wait in wait_for_initialization",
    ),
    MissReason.PROMPT_TOO_SHORT: (
        "the prompt has no whole block that may come from a store",
        "the last token is always computed, and blocks are stored whole: a smaller tokens_per_block reuses shorter prompts",
    ),
    MissReason.ON_DEVICE: ("the device held all that could have been offered", "nothing: it came from the device's own cache"),
    MissReason.UNALIGNED: (
        "the device held part of a block, and the store holds whole ones",
        "with enable_partial_reuse: false the device's matches end at blocks; or let the connector take partial blocks",
    ),
    MissReason.NOT_STORED: ("the next block isn't in the store", "it is there once a request with this prefix was saved"),
    MissReason.LAYER_GROUP_MISSING: (
        "a layer group doesn't hold the next block",
        "a block counts when every layer group has it: see which one bounds it, and whether its saves are dropped",
    ),
    MissReason.RANK_MISSING: (
        "the store lacks a rank's shard of the next block",
        "every rank has to have saved it: look for a rank whose saves are dropped, or another tensor parallel size",
    ),
    MissReason.NOT_STAGED: (
        "the blocks were stored but not in memory when asked",
        "let the query wait (TRACEKV_FSSPEC__OFFER_WAIT_MS) or park the request (TRACEKV_FSSPEC__OFFER=async), or read ahead",
    ),
    MissReason.ARENA_FULL: ("there was no room in memory to stage the blocks", "give the host arena more memory"),
    MissReason.CORRUPT: (
        "what was stored failed its check, and wasn't used",
        "`tracekv store verify` names the damaged objects; they are written again when they are next saved",
    ),
    MissReason.STORE_DOWN: ("the store didn't answer", "see its errors in `tracekv doctor`; the engine computed instead"),
    MissReason.BYPASS_LORA: (
        "requests of this LoRA adapter are not stored",
        "map its id to a digest of its weights (TRACEKV_FSSPEC__LORA_DIGESTS)",
    ),
    MissReason.BYPASS_MULTIMODAL: (
        "the input has images or other items without digests", "give them digests: without, equal KV can't be told"
    ),
    MissReason.BYPASS_TOKENS: ("the connector couldn't read the request's tokens", "see the connector's log for the version it met"),
    MissReason.ROLE: ("this connector only saves", "that is its TRACEKV_FSSPEC__ROLE"),
    MissReason.ERROR: ("the lookup failed", "see the connector's log; the engine computed instead"),
}  # fmt: skip


def verdict(told: Explanation) -> str:
    """One sentence: a broken rule first, then what is wrong with the run, then how much came from the store and why not more."""
    broken = root_cause(told.broken)
    if broken is not None and broken.severity == "violation":
        return named(broken)
    said = _unfinished(told) or _failed(told) or _served(told)
    return said if broken is None else f"{said}; {named(broken)}"


def root_cause(broken: Sequence[Broken]) -> Broken | None:
    """What to look at first: what doesn't follow from something else, what is proved before what is a guess."""
    roots = [each for each in broken if each.caused_by is None] or list(broken)
    return min(roots, key=lambda each: (each.severity != "violation", each.about != "request"), default=None)


def kind(told: Explanation) -> str:
    """``broken``, ``unfinished``, ``failed``, ``hit``, ``partial`` or ``miss``: what a program wants of the verdict."""
    broken = root_cause(told.broken)
    if broken is not None and broken.severity == "violation":
        return "broken"
    if _unfinished(told):
        return "unfinished"
    if _failed(told):
        return "failed"
    served = served_tokens(told)
    if not served:
        return "miss"
    return "partial" if told.story.miss_reason not in (None, MissReason.ON_DEVICE) or _is_cut(told) else "hit"


def served_tokens(told: Explanation) -> int:
    """Prompt tokens that took the place of computing: what was honoured; where that isn't told what was loaded, or else offered."""
    story = told.story
    if story.honoured_tokens is not None:
        return story.honoured_tokens
    taken = (story.offered_tokens or 0) if story.allocated_pages else 0
    return told.tokens(Direction.LOAD) or taken


def plain(text: str) -> str:
    """A rule's text without the marks of a docstring."""
    return text.replace("``", "`")


def named(broken: Broken) -> str:
    """A broken rule in one sentence."""
    word = "broke" if broken.severity == "violation" else "suspected"
    title = plain(broken.what).rstrip(".")
    first = title.split(" ", 1)[0]
    title = title if first.isupper() and len(first) > 1 else title[:1].lower() + title[1:]
    numbers = f" ({broken.numbers})" if broken.numbers else ""
    where = f", in {broken.callback}" if broken.callback else ""
    return f"{word} {broken.rule}: {title}{numbers} - by the {broken.by}{where}"


def _unfinished(told: Explanation) -> str:
    if told.inside is not None and not told.is_running:
        return f"cut short: its engine ended inside {told.inside}"
    story = told.story
    if story.held_since_ns is not None and told.holding:
        waits = f"{story.held_pages:,} pages are held for its save since {duration(max(0, told.now_ns - story.held_since_ns))}"
        if set(told.holding) != {each.rank for each in told.ranks}:
            waits += f": rank {', '.join(map(str, told.holding))} hasn't given them back"
    elif story.finished_ns is not None:
        return ""
    elif story.first_query_ns is None:
        return "" if story.enqueued_ns is None or not told.is_running else "in flight: it waits for its first query"
    elif story.is_async and story.offered_tokens and story.loaded_at_ns is None and not story.steps:
        waits = f"it is parked for its load since {duration(max(0, told.now_ns - story.last_ns))}"
    elif not told.is_running:
        return ""
    else:
        waits = (
            f"it was in {story.steps} pass{'es' if story.steps > 1 else ''}" if story.steps else "it waits for a pass"
        )
    if told.is_running:
        return f"in flight: {waits}" + (f", inside {told.inside}" if told.inside else "")
    return f"cut short: when the records ended, {waits}"


def _failed(told: Explanation) -> str:
    errors = [
        f"{error}{'' if each.rank is None else f' (rank {each.rank})'}"
        for each in told.ranks
        for error in each.story.errors
    ]
    return f"failed: {errors[0]}" + (f", and {len(errors) - 1} more" if len(errors) > 1 else "") if errors else ""


def _served(told: Explanation) -> str:
    story, served = told.story, served_tokens(told)
    prompt = story.prompt_tokens
    if not served:
        return _missed(told)
    of = f" of {prompt:,}" if prompt is not None else ""
    if story.honoured_tokens is None and not told.tokens(Direction.LOAD):
        return f"hit: {served:,}{of} prompt tokens were offered; how many the runtime took isn't told"
    took = told.parts["lookup"] + told.load_ns
    hidden = (
        f", {duration(told.load_hidden_ns)} of them hidden behind computing" if told.load_hidden_ns * 20 > took else ""
    )
    came = f"{served:,}{of} prompt tokens came from the store in {duration(took)}{hidden}"
    if _is_cut(told):
        return f"partial hit: {came}; the runtime took {served:,} of {story.offered_tokens:,} offered tokens"
    if story.miss_reason is not None and story.miss_reason is not MissReason.ON_DEVICE:
        return f"partial hit: {came}; after them, {_reason(told, story.miss_reason)}"
    return f"hit: {came}"


def _is_cut(told: Explanation) -> bool:
    story = told.story
    return story.honoured_tokens is not None and story.honoured_tokens < (story.offered_tokens or 0)


def _missed(told: Explanation) -> str:
    story = told.story
    if story.queries == 0:
        return "not asked about: no query of it is recorded" + (
            " (its first records were overwritten)" if told.records_lost else ""
        )
    if story.offered_tokens:
        why = (
            "no pages are recorded to have been given to it"
            if story.honoured_tokens is None
            else "the runtime took none of them"
        )
        return f"not taken: {story.offered_tokens:,} tokens were offered, and {why}"
    if story.miss_reason is None:
        computed = f"; the device held {story.computed_tokens:,} of its tokens" if story.computed_tokens else ""
        return f"miss: nothing was offered, and the connector doesn't say why (tracekv.lookup tells it){computed}"
    return f"miss: {story.miss_reason.value} - {_reason(told, story.miss_reason)}; {MISSES[story.miss_reason][1]}"


def _reason(told: Explanation, reason: MissReason) -> str:
    bound = told.story.bounding_layer_group
    if bound is None:
        return MISSES[reason][0]
    window = told.windows.get(bound, 0)
    return f"{MISSES[reason][0]} (layer group {bound}{f' of window {window:,}' if window else ''} bounds it)"

"""What the root span of a request tells: its whole story in numbers and words."""

from __future__ import annotations

from tracekv.journal.vocabulary import Direction
from tracekv.views import ids, names
from tracekv.views._context import Context, both_ways
from tracekv.views.model import Attributes
from tracekv.views.story import Story


def root_attributes(context: Context, story: Story, part: int) -> Attributes:
    """The attributes of a ``request`` span; what nothing is known of is left out.

    Args:
        part: How many parts of the request's story have ended before.
    """
    loads, saves = (
        {
            group: (story.pages(way, group), story.nbytes(way, group))
            for group in story.layer_groups()
        }
        for way in (Direction.LOAD, Direction.SAVE)
    )  # fmt: skip
    attributes: Attributes = {
        names.REQUEST_ID: context.request_label(story.request_id),
        names.OUTCOME: story.outcome,
        names.QUERIES: story.queries,
        names.QUERY_NS: story.query_ns,
        names.WAITED_NS: story.waited_ns,
        names.LOADED_TOKENS: story.tokens(Direction.LOAD),
        names.SAVED_TOKENS: story.tokens(Direction.SAVE),
        names.SCHEDULED_TOKENS: story.scheduled_tokens,
        names.IS_ASYNC: story.is_async,
        names.KEEPS_PAGES: story.keeps_pages,
        **both_ways(context.facts, loads, saves),
    }
    loading = [moved for moved in story.moved if moved.direction is Direction.LOAD]
    if loading:
        attributes[names.QUEUED_NS] = sum(moved.queued_ns for moved in loading)
        attributes[names.READ_NS] = sum(moved.read_ns for moved in loading)
        attributes[names.VERIFY_NS] = sum(moved.verify_ns for moved in loading)
        attributes[names.COPY_NS] = sum(moved.copy_ns for moved in loading)
        attributes[names.STALL_NS] = sum(moved.stall_ns for moved in loading)
    enqueued = story.enqueued_ns
    if enqueued is not None and story.first_query_ns is not None:
        attributes[names.ENQUEUED_NS] = max(0, story.first_query_ns - enqueued)
    if story.rules:
        attributes[names.RULES_BROKEN] = list(story.rules)
    if story.client_id is not None:
        attributes[names.GEN_AI_REQUEST_ID] = context.request_label(story.client_id)
    told = {
        names.PROMPT_TOKENS: story.prompt_tokens,
        names.COMPUTED_TOKENS: story.computed_tokens,
        names.STORED_TOKENS: story.stored_tokens,
        names.STAGED_TOKENS: story.staged_tokens,
        names.OFFERED_TOKENS: story.offered_tokens,
        names.HONOURED_TOKENS: story.honoured_tokens,
        names.BOUNDING_GROUP: story.bounding_layer_group,
        names.MISS_REASON: None if story.miss_reason is None else story.miss_reason.value,
        names.LORA: story.lora_id,
        names.LOAD_TIERS: story.tiers(Direction.LOAD) or None,
        names.SAVE_TIERS: story.tiers(Direction.SAVE) or None,
        names.HELD_PAGES: story.held_pages or None,
        names.HELD_NS: story.held_ns,
        names.RANK: context.facts.rank,
        names.RUN: ids.run_label(context.facts.run_id) if context.facts.run_id else None,
        names.RECORDS_LOST: story.records_lost or None,
        names.REQUEST_PART: part or None,
    }
    attributes.update({name: value for name, value in told.items() if value is not None})
    return attributes

"""The facts of one request, beyond what its root span shows."""

from __future__ import annotations

import msgspec

from tests.views.sample_run import REQUEST, finished, queried, transferred
from tracekv.journal.vocabulary import Direction, Tier
from tracekv.views.story import Story


def story_of_moves(*moves: tuple[int, Tier, int, str | None]) -> Story:
    story = Story(REQUEST, 0, 0)
    for group, tier, tokens, error in moves:
        story.transferred(transferred(Direction.LOAD, group, [1, -1], 10, 5, 8, tier=tier, tokens=tokens, error=error))
    return story


def test_tokens_add_up_over_tiers_and_count_once_over_layer_groups() -> None:
    story = story_of_moves((0, Tier.HOST, 32, None), (0, Tier.OBJECT, 64, None), (1, Tier.HOST, 64, None))

    assert story.tokens(Direction.LOAD) == 96
    assert story.tokens(Direction.SAVE) == 0
    assert (story.nbytes(Direction.LOAD), story.nbytes(Direction.LOAD, 1)) == (30, 10)
    assert story.pages(Direction.LOAD) == 3


def test_a_failed_transfer_takes_time_and_moves_nothing() -> None:
    (moved,) = story_of_moves((0, Tier.HOST, 32, "OSError")).moved

    assert (moved.failures, moved.transfers, moved.nbytes, moved.tokens) == (1, 0, 0, 0)
    assert (moved.time_ns, moved.read_ns) == (3, 2)


def test_pages_are_held_from_request_finished_to_the_release() -> None:
    story = Story(REQUEST, 1000, 1000)
    story.queried(queried())
    story.finished(finished(keeps_pages=True))
    assert (story.held_pages, story.held_since_ns, story.held_ns) == (4, 2250, None)

    story.released(5250)
    assert story.held_ns == 3000


def test_two_stories_share_nothing() -> None:
    first, second = story_of_moves((0, Tier.HOST, 1, None)), Story(REQUEST, 0, 0)

    assert len(first.moved) == 1
    assert second.moved == []


def test_a_story_survives_json() -> None:
    story = story_of_moves((0, Tier.HOST, 32, None))

    assert msgspec.json.decode(msgspec.json.encode(story), type=Story) == story

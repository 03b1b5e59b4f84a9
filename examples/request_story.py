"""Print one request's story from a journal: ``python -m examples.request_story REQUEST [PATH...]``.

It is what ``tracekv explain`` does, by hand: the same views are a library. The process that wrote the journal need not be alive.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tracekv.agent.paths import journal_directory
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Direction
from tracekv.views.explain import Explanation, explain
from tracekv.views.runs import Run, runs_of
from tracekv.views.verdict import verdict


def lines_of(told: Explanation) -> Iterator[str]:
    """A request's story, as text."""
    story = told.story
    yield f"request {told.request} of run {told.run}: {verdict(told)}"
    yield f"  queried {story.prompt_tokens}, on the device {story.computed_tokens}, offered {story.offered_tokens}"
    yield f"  honoured {story.honoured_tokens}, loaded {told.tokens(Direction.LOAD)}, saved {told.tokens(Direction.SAVE)} tokens"
    for rank, moved in told.moved():
        yield (
            f"  {moved.direction.value} on rank {rank}: layer group {moved.layer_group}, {moved.pages} pages, "
            f"{moved.nbytes} bytes ({moved.source.value}, {moved.tier.value})"
        )
    for name, nanoseconds in told.parts.items():
        if nanoseconds:
            yield f"  {name:8} {nanoseconds / 1e6:10.3f} ms  {100 * nanoseconds / told.whole_ns:5.1f} %"
    yield f"  trace {told.trace_id}"


def stories(request_id: int, runs: list[Run]) -> Iterator[Explanation]:
    """The request in each run that has one of this number."""
    for run in runs:
        told = explain(run, request_id)
        if told is not None:
            yield told


def main() -> None:
    """Print the story, once for each run that has such a request."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.request_story")
    parser.add_argument("request", type=int)
    parser.add_argument("paths", nargs="*", type=Path, help="journals, archives, or folders of them")
    options = parser.parse_args()
    with scan(options.paths or [journal_directory()]) as found:
        told = list(stories(options.request, runs_of(found.processes)))
        for each in told:
            print("\n".join(lines_of(each)))
    if not told:
        sys.exit(f"no run here has a request {options.request}")


if __name__ == "__main__":
    main()

"""Transfers that are not told, told twice, or told too late; pages that are touched after they were given back."""

from __future__ import annotations

import threading
from time import sleep
from typing import Any

from tracekv.journal.vocabulary import Callback, Direction
from tracekv.testing.corpus.correct import (
    Follower,
    KeepingFollower,
    KeepingLeader,
    Leader,
    Move,
)
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import fault
from tracekv.testing.corpus.tape import Tape

# -- pairing ------------------------------------------------------------------------------------------------------------


@fault("W3")
def returns_an_id_that_it_was_never_given(stage: Stage) -> None:
    """get_finished names a request that nobody announced: the manager's KeyError ends the loop."""

    class Inventing(Follower):
        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            return [4711], []

    stage.twice(worker=Inventing)


@fault("W3b", "driven")
def returns_an_id_twice(stage: Stage) -> None:
    """A saved request's id comes again in the next poll."""
    _, worker = (cls(None) for cls in stage.traced(Leader, _Remembering))
    worker.get_finished([1], [])
    worker.get_finished([], [])


class _Remembering(Follower):
    """Names everything that it ever was given."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self.given: list[int] = []

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
        self.given += finished_gen_req_ids
        return list(self.given), []


@fault("W3b")
def returns_an_id_twice_in_a_run(stage: Stage) -> None:
    """The same in a run: the second time ends the loop."""

    class Twice(KeepingFollower, _Remembering):
        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            KeepingFollower.get_finished(self, finished_gen_req_ids, started_loading_req_ids)
            return _Remembering.get_finished(self, finished_gen_req_ids, started_loading_req_ids)

    engine = stage.engine(KeepingLeader, Twice)
    stage.serve(engine, stage.prompt(1), stage.prompt(2))
    stage.serve(engine, stage.prompt(3))


@fault("W3c")
def swaps_the_two_lists(stage: Stage) -> None:
    """get_finished answers (loading, saving)."""

    class Swapping(KeepingFollower):
        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            saved, loaded = super().get_finished(finished_gen_req_ids, started_loading_req_ids)
            return loaded, saved

    stage.twice(KeepingLeader, Swapping)


@fault("W3d")
def answers_a_poll_with_sets(stage: Stage) -> None:
    """get_finished returns sets. The runtime takes them; its type says lists."""

    class Sets(KeepingFollower):
        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            saved, loaded = super().get_finished(finished_gen_req_ids, started_loading_req_ids)
            return set(saved), set(loaded)

    stage.twice(KeepingLeader, Sets)


@fault("W3e")
def answers_a_poll_with_nothing(stage: Stage) -> None:
    """get_finished returns None."""

    class Silent(Follower):
        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            return None

    stage.twice(worker=Silent)


@fault("S13")
def answers_no_and_returns_the_id(stage: Stage) -> None:
    """request_finished answers False, and get_finished names the request all the same."""
    done: list[int] = []

    class Telling(Leader):
        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
            done.append(request.request_id)
            return super().request_finished(request, cache_block_ids)

    class Returning(Follower):
        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            return [done.pop() for _ in list(done)], []

    stage.twice(Telling, Returning)


@fault("S13b")
def keeps_pages_for_nothing(stage: Stage) -> None:
    """request_finished answers True, and nothing is ever saved from the pages."""

    class Keeping(Leader):
        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
            super().request_finished(request, cache_block_ids)
            return True

    stage.twice(Keeping, KeepingFollower)


@fault("S13c", "records")
def keeps_a_request_that_is_announced_again(stage: Stage) -> None:
    """The overlap loop announces a request twice; True, with no pages left, promises a second return."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.finish(1, pages=[[1, 2, 3, 4]])
    tape.finish(1, keeps=True)
    tape.polled(saving=[1], saved=[1])
    stage.play(tape)


@fault("S13d")
def answers_the_end_with_none(stage: Stage) -> None:
    """request_finished returns nothing: None counts as False, so a save that still runs loses its pages."""

    class Nothing(Leader):
        def request_finished(self, request: Any, cache_block_ids: list[int]) -> Any:
            super().request_finished(request, cache_block_ids)

    stage.twice(Nothing)


@fault("S13e", "records")
def never_gives_the_pages_back(stage: Stage) -> None:
    """A kept request's id is never returned: its pages are pinned for ever, and nothing says so."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.polled(saving=[1])
    for _ in range(10):
        tape.idle(ms=10_000)
    stage.play(tape)


@fault("S14", "records")
def is_never_told_the_end(stage: Stage) -> None:
    """A cancelled request is not announced: it just stops appearing."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    for _ in range(8):
        tape.after(60_000)
        tape.decode(2, 5000)
    stage.play(tape)


@fault("W6", "records")
def polls_where_nobody_calls(stage: Stage) -> None:
    """The load is driven from build_connector_meta, which isn't called while only parked requests exist."""
    tape = Tape()
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    tape.forward()
    tape.polled(loading=[1])
    for _ in range(120):
        tape.idle(ms=1000)
    stage.play(tape)


@fault("W6b", "records")
def parks_for_too_long(stage: Stage) -> None:
    """A load isn't done after minutes, while other requests are served."""
    tape = Tape()
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    tape.forward()
    tape.polled(loading=[1])
    for position in range(120):
        tape.after(1000)
        tape.decode(2, 5000 + position)
    stage.play(tape)


# -- lifetime -----------------------------------------------------------------------------------------------------------


class _Lazy(Follower):
    """Saves on a thread of its own, ``delay_s`` after it is told to."""

    delay_s = 0.2

    def save(self, moves: Any) -> None:
        if moves:
            thread = threading.Thread(target=self._save, args=(list(moves),))
            thread.start()
            self.threads = [*getattr(self, "threads", []), thread]

    def _save(self, moves: list[Move]) -> None:
        sleep(self.delay_s)
        super().save(moves)

    def shutdown(self) -> None:
        for thread in getattr(self, "threads", []):
            thread.join()


@fault("W9")
def saves_after_the_request_has_left(stage: Stage) -> None:
    """A thread saves the pages, request_finished answers False: the pages are read when they are free."""
    engine = stage.engine(Leader, _Lazy)
    stage.serve(engine, stage.prompt(), new=1)
    engine.shutdown()


@fault("W9b", "records")
def loads_into_a_page_that_was_given_away(stage: Stage) -> None:
    """A parked request is cancelled, its pages go to another one, and the load is still being written."""
    tape = Tape()
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    tape.forward()
    started = tape.now
    tape.polled(loading=[1])
    tape.after(5)
    tape.prefill(2, 100, [[1, 2, 3, 4]])
    tape.after(5)
    tape.transfer(Direction.LOAD, 1, [1, 2, 3], started=started, ended=tape.now)
    tape.polled(loaded=[1])
    stage.play(tape)


@fault("P3", "records")
def notices_a_finished_load_late(stage: Stage) -> None:
    """A load is done, and get_finished names it two seconds later."""
    tape = Tape()
    tape.query(1, 100, 0, 96, is_async=True)
    tape.alloc(1, 96, [[1, 2, 3, 4]])
    tape.build()
    tape.bind()
    tape.transfer(Direction.LOAD, 1, [1, 2, 3])
    tape.worker(Callback.START_LOAD_KV)
    tape.polled(loading=[1])
    tape.idle(ms=2000)
    tape.polled(loaded=[1])
    tape.build([(1, 96, 4, 100, [[1, 2, 3, 4]])])
    tape.forward()
    stage.play(tape)

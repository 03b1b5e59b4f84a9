"""Wrong pages, and blocks that are forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tracekv.journal.vocabulary import Direction
from tracekv.testing.corpus.correct import Follower, Leader, Live, Move
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import fault
from tracekv.testing.corpus.tape import Tape

# -- pages --------------------------------------------------------------------------------------------------------------


@fault("L1")
def takes_minus_one_for_a_page(stage: Stage) -> None:
    """-1 is a valid subscript: a block whose page has left the window is saved from the pool's last page."""

    class Subscripting(Leader):
        def moves(self, request_id: int, live: Live, begin: int, end: int) -> Any:
            for group, slots in enumerate(live.pages):
                for ordinal, page in enumerate(slots):
                    if begin <= ordinal < min(end, len(live.keys)):
                        yield Move(request_id, group, page, live.keys[ordinal])

    for _ in range(2):
        stage.serve(stage.engine(Subscripting, preset="gemma3"), stage.prompt(count=320))


@fault("L1b", "records")
def names_a_group_by_its_window(stage: Stage) -> None:
    """The transfers name layer group 128, which is a window and no id of the layout."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3], group=128)
    stage.play(tape)


@fault("L1c", "records")
def forgets_the_replicated_region(stage: Stage) -> None:
    """Each page is saved with fewer bytes than its regions hold."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3], nbytes=3 * 4000)
    tape.finish(1, pages=[[1, 2, 3, 4]])
    stage.play(tape)


@fault("S8")
def writes_the_page_next_door(stage: Stage) -> None:
    """Page slots are off by one: the last load goes to a page that isn't the request's."""

    class NextDoor(Follower):
        def load(self, moves: Sequence[Move]) -> None:
            super().load([move._replace(page=move.page + 3) for move in moves])

    stage.twice(worker=NextDoor)


@fault("S8b", "records")
def writes_past_the_pool(stage: Stage) -> None:
    """A page slot is counted in the other group's pool, which has more of them."""
    tape = Tape(slots=64)
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 64])
    stage.play(tape)


@fault("S10", "records")
def is_given_a_page_that_another_request_holds(stage: Stage) -> None:
    """Two requests that run in the same pass own one page slot."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.query(2, 100)
    tape.alloc(2, 0, [[4, 5, 6, 7]])
    tape.build([(2, 0, 100, 100, [[4, 5, 6, 7]])], [(1, 100, 1, [[]])])
    tape.forward()
    stage.play(tape)


@fault("S10b", "records")
def is_given_a_page_twice(stage: Stage) -> None:
    """One request's list names a page slot twice."""
    tape = Tape()
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 2, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 2, 4]])])
    tape.forward()
    stage.play(tape)


@fault("S10b")
def loads_every_block_into_one_page(stage: Stage) -> None:
    """A loop variable is read too late: all blocks go to the last page."""

    class OnePage(Follower):
        def load(self, moves: Sequence[Move]) -> None:
            super().load([move._replace(page=moves[-1].page) for move in moves])

    stage.twice(worker=OnePage)


@fault("S11", "records")
def shrinks_a_list(stage: Stage) -> None:
    """The list at the end is shorter than what was reported (rejected drafts took their tail block along)."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4, 5]])
    tape.decode(1, 100)
    tape.finish(1, pages=[[1, 2, 3, 4]])
    stage.play(tape)


@fault("S11c", "records")
def moves_a_block_silently(stage: Stage) -> None:
    """A block lies on another page than reported; the delta protocol can't say so."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.decode(1, 100)
    tape.finish(1, pages=[[1, 2, 3, 9]])
    stage.play(tape)


@fault("S11b", "records")
def reports_no_page_for_new_tokens(stage: Stage) -> None:
    """Decoding passes a block's end and no new page is reported."""
    tape = Tape()
    tape.prefill(1, 64, [[1, 2]])
    for position in range(64, 68):
        tape.decode(1, position)
    stage.play(tape)


# -- coverage -----------------------------------------------------------------------------------------------------------


@fault("S9")
def saves_the_first_chunk_only(stage: Stage) -> None:
    """new_requests alone is read, so later chunks are never saved."""
    _serve_chunks(stage, "v2")


@fault("S9")
def saves_the_first_chunk_only_on_v1(stage: Stage) -> None:
    """The same on V1, where the first report has every page."""
    _serve_chunks(stage, "v1")


def _serve_chunks(stage: Stage, mode: str) -> None:
    class NewOnly(Leader):
        def build_connector_meta(self, scheduler_output: Any) -> object:
            return super().build_connector_meta(replace(scheduler_output, cached_requests=[]))

    stage.serve(stage.engine(NewOnly, mode=mode, chunk_tokens=64), stage.prompt(count=200))


@fault("W2")
def loads_all_but_the_last_block(stage: Stage) -> None:
    """Of four blocks that were honoured three are loaded; the fourth is computed on whatever its page held."""

    class Short(Follower):
        def load(self, moves: Sequence[Move]) -> None:
            super().load(moves[:-1])

    stage.twice(worker=Short)


@fault("W2")
def loads_one_layer_group_only(stage: Stage) -> None:
    """With two layer groups only the first is loaded."""

    class FirstGroup(Follower):
        def load(self, moves: Sequence[Move]) -> None:
            super().load([move for move in moves if move.layer_group == 0])

    stage.twice(worker=FirstGroup, preset="gemma3")


@fault("W2b")
def loads_after_the_forward(stage: Stage) -> None:
    """What was promised is loaded in wait_for_save: the pass has computed without it."""

    class Late(Follower):
        def start_load_kv(self, stream: Any) -> None:
            pass

        def wait_for_save(self, stream: Any) -> None:
            self.load(self.plan("loads"))
            super().wait_for_save(stream)

    stage.twice(worker=Late)


@fault("W7", "records")
def gets_no_hooks_in_a_prefill(stage: Stage) -> None:
    """Hooks came in one prefill pass and not in the next."""
    tape = Tape()
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 3, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4]])])
    tape.bind()
    tape.hooks([(tape.now, tape.now + 1)], [(tape.now + 2, tape.now + 3)])
    tape.forward()
    tape.finish(1, pages=[[1, 2, 3, 4]])
    tape.prefill(2, 100, [[5, 6, 7, 8]])
    stage.play(tape)


@fault("W7b", "records")
def gets_hooks_of_some_layers(stage: Stage) -> None:
    """Of two layers one has hooks: a layer-wise save lacks half of the model."""
    tape = Tape(groups=2)
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 3, 4], [1, 2, 3, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4], [1, 2, 3, 4]])])
    tape.bind()
    now = tape.now
    tape.hooks([(now, now + 1), (0, 0)], [(now + 2, now + 3), (0, 0)])
    tape.forward()
    stage.play(tape)


@fault("W7c", "records")
def saves_a_layer_before_it_is_waited_for(stage: Stage) -> None:
    """save_kv_layer comes before wait_for_layer_load of the same layer."""
    tape = Tape()
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 3, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4]])])
    tape.bind()
    now = tape.now
    tape.hooks([(now + 5, now + 6)], [(now + 2, now + 3)])
    tape.forward()
    stage.play(tape)

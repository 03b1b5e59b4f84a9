"""Keys that don't tell KV apart, time that is lost, and numbers that contradict each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from time import perf_counter_ns, sleep
from typing import Any

import tracekv
from tracekv.journal.vocabulary import Callback, Direction, MissReason, Operation, Outcome
from tracekv.testing.corpus.correct import Follower, Leader, Move, ParkingFollower, ParkingLeader
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import fault
from tracekv.testing.corpus.tape import Tape

# -- isolation ----------------------------------------------------------------------------------------------------------


class _Unseeded(Leader):
    """Keys of the tokens alone."""

    def seed(self, request: Any) -> bytes:
        return b""


@fault("S12")
def shares_between_salts(stage: Stage) -> None:
    """The cache salt isn't in the key: one tenant is served another's KV."""
    for salt in ("one", "two"):
        stage.serve(stage.engine(_Unseeded), stage.prompt(), cache_salt=salt)


@fault("S12")
def shares_between_adapters(stage: Stage) -> None:
    """The LoRA id isn't in the key."""
    engine = stage.engine(_Unseeded)
    for adapter in (1, 2):
        stage.serve(engine, stage.prompt(), lora_task_id=adapter)


@fault("S12")
def shares_between_images(stage: Stage) -> None:
    """The image isn't in the key: its place holders have the same tokens."""
    for image in ([[1, 2]], [[3, 4]]):
        stage.serve(
            stage.engine(_Unseeded),
            stage.prompt(),
            multimodal_hashes=image,
            multimodal_positions=[5],
            multimodal_lengths=[8],
        )


@fault("S12b", "records")
def shares_between_layer_groups(stage: Stage) -> None:
    """Both layer groups of a block are written to one object."""
    tape = Tape(groups=2)
    tape.prefill(1, 100, [[1, 2, 3, 4], [1, 2, 3, 4]])
    tape.stored(b"object-1", group=0)
    tape.stored(b"object-1", group=1)
    stage.play(tape)


@fault("S12c")
def shares_between_models(stage: Stage) -> None:
    """The model isn't in the key: another model's KV of the same tokens is served."""

    class Foreign(Leader):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            super().get_num_new_matched_tokens(request, num_computed_tokens)
            return 0, False

    stage.serve(stage.engine(Foreign), stage.prompt())
    stage.store.clear()  # what is in it would not fit; the key alone tells
    stage.serve(stage.engine(Foreign, preset="gemma3"), stage.prompt())


@fault("S12d")
def keys_a_block_by_its_own_tokens(stage: Stage) -> None:
    """A key holds its block's tokens and not those before it: equal blocks of different texts are taken for each other."""

    class Unchained(Leader):
        def keys(self, request: Any) -> list[bytes]:
            tokens = request.get_tokens(0)
            return [
                hashlib.sha256(repr(tokens[at : at + 32]).encode()).digest()[:16]
                for at in range(0, len(tokens) - 31, 32)
            ]

    block = stage.prompt(9, 32)
    stage.serve(stage.engine(Unchained), stage.prompt(1, 64) + block + [7])
    stage.store.clear()
    stage.serve(stage.engine(Unchained), stage.prompt(2, 96) + block + [7])


# -- performance ----------------------------------------------------------------------------------------------------------


@fault("P1")
def reads_the_store_in_the_query(stage: Stage) -> None:
    """Whether a block is there is asked of the store, in the scheduling path."""

    class Asking(Leader):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            started = perf_counter_ns()
            sleep(0.08)
            tracekv.store_operation(Operation.HEAD, Outcome.OK, "s3", started_ns=started, request_id=request.request_id)
            return super().get_num_new_matched_tokens(request, num_computed_tokens)

    stage.twice(Asking)


@fault("P2", "records")
def queues_loads_behind_one_another(stage: Stage) -> None:
    """A load of a millisecond has waited for 300 others."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]], offered=96)
    tape.query(2, 100, 0, 96)
    tape.alloc(2, 96, [[5, 6, 7, 8]])
    tape.build([(2, 0, 4, 100, [[5, 6, 7, 8]])])
    tape.bind()
    started = tape.now
    tape.after(301)
    tape.transfer(Direction.LOAD, 2, [5, 6, 7], started=started, ended=tape.now, queued_ns=300_000_000)
    tape.worker(Callback.START_LOAD_KV)
    tape.worker(Callback.WAIT_FOR_SAVE)
    stage.play(tape)


@fault("P4", "records")
def waits_longer_than_computing_takes(stage: Stage) -> None:
    """4096 tokens take half a second to compute and five to load."""
    tape = Tape(slots=1024)
    pages = list(range(128)), list(range(200, 329))
    tape.query(1, 4096)
    tape.alloc(1, 0, [pages[0]])
    tape.build([(1, 0, 4096, 4096, [pages[0]])])
    tape.bind()
    tape.worker(Callback.START_LOAD_KV)
    tape.after(500)
    tape.worker(Callback.WAIT_FOR_SAVE)
    tape.finish(1, pages=[pages[0]])
    tape.query(2, 4100, 0, 4096)
    tape.alloc(2, 4096, [pages[1]])
    tape.build([(2, 0, 4, 4100, [pages[1]])])
    tape.bind()
    started = tape.now
    tape.transfer(Direction.LOAD, 2, pages[1][:128], started=started, ended=started + 5_000_000_000)
    tape.worker(Callback.START_LOAD_KV, took_us=5_000_000)
    tape.after(1)
    tape.worker(Callback.WAIT_FOR_SAVE)
    stage.play(tape)


@fault("W5", "records")
def blocks_in_get_finished(stage: Stage) -> None:
    """get_finished waits for a transfer; on every other rank the loop stands in the allgather."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, keeps=True, pages=[[1, 2, 3, 4]])
    tape.transfer(Direction.SAVE, 1, [1, 2, 3])
    tape.polled(saving=[1], saved=[1])
    record: Any = tape.records[-1][1]
    record.ended_ns += 3_000_000_000
    stage.play(tape)


# -- numbers --------------------------------------------------------------------------------------------------------------


@fault("N1")
def promises_and_loads_nothing(stage: Stage) -> None:
    """A failed load is marked as done: the pages hold whatever they held, and the metrics say hit."""

    class Swallowing(Follower):
        def load(self, moves: Sequence[Move]) -> None:
            pass

    stage.twice(worker=Swallowing)


@fault("N1")
def parks_and_loads_nothing(stage: Stage) -> None:
    """The same, parked: the id is returned without a load."""

    class Swallowing(ParkingFollower):
        def load(self, moves: Sequence[Move]) -> None:
            pass

    stage.twice(ParkingLeader, Swallowing)


@fault("N1")
def fails_a_load_and_goes_on(stage: Stage) -> None:
    """The load's error is reported and then swallowed: the request is answered from pages that were not written."""

    class Failing(Follower):
        def load(self, moves: Sequence[Move]) -> None:
            if moves:
                self.tell(Direction.LOAD, moves[0].request_id, 0, moves, perf_counter_ns(), error="OSError")

    stage.twice(worker=Failing)


@fault("N2", "records")
def saves_what_one_group_never_has(stage: Stage) -> None:
    """Everything is saved, nothing is ever a hit: one layer group's blocks are never there."""
    tape = Tape(groups=2)
    for request in range(1, 13):
        pages = [[request * 4 + i for i in range(4)], [request * 4 + i for i in range(4)]]
        tape.lookup(request, 100, stored=0, group_tokens=[96, 0], bounding=1, reason=MissReason.LAYER_GROUP_MISSING)
        tape.prefill(request, 100, pages)
        tape.transfer(Direction.SAVE, request, pages[0][:3])
        tape.transfer(Direction.SAVE, request, pages[1][:3], group=1)
        tape.finish(request, pages=pages)
    stage.play(tape)


@fault("N3")
def answers_otherwise_than_it_looked_up(stage: Stage) -> None:
    """One block less is answered than the lookup says was offered."""

    class Other(Leader):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            offered, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return max(0, offered - 32), is_async

    stage.twice(Other)


@fault("N4", "records")
def offers_more_than_is_stored(stage: Stage) -> None:
    """The lookup found two blocks in the store, the offer has three."""
    tape = Tape()
    tape.lookup(1, 100, 0, 96, stored=64)
    tape.prefill(1, 100, [[1, 2, 3, 4]], offered=96)
    stage.play(tape)


@fault("N5", "records")
def loads_what_was_not_honoured(stage: Stage) -> None:
    """The offer is loaded whole although the runtime honoured less of it."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.finish(1, pages=[[1, 2, 3, 4]])
    tape.query(2, 100, 0, 96)
    tape.alloc(2, 32, [[5, 6, 7, 8]])
    tape.build([(2, 0, 68, 100, [[5, 6, 7, 8]])])
    tape.bind()
    tape.transfer(Direction.LOAD, 2, [5, 6, 7])
    tape.worker(Callback.START_LOAD_KV)
    tape.worker(Callback.WAIT_FOR_SAVE)
    stage.play(tape)

"""Broken offers and broken sequences of calls."""

from __future__ import annotations

from typing import Any

from tracekv.journal.vocabulary import Callback
from tracekv.testing.corpus.correct import Follower, Leader
from tracekv.testing.corpus.stage import Stage
from tracekv.testing.corpus.table import fault
from tracekv.testing.corpus.tape import Tape


class _Answering(Leader):
    """Answers what :meth:`answer` says, whatever is stored."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        super().get_num_new_matched_tokens(request, num_computed_tokens)
        return self.answer(request, num_computed_tokens)

    def answer(self, request: Any, computed: int) -> Any:
        raise NotImplementedError


@fault("S1")
def offers_none(stage: Stage) -> None:
    """The query answers None."""

    class Nothing(_Answering):
        def answer(self, request: Any, computed: int) -> Any:
            return None

    stage.twice(Nothing)


@fault("S1")
def offers_a_float(stage: Stage) -> None:
    """The query answers ``(0.0, False)``."""

    class Float(_Answering):
        def answer(self, request: Any, computed: int) -> Any:
            return 0.0, False

    stage.twice(Float)


@fault("S1")
def offers_without_a_flag(stage: Stage) -> None:
    """The query answers a number alone, as an older interface did."""

    class Number(_Answering):
        def answer(self, request: Any, computed: int) -> Any:
            return 0

    stage.twice(Number)


@fault("S1b")
def offers_a_negative_number(stage: Stage) -> None:
    """The offer is end - computed with an end before what the device holds."""

    class Negative(_Answering):
        def answer(self, request: Any, computed: int) -> Any:
            return -32, False

    stage.twice(Negative)


@fault("S1c")
def parks_for_nothing(stage: Stage) -> None:
    """The query answers ``(0, True)``."""

    class Parking(_Answering):
        def answer(self, request: Any, computed: int) -> Any:
            return 0, True

    stage.twice(Parking)


@fault("S2")
def offers_the_whole_prompt_on_v1(stage: Stage) -> None:
    """A prompt of whole blocks is offered whole: V1 aborts."""
    _offer_all(stage, "v1")


@fault("S2")
def offers_the_whole_prompt_on_v2(stage: Stage) -> None:
    """A prompt of whole blocks is offered whole: V2 clamps, and a load of the last block races the computing."""
    _offer_all(stage, "v2")


def _offer_all(stage: Stage, mode: str) -> None:
    class Whole(Leader):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            offered, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return (offered + 32 if offered else 0), is_async

    for _ in range(2):
        stage.serve(stage.engine(Whole, mode=mode), stage.prompt(count=96))


@fault("S3")
def offers_part_of_a_block(stage: Stage) -> None:
    """Five tokens less than whole blocks are offered."""

    class Ragged(Leader):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            offered, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return max(0, offered - 5), is_async

    stage.twice(Ragged)


@fault("S3b")
def offers_behind_a_partly_matched_block(stage: Stage) -> None:
    """The device holds part of a block; the offer goes on from there as if the block were whole."""

    class Unaligned(Leader):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            aligned = num_computed_tokens // self.block * self.block
            offered, is_async = super().get_num_new_matched_tokens(request, aligned)
            return max(0, aligned + offered - num_computed_tokens), is_async

    prompt, other = stage.prompt(1), stage.prompt(2)
    stage.serve(stage.engine(Unaligned), prompt)
    engine = stage.engine(Unaligned, partial_reuse=True)
    stage.serve(engine, prompt[:40] + other[:60])
    stage.serve(engine, prompt)


@fault("S4", "driven")
def is_asked_twice_for_one_allocation(stage: Stage) -> None:
    """The runtime asks twice before it allocates."""
    from types import SimpleNamespace

    leader, _ = (cls(None) for cls in stage.traced(Leader, Follower))
    tokens = stage.prompt()
    request = SimpleNamespace(request_id=1, prompt_len=len(tokens), get_tokens=lambda _: tokens)
    request.py_num_connector_matched_tokens = 0
    leader.get_num_new_matched_tokens(request, 0)
    leader.get_num_new_matched_tokens(request, 0)
    leader.update_state_after_alloc(request, [1, 2, 3, 4])


@fault("S4", "records")
def is_asked_about_a_running_request(stage: Stage) -> None:
    """A request that decodes is asked about again, and goes on with the pages it had."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.query(1, 100)
    tape.decode(1, 100)
    stage.play(tape)


@fault("S5", "records")
def looks_up_for_too_long(stage: Stage) -> None:
    """The query takes two seconds, with no I/O of its own that it reports."""
    tape = Tape()
    tape.query(1, 100, took_us=2_000_000)
    tape.alloc(1, 0, [[1, 2, 3, 4]])
    stage.play(tape)


@fault("S6", "records")
def is_given_pages_unasked(stage: Stage) -> None:
    """The alloc callback comes for a request that was never asked about."""
    tape = Tape()
    tape.alloc(1, None, [[1, 2, 3, 4]])
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4]])])
    stage.play(tape)


@fault("S6c", "records")
def is_given_pages_of_what_may_be_a_dummy(stage: Stage) -> None:
    """The same, of a request whose object doesn't say whether it is a dummy."""
    tape = Tape()
    tape.alloc(1, None, [[1, 2, 3, 4]], is_never_asked=None)
    tape.build([(1, 0, 100, 100, [[1, 2, 3, 4]])])
    stage.play(tape)


@fault("S6b", "records")
def is_given_flat_pages_of_two_groups(stage: Stage) -> None:
    """One list of pages where there are two layer groups: nobody can tell whose slots they are."""
    tape = Tape(groups=2)
    tape.query(1, 100)
    tape.alloc(1, 0, [[1, 2, 3, 4]], flat=True)
    stage.play(tape)


@fault("S15", "records")
def asks_on_a_rank_that_does_not_lead(stage: Stage) -> None:
    """Rank 1 answers a query of its own."""
    tape = Tape(ranks=2)
    tape.query(1, 100)
    record = tape.records.pop()[1]
    tape.add(record, rank=1)
    stage.play(tape)


@fault("W1", "driven")
def registers_twice(stage: Stage) -> None:
    """The caches are registered twice; addresses of the first are stale."""
    import torch

    _, worker = (cls(None) for cls in stage.traced(Leader, Follower))
    worker.register_kv_caches(torch.zeros(4, 3, 2, 8))
    worker.register_kv_caches(torch.zeros(4, 3, 2, 8))


@fault("W1b", "driven")
def loads_before_the_caches_are_registered(stage: Stage) -> None:
    """start_load_kv comes before any registration."""
    _, worker = (cls(None) for cls in stage.traced(Leader, Follower))
    worker.bind_connector_meta({"loads": [], "saves": []})
    worker.start_load_kv(None)


@fault("W2c", "records")
def loads_twice_for_one_bind(stage: Stage) -> None:
    """start_load_kv comes again without metadata of its own: the loads of the pass before are done once more."""
    tape = Tape()
    tape.prefill(1, 100, [[1, 2, 3, 4]])
    tape.after(1)
    tape.worker(Callback.START_LOAD_KV)
    stage.play(tape)


@fault("W10")
def raises_in_start_load_kv(stage: Stage) -> None:
    """A block that was promised can't be read, and the connector raises: the whole server goes."""

    class Raising(Follower):
        def load(self, moves: Any) -> None:
            if moves:
                raise OSError("the store is gone")

    stage.twice(worker=Raising)


@fault("W10")
def raises_in_a_layer_hook(stage: Stage) -> None:
    """A per-layer hook raises: every active request fails, the loop goes on."""

    class Raising(Follower):
        def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
            if layer_idx == 2:
                raise RuntimeError("no room in the staging buffer")

    stage.twice(worker=Raising)


@fault("W10")
def raises_when_a_request_has_finished(stage: Stage) -> None:
    """request_finished expects a list that isn't there."""

    class Raising(Leader):
        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
            return bool(cache_block_ids[0])

    stage.twice(Raising)

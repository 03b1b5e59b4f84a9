"""Random schedules against a connector pair: requests, passes, cancellations, lost pages, new engines, in any order.

.. code-block:: python

   TestMySchedules = random_schedules(MyScheduler, MyWorker).TestCase

A failure is shrunk by Hypothesis, in five minutes at most, and told as a short story: what was asked, when, and what came of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

from hypothesis import Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

import tracekv
from tracekv.testing.cells import Ask, Cancel, Cell, Destroy, Move, NewEngine, Run, Step, Submit, told
from tracekv.testing.journals import environ, recorded
from tracekv.testing.playing import Engines, References
from tracekv.testing.verdicts import compare, judge

_references = References()
#: Requests of one engine at a time: more tell nothing new and make long stories.
_MOST_REQUESTS = 4


class Schedules(RuleBasedStateMachine):
    """The machine; :func:`random_schedules` makes one for a pair."""

    pair: ClassVar[tuple[type, type]]
    cell: ClassVar[Cell]
    variables: ClassVar[Mapping[str, str]] = {}
    block: ClassVar[int] = 16
    tolerance: ClassVar[float] = 1e-3
    patience_s: ClassVar[float] = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._moves: list[Move] = []
        self._is_over = False
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tracekv-story-"))
        variables = {name: value.replace("{folder}", folder) for name, value in self.variables.items()}
        self._stack.enter_context(environ(variables))
        self._run = self._stack.enter_context(recorded(TRACEKV_WATCH="1"))
        classes = (tracekv.trace(self.pair[0]), tracekv.trace(self.pair[1]))
        self._engines = Engines(self.cell, classes, self.block, self.patience_s)

    @property
    def _is_alive(self) -> bool:
        return self._engines.played.error is None

    @property
    def _has_asked(self) -> bool:
        """Something was queued since all was idle. Preconditions look at nothing else: what is left by now may depend on how quick a
        connector's own threads were, and a story has to draw the same when it is played again. So a move that can't be made is none.
        """
        for move in reversed(self._moves):
            if isinstance(move, Submit):
                return True
            if isinstance(move, Run):
                return False
        return False

    @property
    def _asks(self) -> list[Ask]:
        """Every prompt so far, the latest first."""
        return [move.ask for move in reversed(self._moves) if isinstance(move, Submit)]

    def _do(self, move: Move) -> None:
        if not self._is_alive:
            return
        self._moves.append(move)
        try:
            self._engines.move(move)
        except Exception as error:  # it is the end of this story; the verdict comes with teardown
            self._engines.died(error)
        if isinstance(move, Run) and self._is_alive:
            self._check_tokens()

    def _check_tokens(self) -> None:
        """Judge what has ended as soon as it has: what comes after adds nothing to the story."""
        for answer in self._engines.answered():
            line = compare(answer, _references.of(self.cell, answer.ask, self.block), self.tolerance)
            if not line.tokens_equal:
                self._is_over = True
                logits = f"; the first logits differ by {line.logit_difference:.3g}" if line.logit_difference else ""
                raise AssertionError(
                    self._story(
                        f"request {answer.request_id} of its engine ({line.device_tokens} tokens from the device, "
                        f"{line.honoured_tokens} from the connector) is answered differently without a connector{logits}"
                    )
                )

    def _story(self, *faults: str) -> str:
        moves = [f"  {line}" for line in told(tuple(self._moves), self.block)]
        return "\n".join(["this story goes wrong:", *moves, *faults])

    @rule(
        text=strategies.integers(1, 2),
        blocks=strategies.integers(0, 5),
        rest=strategies.sampled_from([0, 1, 5]),
        new=strategies.integers(1, 4),
        salt=strategies.sampled_from([None, "a"]),
    )
    def a_request(self, text: int, blocks: int, rest: int, new: int, salt: str | None) -> None:
        """Queue a prompt; those of one text share their beginnings."""
        if len(self._engines.unfinished) < _MOST_REQUESTS:
            self._do(Submit(Ask(pieces=((text, max(1, blocks * self.block + rest)),), new=new, salt=salt)))

    @precondition(lambda self: self._asks)
    @rule(which=strategies.integers(0, 7), is_elsewhere=strategies.booleans())
    def an_earlier_request(self, which: int, is_elsewhere: bool) -> None:
        """Queue a prompt that was queued before, as a new engine's first one where ``is_elsewhere``: what is stored is asked for."""
        asks = self._asks
        if is_elsewhere:
            self.a_new_engine()
        if len(self._engines.unfinished) < _MOST_REQUESTS:
            self._do(Submit(asks[which % len(asks)]))

    @rule(passes=strategies.integers(1, 3))
    def passes(self, passes: int) -> None:
        """Run some, idle ones too."""
        self._do(Step(passes))

    @precondition(lambda self: self._has_asked)
    @rule()
    def until_idle(self) -> None:
        """Run until nothing is left to do."""
        self._do(Run())

    @precondition(lambda self: self._has_asked)
    @rule(which=strategies.integers(0, _MOST_REQUESTS - 1))
    def a_cancellation(self, which: int) -> None:
        """Cancel one."""
        left = self._engines.unfinished
        if left:
            self._do(Cancel(left[which % len(left)]))

    @precondition(lambda self: self._has_asked)
    @rule(which=strategies.integers(0, _MOST_REQUESTS - 1), forget=strategies.booleans())
    def lost_pages(self, which: int, forget: bool) -> None:
        """Let one begin anew."""
        running = self._engines.destroyable
        if running:
            self._do(Destroy(running[which % len(running)], forget))

    @precondition(lambda self: self._asks)
    @rule()
    def a_new_engine(self) -> None:
        """Finish, and go on with an empty device."""
        if self._engines.has_requests:
            self._do(Run())
            self._do(NewEngine())

    def teardown(self) -> None:
        """Finish the story and judge it.

        Raises:
            AssertionError: The story, and what is wrong with it.
        """
        try:
            if self._is_alive and not self._is_over:
                self._do(Run())
            if self._is_alive:
                self._engines.new_engine()
        finally:
            self._stack.close()
        if self._is_over:
            return
        played = self._engines.played
        references = [
            _references.of(self.cell, move.ask, self.block) for move in self._moves if isinstance(move, Submit)
        ]
        result = judge(
            self.cell,
            played,
            references[: len(played.answers)],
            self._run,
            block=self.block,
            tolerance=self.tolerance,
        )
        if result.faults:
            raise AssertionError(self._story(*result.faults))


def random_schedules(
    scheduler: type,
    worker: type,
    *,
    mode: Literal["v1", "v2"] = "v2",
    groups: int = 1,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    tokens_per_block: int = 16,
    tolerance: float = 1e-3,
    patience_s: float = 2.0,
    max_examples: int = 40,
    steps: int = 12,
) -> type[Schedules]:
    """A state machine over a pair; its ``TestCase`` is what pytest runs.

    Args:
        scheduler: The scheduler class.
        worker: The worker class.
        mode: The cache manager.
        groups: Layer groups of the model, 1 or 2.
        options: Further arguments of :class:`tracekv.harness.Executor`.
        environment: Variables that are set while a story is played; ``{folder}`` is an empty folder of its own. The connector has
            to begin each story empty: a story that depends on an earlier one can't be shrunk.
        tokens_per_block: Of the engine.
        tolerance: Most difference of the first token's logits.
        patience_s: So long nothing may be scheduled while requests are left.
        max_examples: Stories to try.
        steps: Most moves of a story.
    """
    cell = Cell(
        name=f"{mode}{'-groups2' if groups == 2 else ''}/random",
        what="a random schedule",
        moves=(),
        mode=mode,
        groups=groups,
        options={"chunk_tokens": 2 * tokens_per_block, **(options or {})},
    )
    namespace = {
        "pair": (scheduler, worker),
        "cell": cell,
        "variables": dict(environment or {}),
        "block": tokens_per_block,
        "tolerance": tolerance,
        "patience_s": patience_s,
    }
    machine: Any = type("Schedules", (Schedules,), namespace)
    machine.TestCase.settings = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        # Explaining which lines failing stories run traces every line of every story: minutes, for little.
        phases=(Phase.generate, Phase.shrink),
    )
    made: type[Schedules] = machine
    return made

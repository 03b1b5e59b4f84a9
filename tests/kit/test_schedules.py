"""Random schedules: clean for a correct pair, and a short story for a broken one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tracekv.testing import minimal, random_schedules

OWN = {minimal.VARIABLE: "{folder}"}
TestCorrectPair = random_schedules(minimal.Scheduler, minimal.Worker, environment=OWN, max_examples=12).TestCase
TestParkingPair = random_schedules(
    minimal.ParkingScheduler, minimal.ParkingWorker, options={"overlap": True}, environment=OWN, max_examples=12
).TestCase


class LoadsOneBlockTwice(minimal.Worker):
    """Where two blocks or more are loaded, the first is loaded into the second's page too."""

    def load(self, moves):
        moves = list(moves)
        if len(moves) > 1:
            moves[1] = moves[1]._replace(key=moves[0].key)
        super().load(moves)


@pytest.mark.slow
def test_a_broken_pair_is_shrunk_to_a_short_story():
    machine = random_schedules(minimal.Scheduler, LoadsOneBlockTwice, environment=OWN, max_examples=60)
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine, settings=settings(machine.TestCase.settings, derandomize=True))
    story = str(caught.value).splitlines()
    assert story[0] == "this story goes wrong:"
    moves = [line for line in story if line.startswith("  ")]
    # Two blocks have to be stored and served again: with less there is nothing to mistake.
    assert 4 <= len(moves) <= 7
    assert any("request 1 is queued" in line for line in moves)
    assert any("is answered differently without a connector" in line for line in story)

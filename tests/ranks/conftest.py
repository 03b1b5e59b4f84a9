"""Two ranks that most tests share: what is slow about them is their start."""

from __future__ import annotations

import pytest
import torch

from tracekv.harness.ranks import Ranks


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_ranks():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def mortal_ranks():
    """Two ranks for a test that brings them down."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()
    assert ranks.pids == []

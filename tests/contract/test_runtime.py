from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tracekv.contract import Runtime, UnknownRuntime, current_runtime, use_runtime

LAUNCHER = ("OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_runtime(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    use_runtime(None)
    yield
    use_runtime(None)


def test_alone_it_is_rank_0_of_1_and_gathers_its_own_value():
    runtime = current_runtime()
    assert (runtime.rank, runtime.world) == (0, 1)
    assert runtime.host
    assert runtime.allgather("x") == ["x"]


def test_what_a_host_says_wins():
    use_runtime(Runtime(rank=3, world=8))
    assert current_runtime().rank == 3


@pytest.mark.parametrize("variable", LAUNCHER)
def test_a_launcher_without_a_rank_is_refused_by_name(monkeypatch, variable):
    monkeypatch.setenv(variable, "4")
    with pytest.raises(UnknownRuntime, match=f"{variable}=4.*use_runtime"):
        current_runtime()


def test_tensorrt_llm_gives_rank_and_world(monkeypatch):
    utils = ModuleType("tensorrt_llm._utils")
    utils.mpi_rank, utils.mpi_world_size, utils.mpi_allgather = (lambda: 1), (lambda: 2), (lambda value: [value, value])
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", utils)
    runtime = current_runtime()
    assert (runtime.rank, runtime.world, runtime.allgather(5)) == (1, 2, [5, 5])

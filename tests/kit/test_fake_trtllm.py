"""The stand-in for tensorrt_llm: third parties import it, the kit's own types stay the contract's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tracekv import contract
from tracekv.testing import fake_trtllm

THIRD_PARTY = """
import tensorrt_llm
from tensorrt_llm import logger
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorScheduler
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorWorker, SchedulerOutput
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_layout import KvCacheLayout, valid_page_slots
from tensorrt_llm._torch.pyexecutor.kv_cache_connector import KvCacheConnectorWorker as OldWorker
from tensorrt_llm._utils import mpi_rank
from tensorrt_llm.bindings.internal.batch_manager import LlmRequest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.runtime.kv_cache_manager_v2 import BAD_PAGE_INDEX
"""


def test_what_third_parties_import_is_there_and_is_the_contracts():
    names = {}
    with fake_trtllm.installed():
        exec(THIRD_PARTY, names)
    assert names["KvCacheConnectorScheduler"] is contract.KvCacheConnectorScheduler
    assert names["KvCacheConnectorWorker"] is names["OldWorker"] is contract.KvCacheConnectorWorker
    assert names["BAD_PAGE_INDEX"] == -1
    assert names["mpi_rank"]() == names["tensorrt_llm"].mpi_rank() == 0
    names["logger"].warning("it has the logger's functions")


def test_it_goes_as_it_came():
    before = set(sys.modules)
    with fake_trtllm.installed():
        assert fake_trtllm.is_installed()
    assert not fake_trtllm.is_installed()
    assert {name for name in sys.modules if name.startswith("tensorrt_llm")} <= before


def test_a_real_tensorrt_llm_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="TensorRT-LLM is installed here"):
        fake_trtllm.install()


@pytest.mark.slow
def test_a_third_partys_pair_runs_in_the_kit_with_one_flag(tmp_path):
    """On one rank and on two: the ranks' processes find the stand-in too."""
    (tmp_path / "theirs.py").write_text(
        textwrap.dedent(
            """
            from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorScheduler
            from tracekv.testing import minimal

            class Scheduler(minimal.Scheduler):
                assert issubclass(minimal.Scheduler, KvCacheConnectorScheduler)

            class Worker(minimal.Worker):
                pass
            """
        )
    )
    command = ["test", "theirs:Scheduler,Worker", "--fake-trtllm", "--cells", "v2/*warm", "--json"]
    told = subprocess.run(
        [sys.executable, "-m", "tracekv.cli", *command, "--env", "MINIMAL_CONNECTOR_STORE={folder}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr + told.stdout
    assert '"verdicts": {"ok": 2}' in told.stdout

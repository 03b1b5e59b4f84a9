from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.connectors import FlatScheduler, TensorWorker
from tracekv.contract.lint import Severity, lint_arguments, lint_connector

CLEAN = {
    "disable_overlap_scheduler": True,
    "kv_cache_config": {"enable_block_reuse": True, "enable_partial_reuse": False},
}


def found(arguments):
    return {(finding.rule, finding.subject): finding for finding in lint_arguments(arguments)}


def with_cache(**more):
    return {**CLEAN, "kv_cache_config": {**CLEAN["kv_cache_config"], **more}}


def test_arguments_without_fault_get_no_finding():
    assert found(CLEAN) == {}


@pytest.mark.parametrize(
    ("arguments", "rule", "subject"),
    [
        ({**CLEAN, "pipeline_parallel_size": 2}, "L2", "pipeline_parallel_size"),
        ({**CLEAN, "context_parallel_size": 2}, "L2", "context_parallel_size"),
        ({**CLEAN, "max_beam_width": 4}, "L2", "max_beam_width"),
        ({**CLEAN, "enable_attention_dp": True}, "L2", "enable_attention_dp"),
        (with_cache(host_cache_size=1 << 30), "L2", "kv_cache_config.host_cache_size"),
        (with_cache(disk_cache_size=1 << 30), "L2", "kv_cache_config.disk_cache_size"),
        ({**with_cache(use_kv_cache_manager_v2=True), "speculative_config": {}}, "L2", "speculative_config"),
        (
            {**CLEAN, "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}},
            "L2",
            "scheduler_config.capacity_scheduler_policy",
        ),
        (with_cache(enable_block_reuse=False), "L3", "kv_cache_config.enable_block_reuse"),
        (with_cache(enable_partial_reuse=True), "L4", "kv_cache_config.enable_partial_reuse"),
        ({**CLEAN, "disable_overlap_scheduler": False}, "L5", "disable_overlap_scheduler"),
        ({**CLEAN, "cuda_graph_config": {"max_batch_size": 8}}, "L6", "cuda_graph_config"),
    ],
)
def test_each_argument_that_matters_is_named_with_what_to_do(arguments, rule, subject):
    finding = found(arguments)[(rule, subject)]
    assert finding.what
    assert finding.remedy
    assert len(found(arguments)) == 1


def test_a_policy_that_replays_is_allowed_by_the_v2_manager():
    arguments = {
        **with_cache(use_kv_cache_manager_v2=True),
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    }
    assert found(arguments) == {}


def test_objects_are_read_as_mappings_are():
    cache = SimpleNamespace(enable_block_reuse=False, enable_partial_reuse=False)
    arguments = SimpleNamespace(kv_cache_config=cache, disable_overlap_scheduler=True)
    assert [finding.rule for finding in lint_arguments(arguments)] == ["L3"]


def lint_source(source, monkeypatch, tmp_path):
    path = tmp_path / "vendor_connector.py"
    path.write_text(source)
    module = ModuleType("vendor_connector")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "vendor_connector", module)
    cls = type("Vendor", (), {"__module__": "vendor_connector"})
    return list(lint_connector(cls))


@pytest.mark.parametrize(
    ("source", "rule", "severity"),
    [
        ("x = RequestData(1, [], [], 0, 1, None)", "L7", Severity.PROBLEM),
        ("x = kcc.RequestData(1, [], [], 0, 1, None)", "L7", Severity.PROBLEM),
        ("from tensorrt_llm._torch.pyexecutor.kv_cache_connector import X", "L8", Severity.ADVICE),
        ("from tensorrt_llm._torch.pyexecutor import kv_cache_connector", "L8", Severity.ADVICE),
        ("import tensorrt_llm._torch.pyexecutor.kv_cache_connector as kcc", "L8", Severity.ADVICE),
        ("if hasattr(request, 'cache_salt_id'): pass", "L8", Severity.PROBLEM),
        ("salt = request.cache_salt_id", "L8", Severity.PROBLEM),
    ],
)
def test_source_that_another_version_breaks_is_named_with_its_line(source, rule, severity, monkeypatch, tmp_path):
    (finding,) = lint_source(f"import os\n{source}\n", monkeypatch, tmp_path)
    assert (finding.rule, finding.severity, finding.subject) == (rule, severity, "vendor_connector:2")


def test_source_without_fault_gets_no_finding(monkeypatch, tmp_path):
    source = "x = RequestData(1, [], [], 0, 1, block_hashes=[])\nsalt = request.cache_salt\n"
    source += "from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_connector\n"
    assert lint_source(source, monkeypatch, tmp_path) == []
    assert list(lint_connector(FlatScheduler, TensorWorker)) == []

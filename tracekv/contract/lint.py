"""What of an engine's arguments or a connector's code the runtime will refuse, ignore or trip over, told before the first request.

Source: contract.md section 10 (L2-L8), 1.5 and 4.4; contract-v2.md section 3.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Severity(str, Enum):
    """How bad a finding is."""

    PROBLEM = "problem"
    ADVICE = "advice"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        rule: Stable id, e.g. ``L2``.
        subject: The argument, class or setting that it is about.
        what: What is the case, and what comes of it.
        remedy: What to do.
    """

    rule: str
    severity: Severity
    subject: str
    what: str
    remedy: str


def lint_arguments(llm_args: Any) -> Iterator[Finding]:
    """Look at the engine's arguments: ``LlmArgs`` itself, or the mapping that its YAML file holds.

    Arguments that are absent are taken at the runtime's default; nothing is imported from it.
    """
    read = _Reader(llm_args)
    yield from _refusals(read)
    yield from _reuse(read)
    if not read("disable_overlap_scheduler", default=False):
        yield Finding(
            "L5",
            Severity.NOTE,
            "disable_overlap_scheduler",
            "The overlap loop announces request_finished one pass late, for a request that stops by a stop word twice, "
            "and for a cancelled one with empty lists.",
            "Let request_finished accept a second call and empty lists.",
        )
    if read("cuda_graph_config") is not None:
        yield Finding(
            "L6",
            Severity.NOTE,
            "cuda_graph_config",
            "A replayed CUDA graph runs no per-layer hooks: wait_for_layer_load and save_kv_layer come in eager passes only.",
            "Load in start_load_kv and save in wait_for_save, or set cuda_graph_config to null.",
        )


def lint_connector(*classes: type) -> Iterator[Finding]:
    """Look at the source of connector classes for what other versions of the runtime name or order differently."""
    modules = {cls.__module__ for cls in classes}
    for name in sorted(modules):
        module = sys.modules.get(name)
        try:
            tree = ast.parse(inspect.getsource(module)) if module else None
        except (OSError, TypeError, SyntaxError):
            continue
        for node in ast.walk(tree) if tree else ():
            yield from _lint_node(node, name)


class _Reader:
    """Dotted access to nested objects or mappings; None where anything on the way is absent."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def __call__(self, path: str, default: Any = None) -> Any:
        value = self._root
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
            if value is None:
                return default
        return value

    def number(self, path: str) -> float:
        """A number, or 0 where there is none."""
        value = self(path)
        return value if isinstance(value, (int, float)) else 0


def _refusals(read: _Reader) -> Iterator[Finding]:
    v2 = bool(read("kv_cache_config.use_kv_cache_manager_v2", default=False))
    refused = [
        ("pipeline_parallel_size", read.number("pipeline_parallel_size") > 1, "pipeline parallelism"),
        ("context_parallel_size", read.number("context_parallel_size") > 1, "context parallelism"),
        ("max_beam_width", read.number("max_beam_width") > 1, "beam search"),
        ("kv_cache_config.host_cache_size", read.number("kv_cache_config.host_cache_size") > 0, "a host cache tier"),
        ("kv_cache_config.disk_cache_size", read.number("kv_cache_config.disk_cache_size") > 0, "a disk cache tier"),
        ("speculative_config", v2 and read("speculative_config") is not None, "speculative decoding"),
    ]
    for subject, is_refused, meaning in refused:
        if is_refused:
            yield Finding(
                "L2",
                Severity.PROBLEM,
                subject,
                f"The runtime refuses a connector together with {meaning} at bring-up.",
                f"Leave {subject} at its default.",
            )
    if read("enable_attention_dp", default=False):
        yield Finding(
            "L2",
            Severity.PROBLEM if not v2 else Severity.ADVICE,
            "enable_attention_dp",
            "Attention data parallelism needs the V2 cache manager and supports_attention_dp = True on both classes.",
            "Set kv_cache_config.use_kv_cache_manager_v2, and use a connector that opts in; or switch it off.",
        )
    policy = str(read("scheduler_config.capacity_scheduler_policy", default="")).rpartition(".")[2]
    if policy and policy != "GUARANTEED_NO_EVICT" and not v2:
        yield Finding(
            "L2",
            Severity.PROBLEM,
            "scheduler_config.capacity_scheduler_policy",
            f"The policy {policy} can destroy and replay a request on other pages; V1 refuses it with a connector.",
            "Use GUARANTEED_NO_EVICT.",
        )


def _reuse(read: _Reader) -> Iterator[Finding]:
    if not read("kv_cache_config.enable_block_reuse", default=True):
        yield Finding(
            "L3",
            Severity.PROBLEM,
            "kv_cache_config.enable_block_reuse",
            "Without block reuse an offer is never honoured: V2 refuses to start, V1 asks, loads and discards.",
            "Set enable_block_reuse to true. Some quantizations switch it off by themselves.",
        )
    if read("kv_cache_config.enable_partial_reuse", default=True):
        yield Finding(
            "L4",
            Severity.ADVICE,
            "kv_cache_config.enable_partial_reuse",
            "With partial reuse a device hit can end inside a block; connectors that work in whole blocks then offer nothing.",
            "Set enable_partial_reuse to false, or use a connector that starts inside a block.",
        )


_OLD_PATH = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"


def _lint_node(node: ast.AST, module: str) -> Iterator[Finding]:
    where = f"{module}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.Call) and _name_of(node.func) == "RequestData" and len(node.args) > 5:
        yield Finding(
            "L7",
            Severity.PROBLEM,
            where,
            "RequestData is built with more than five positional arguments; the sixth was priorities and is block_hashes now.",
            "Name the arguments.",
        )
    imported = []
    if isinstance(node, ast.ImportFrom):
        imported = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    elif isinstance(node, ast.Import):
        imported = [alias.name for alias in node.names]
    if _OLD_PATH in imported:
        yield Finding(
            "L8",
            Severity.ADVICE,
            where,
            f"{_OLD_PATH} is where older versions keep the base classes; newer ones have a package connectors.",
            "Import them from tracekv.contract, which finds either.",
        )
    is_read = isinstance(node, ast.Attribute) and node.attr == "cache_salt_id"
    if is_read or (isinstance(node, ast.Constant) and node.value == "cache_salt_id"):
        yield Finding(
            "L8",
            Severity.PROBLEM,
            where,
            "cache_salt_id is gone from current versions: a guarded read of it silently drops the salt, and tenants share KV.",
            "Read cache_salt, or tracekv.contract.reading.cache_salt, which knows both.",
        )


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""

"""The house: imports point downwards only, as CONTRIBUTING.md draws it, and what an engine imports stays light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"tracekv": ROOT / "tracekv", "tracekv_fsspec": ROOT / "backends" / "tracekv_fsspec"}

#: What each part of the house may import beside itself; "tracekv" is the public face, ``import tracekv``.
ALLOWED = {
    "tracekv._version": set(),
    "tracekv.settings": set(),
    "tracekv.journal": {"tracekv._version"},
    "tracekv.reporting": {"tracekv.journal"},
    "tracekv.contract": {"tracekv.settings"},
    "tracekv.capture": {"tracekv.contract", "tracekv.journal", "tracekv.settings"},
    "tracekv": {"tracekv._version", "tracekv.capture", "tracekv.reporting"},
    "tracekv.views": {"tracekv.journal", "tracekv._version"},
    "tracekv.rules": {"tracekv.journal"},
    "tracekv.agent": {"tracekv.views", "tracekv.rules", "tracekv.journal", "tracekv.settings", "tracekv._version"},
    "tracekv.connectors": {"tracekv.capture", "tracekv.contract", "tracekv.journal", "tracekv.settings"},
    "tracekv.trtllm": {"tracekv.connectors", "tracekv.capture", "tracekv.contract", "tracekv.settings"},
    "tracekv_fsspec": {"tracekv", "tracekv.contract", "tracekv.journal", "tracekv.reporting", "tracekv.settings"},
    # A rank of the harness may be traced: its process begins with that.
    "tracekv.harness": {"tracekv", "tracekv.capture", "tracekv.contract"},
    "tracekv.testing": {
        "tracekv", "tracekv.capture", "tracekv.connectors", "tracekv.contract", "tracekv.harness", "tracekv.journal",
        "tracekv.rules",
    },
}  # fmt: skip

#: These stand above all others, and nothing of the others may import them.
ANYTHING = {"tracekv.cli", "tracekv.bench"}

#: What runs inside an engine's process, and what must never be imported there.
IN_THE_ENGINE = {
    "tracekv", "tracekv._version", "tracekv.settings", "tracekv.journal", "tracekv.reporting", "tracekv.contract",
    "tracekv.capture", "tracekv.connectors", "tracekv.trtllm", "tracekv_fsspec",
}  # fmt: skip
HEAVY = {"opentelemetry", "prometheus_client", "pydantic", "rich", "structlog", "typer"}


def part_of(module: str) -> str:
    """The part of the house that a module belongs to."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "tracekv" else parts[0]


def named_by(node: ast.AST) -> Iterator[str]:
    """Modules that an import statement names, ours as precisely as the files tell."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            below = SOURCES["tracekv"] / alias.name
            is_module = node.module == "tracekv" and (below.is_dir() or below.with_suffix(".py").exists())
            yield f"tracekv.{alias.name}" if is_module else str(node.module)


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Each of our modules by its name."""
    for name, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder).with_suffix("").parts
            module = ".".join([name, *inside]).removesuffix(".__init__")
            yield module, ast.parse(path.read_text())


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when a module is imported: everything outside of functions and of ``if TYPE_CHECKING``."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not is_for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            left += ast.iter_child_nodes(node)


def upward(module: str, tree: ast.Module) -> list[str]:
    """Imports of a module, wherever they stand in it, that its part of the house may not make."""
    part = part_of(module)
    if part in ANYTHING:
        return []
    ours = {part_of(name) for node in ast.walk(tree) for name in named_by(node) if name.split(".")[0] in SOURCES}
    return [f"{module} imports {name}" for name in sorted(ours - ALLOWED[part] - {part})]


def heavy(module: str, tree: ast.Module) -> list[str]:
    """What a module of the engine's process imports at once and shouldn't."""
    named = {name.split(".")[0] for node in at_import(tree) for name in named_by(node)}
    return [f"{module} imports {name}" for name in sorted(named & HEAVY)] if part_of(module) in IN_THE_ENGINE else []


def test_imports_point_downwards_only():
    assert [wrong for module, tree in parsed() for wrong in upward(module, tree)] == []


def test_what_an_engine_imports_is_light():
    assert [wrong for module, tree in parsed() for wrong in heavy(module, tree)] == []


def test_the_table_itself_has_no_circle():
    allowed, sunk = {part: set(below) for part, below in ALLOWED.items()}, set()
    while bottom := {part for part, below in allowed.items() if below <= sunk}:
        sunk |= bottom
        allowed = {part: below for part, below in allowed.items() if part not in bottom}
    assert not allowed


@pytest.mark.parametrize(
    "line",
    ["from tracekv.agent.feed import Feed", "import tracekv.cli", "from tracekv import rules", "import tracekv_fsspec"],
)
def test_an_import_that_points_upwards_is_found(line):
    assert upward("tracekv.views.made_up", ast.parse(line))
    assert upward("tracekv.views.made_up", ast.parse(f"def later():\n    {line}"))


def test_an_import_that_may_wait_is_not_heavy():
    assert heavy("tracekv.journal.made_up", ast.parse("import rich.table"))
    assert not heavy("tracekv.journal.made_up", ast.parse("def later():\n    import rich.table"))
    assert not heavy("tracekv.cli.made_up", ast.parse("import rich.table"))

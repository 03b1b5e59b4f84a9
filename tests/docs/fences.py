"""The shell blocks of Markdown pages, and which of them say that they don't run here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SHELLS = ("sh", "bash")
NO_RUN = "no-run"
#: Programs of ours, and those that our pages call to install or check.
PROGRAMS = ("tracekv", "make", "pip", "promtool")
_OTHER_LANGUAGES = ("python", "yaml", "json")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(rf"^\s*(?:\$ +)?(?:\w+=\S* +)*(?:{'|'.join(PROGRAMS)}|python\d? -m \S+)(?: |$)")


class Block(NamedTuple):
    """A fenced block: its info string's words, and its lines."""

    info: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def is_shell(self) -> bool:
        return bool(self.info) and self.info[0] in SHELLS

    @property
    def runs(self) -> bool:
        return self.is_shell and NO_RUN not in self.info

    @property
    def looks_like_shell(self) -> bool:
        is_other = bool(self.info) and self.info[0] in _OTHER_LANGUAGES
        return not is_other and any(_COMMAND.match(line) for line in self.lines)


def blocks_of(text: str) -> list[Block]:
    return [Block(tuple(f["info"].split()), tuple(f["body"].splitlines())) for f in _FENCE.finditer(text)]


def pages() -> dict[str, list[Block]]:
    """Every page of the repository with its blocks, by its path."""
    found = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    return {str(path.relative_to(ROOT)): blocks_of(path.read_text(encoding="utf-8")) for path in sorted(found)}

"""``docs/performance.md``: each benchmark replaces its own part and leaves the others alone."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tracekv._version import __version__

_HEAD = """# Performance

Written by `tracekv bench NAME --write FILE`; each part names the machine it was measured on. Numbers are medians of interleaved rounds
with the smallest and largest in brackets; ratios compare what ran in the same rounds. Absolute times of a shared machine are
no promise.
"""


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "| " + " | ".join("---" for _ in headings) + " |"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def machine(*packages: str) -> str:
    """What it was measured on, in a line."""
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    parts = [f"tracekv {__version__}", f"Python {platform.python_version()}"]
    for package in packages:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return f"{day}, {len(os.sched_getaffinity(0))} cores of {model}, Linux {platform.release().split('-')[0]}, {', '.join(parts)}"


def write_part(path: Path, name: str, title: str, body: str) -> None:
    """Put the part ``name`` of the page in place of its former one, or at the end."""
    text = path.read_text(encoding="utf-8") if path.exists() else _HEAD
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    part = f"{begin}\n## {title}\n\n{body.strip()}\n{end}\n"
    if begin in text and end in text:
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + part + after.lstrip("\n")
    else:
        text = text.rstrip("\n") + "\n\n" + part
    path.write_text(text, encoding="utf-8")
    sys.stderr.write(f"wrote the part {name} of {path}\n")

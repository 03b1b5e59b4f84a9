"""Write the table of settings in docs/settings.md from the comments of the settings structs: ``python tools/settings_table.py``."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import msgspec

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- settings: tools/settings_table.py -->", "<!-- end of settings -->"
STRUCTS = (("TRACEKV_", "tracekv.settings"), ("TRACEKV_FSSPEC__", "tracekv_fsspec.settings"))


def table() -> str:
    """A row per variable: name, default, meaning."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    rows.append("| `TRACEKV_CONFIG` | | YAML file with the same tree; variables win |")
    for prefix, module in STRUCTS:
        struct = importlib.import_module(module).Settings
        meanings = _comments(inspect.getsource(struct))
        for field in msgspec.structs.fields(struct):
            rows.append(f"| `{prefix}{field.name.upper()}` | {_default(field)} | {meanings[field.name]} |")
    return "\n".join(rows)


def _comments(source: str) -> dict[str, str]:
    found = {}
    for match in re.finditer(r"((?:^    #: .*\n(?:^    #: .*\n)*))^    (\w+):", source, re.MULTILINE):
        lines = [line.strip().removeprefix("#:").strip() for line in match.group(1).splitlines()]
        found[match.group(2)] = " ".join(lines).replace("``", "`").replace("|", "\\|")
    return found


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        return "" if field.default_factory in (dict, list) else "in the user's cache folder"
    if field.default in (None, {}):
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def updated(page: str) -> str:
    """The page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

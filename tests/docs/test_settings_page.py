from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_settings_table_is_what_the_settings_say():
    tool = runpy.run_path(str(ROOT / "tools" / "settings_table.py"))
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == tool["updated"](page), "run: .venv/bin/python tools/settings_table.py"
    assert page.count("| `TRACEKV_") > 10

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_settings_table_is_what_the_settings_say():
    tool = runpy.run_path(str(ROOT / "tools" / "settings_table.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == tool["updated"](readme), "run: .venv/bin/python tools/settings_table.py"
    assert readme.count("| `TRACEKV_") > 10


def test_the_places_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `") and "/`" in line]
    assert places
    for place in places:
        assert (ROOT / place).is_dir(), place

"""The committed page is the one that the code makes, and it leaves no record out."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec

from tracekv.journal import records
from tracekv.journal.format_page import page

PAGE = Path(__file__).parents[2] / "docs" / "journal-format.md"


def test_the_committed_page_is_what_the_code_makes():
    assert PAGE.read_text() == page(), "run: python -m tracekv.journal.format_page > docs/journal-format.md"


def test_every_record_and_field_is_on_the_page():
    text = page()
    for kind in get_args(records.AnyRecord):
        section = text.partition(f"### {kind.__struct_config__.tag}: {kind.__name__}\n")[2].partition("\n### ")[0]
        own = section + (text if issubclass(kind, records.Call) else "")
        for field in msgspec.structs.fields(kind):
            assert f"| {field.name} |" in own

"""What mkdocs is told about these pages beyond ``mkdocs.yml``: hooks that it calls while it builds the site."""

from __future__ import annotations

import re
from typing import Any

#: A mark of ours, for the test that runs what the pages say; the site's parser takes such a line for no code at all.
_MARK = re.compile(r"^(\s*```\w+) no-run$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page without marks."""
    return _MARK.sub(r"\1", markdown)

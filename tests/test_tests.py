from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports them by their bare names: two of one name break the collection of the whole suite."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []

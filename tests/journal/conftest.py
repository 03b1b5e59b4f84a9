from __future__ import annotations

from pathlib import Path

import pytest
from ring_support import SMALL

from tracekv.journal.ring import RingJournal


@pytest.fixture
def journal(tmp_path: Path) -> RingJournal:
    return RingJournal.create(tmp_path / "test.tkvring", SMALL)

"""Fixtures of the tests of stores and of what is built on them: URLs of each kind, a store with faults, and what was reported."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from tests.support.faulty import FaultyFileSystem
from tracekv.journal.current import current
from tracekv.journal.memory import MemoryJournal


class Records:
    """What was reported since the test began."""

    def __init__(self, journal):
        self._journal = journal

    def of(self, kind):
        found, _, lost = self._journal.read(0)
        assert not lost
        return [record for record in found if type(record) is kind]


@pytest.fixture
def records(monkeypatch):
    journal = MemoryJournal()
    monkeypatch.setattr(current, "journal", journal)
    return Records(journal)


@pytest.fixture
def faulty():
    """The faulty file system, empty and without faults."""
    FaultyFileSystem.reset()
    yield FaultyFileSystem
    FaultyFileSystem.reset()


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def any_url(request, tmp_path):
    """A URL of each kind, with nothing below it."""
    name = uuid.uuid4().hex
    if request.param == "file":
        yield (tmp_path / "store").as_uri()
    elif request.param == "memory":
        fsspec.filesystem("memory").makedirs(name)
        yield f"memory://{name}"
        fsspec.filesystem("memory").rm(name, recursive=True)
    else:
        yield f"s3://{request.getfixturevalue('s3').bucket}/{name}"

"""Stores of each kind, bare and with everything around them; nodes without an engine or torch."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from tests.fsspec.faulty import FaultyFileSystem
from tests.store.node import Node
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
def s3_url(s3):
    """A prefix of the server's bucket with nothing below it."""
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def node(tmp_path):
    """Make stagers; by default of one folder."""
    made = []

    def make(url=None, page_bytes=None, **settings):
        made.append(Node(url or (tmp_path / "kv").as_uri(), page_bytes, **settings))
        return made[-1]

    yield make
    for each in made:
        each.stager.close()


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

"""Stores of each kind; nodes without an engine or torch."""

from __future__ import annotations

import uuid

import pytest

from tests.store.node import Node
from tests.support.stores import any_url, faulty, records

__all__ = ["any_url", "faulty", "records"]


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

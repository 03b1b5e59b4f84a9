"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.seaweed import S3Server, seaweed


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for all tests that want one; it is started for the first of them."""
    with seaweed() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, with the AWS variables naming it for the time of this test."""
    for name, value in s3_server.environ().items():
        monkeypatch.setenv(name, value)
    return s3_server

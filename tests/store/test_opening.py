"""Opening a store, and what is said where it can't be used. What any store has to do is in ``tracekv_fsspec.testing``."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tracekv.journal.vocabulary import Outcome
from tracekv_fsspec import protocols
from tracekv_fsspec.store import (
    AlreadyExists,
    Deadlines,
    StoreError,
    StoreUnusable,
    check_usable,
    open_store,
    read_whole,
)
from tracekv_fsspec.testing import read
from tracekv_fsspec.wrappers import retry

CLIENTS = pytest.mark.parametrize("client", ["obstore", "s3fs"])
PATIENT = Deadlines(120.0, 120.0)


@pytest.fixture
def store(any_url):
    opened = open_store(any_url)
    yield opened
    opened.close()


def test_neighbours_are_one_request(faulty):
    store = open_store("faulty://kv")
    store.put("a", bytes(10_000), create_only=True)
    faulty.calls.clear()
    read(store, "a", (0, 100), (100, 50), (150, 3), (500, 10), (510, 10))
    assert [operation for operation, *_ in faulty.calls] == ["read", "read"]


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put("a", b"", create_only=True)


def test_a_forked_child_is_refused(any_url, store):
    store.put("a", b"1", create_only=True)
    child = os.fork()
    if child == 0:  # nothing of the test session may run on in here
        try:
            read(store, "a", (0, 1))
        except StoreError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_file_is_never_seen_half_written(tmp_path, monkeypatch):
    store = open_store(tmp_path.as_uri())
    seen = []
    link = os.link

    def watched(source, target):
        seen.append((list(store.list("")), Path(source).stat().st_size, Path(target).exists()))
        link(source, target)

    monkeypatch.setattr(os, "link", watched)
    store.put("d/a", bytes(10_000), create_only=True)
    assert seen == [([], 10_000, False)]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["a"]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    store = open_store(tmp_path.as_uri())

    def no_room(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", no_room)
    with pytest.raises(StoreError) as caught:
        store.put("d/a", bytes(10_000), create_only=True)
    assert caught.value.outcome is Outcome.NO_SPACE
    assert list((tmp_path / "d").iterdir()) == []


def test_a_full_disk_is_no_space(tmp_path):
    """A real one: the store lies on a small tmpfs of its own mount namespace."""
    script = (
        "import subprocess, sys\n"
        "from tracekv_fsspec.store import open_store, StoreError\n"
        f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', {str(tmp_path)!r}], check=True)\n"
        f"store = open_store({tmp_path.as_uri()!r})\n"
        "store.put('small', b'1', create_only=True)\n"
        "try:\n"
        "    store.put('large', bytes(1 << 20), create_only=True)\n"
        "except StoreError as error:\n"
        "    print(error.outcome.value, [entry.path for entry in store.list('')])\n"
    )
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "no_space ['small']", done.stderr


@pytest.mark.s3
@CLIENTS
def test_a_bucket_that_isnt_there_is_said_with_what_to_do(s3, client):
    with pytest.raises(StoreUnusable, match=r"s3://no-such-bucket/x.*missing.*create it"):
        check_usable(open_store("s3://no-such-bucket/x", s3_client=client))


@pytest.mark.s3
@CLIENTS
@pytest.mark.parametrize("how", ["variables", "options"])
def test_wrong_credentials_are_said_without_the_key(s3, monkeypatch, how, client, caplog):
    secret, access = "hunter2-very-secret", "tracekv-access"
    options = {}
    if how == "variables":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    else:
        options = {"key": access, "secret": secret}
    with pytest.raises(StoreUnusable, match="denied") as caught:
        check_usable(open_store(f"s3://{s3.bucket}/x", options, s3_client=client))
    chain, seen = caught.value, []
    while chain is not None:
        seen.append(str(chain))
        chain = chain.__cause__
    for text in (*seen, caplog.text):
        assert secret not in text
        assert access not in text
    assert "AWS_SECRET_ACCESS_KEY" in seen[0]


@pytest.mark.s3
@CLIENTS
def test_an_unreachable_server_is_said_with_what_to_do(s3, monkeypatch, client):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    # One try with all the time that a busy machine takes for it: a later try's timeout would be said in its place.
    monkeypatch.setattr(retry, "_WORTH_ANOTHER_TRY", frozenset())
    with pytest.raises(StoreUnusable, match=r"unavailable.*AWS_ENDPOINT_URL"):
        check_usable(open_store(f"s3://{s3.bucket}/x", s3_client=client, deadlines=PATIENT))


@pytest.mark.s3
def test_a_large_object_on_s3_is_created_once_and_whole(s3):
    store = open_store(f"s3://{s3.bucket}/{uuid.uuid4().hex}")
    data = bytes(12 << 20)
    store.put("large", data, create_only=True)
    with pytest.raises(AlreadyExists):
        store.put("large", data, create_only=True)
    assert read_whole(store, "large", len(data)) == data
    store.close()


def test_a_folder_that_cant_be_written_is_said(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    url = (tmp_path / "file").as_uri()
    with pytest.raises(StoreUnusable) as caught:
        check_usable(open_store(f"{url}/store"))
    assert f"TRACEKV_FSSPEC__URL={url}/store can't be written to" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [("nonsense://x", "nonsense"), ("s3://bucket/x", "no_such_option")],
)
def test_a_url_or_option_that_fsspec_doesnt_know_is_said(url, said):
    options = {"config_kwargs": {"no_such_option": 1}} if url.startswith("s3") else {}
    with pytest.raises(StoreUnusable, match=said):
        check_usable(open_store(url, options))


def test_a_url_is_shown_without_its_password():
    assert protocols.shown_url("ftp://me:pw@host/x") == "ftp://host/x"
    assert protocols.shown_url("simplecache::s3://bucket/x") == "simplecache::s3://bucket/x"


def test_secrets_of_url_options_and_environment_are_hidden(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "from-environment")
    hidden = protocols.Secrets(
        "ftp://someone:from-url@host", {"client_kwargs": {"aws_secret_access_key": "from-options"}}
    )
    text = hidden.hidden_in("someone from-url from-options from-environment stays")
    assert text == "*** *** *** *** stays"


def test_who_empties_a_folder_is_in_nobodys_way(tmp_path):
    """Engines that start together try the store in the same folder."""
    stores = [open_store(tmp_path.as_uri(), {}) for _ in range(4)]

    def write_and_delete(number):
        for turn in range(200):
            path = f"probe/{number}-{turn}"
            stores[number].put(path, b"x", create_only=True)
            stores[number].delete(path)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write_and_delete, range(4))) == [None] * 4

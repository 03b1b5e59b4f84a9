"""What any store has to do; objects are put and looked at past the store under test, through fsspec itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

from tracekv.journal.vocabulary import Outcome, Tier
from tracekv_fsspec import protocols
from tracekv_fsspec.store import AlreadyExists, Entry, Range, StoreError, StoreUnusable, check_usable, open_store


@pytest.fixture
def store(any_url):
    opened = open_store(any_url)
    yield opened
    opened.close()


@pytest.fixture
def beside(any_url):
    """Set and get objects without the store under test."""
    fs, root = fsspec.core.url_to_fs(any_url, skip_instance_cache=True, use_listings_cache=False)

    class Beside:
        def set(self, path, data):
            if any_url.startswith("file"):
                Path(root, path).parent.mkdir(parents=True, exist_ok=True)
            fs.pipe_file(f"{root}/{path}", data)

        def get(self, path):
            return fs.cat_file(f"{root}/{path}", start=0, end=1 << 20)

        def remove(self, path):
            fs.rm_file(f"{root}/{path}")

    return Beside()


def read(store, path, *ranges):
    buffers = [bytearray(length) for _, length in ranges]
    store.read(path, [Range(*r) for r in ranges], [memoryview(b) for b in buffers])
    return [bytes(b) for b in buffers]


def test_what_is_put_is_there(store, beside):
    store.put("a/b/c", bytearray(b"hello"), create_only=True)
    assert beside.get("a/b/c") == b"hello"


def test_a_second_create_is_told_and_leaves_the_first(store, beside):
    store.put("a", b"first", create_only=True)
    with pytest.raises(AlreadyExists) as caught:
        store.put("a", b"second", create_only=True)
    assert caught.value.outcome is Outcome.EXISTS
    assert beside.get("a") == b"first"


def test_a_write_that_isnt_create_only_replaces(store, beside):
    store.put("a", b"first", create_only=True)
    store.put("a", b"second", create_only=False)
    assert beside.get("a") == b"second"


def test_a_create_race_has_one_winner(store, beside):
    won, lost = [], []
    start = threading.Barrier(8)

    def create(number):
        start.wait()
        try:
            store.put("raced", b"%d" % number * 5000, create_only=True)
            won.append(number)
        except AlreadyExists:
            lost.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert beside.get("raced") == b"%d" % won[0] * 5000


def test_ranges_fill_their_buffers(store, beside):
    data = bytes(range(256)) * 40
    beside.set("a", data)
    ranges = [(0, 10), (10, 90), (100, 1), (5000, 240), (10_000, 240)]
    assert read(store, "a", *ranges) == [data[at : at + length] for at, length in ranges]
    assert read(store, "a") == []


def test_neighbours_are_one_request(faulty):
    store = open_store("faulty://kv")
    store.put("a", bytes(10_000), create_only=True)
    faulty.calls.clear()
    read(store, "a", (0, 100), (100, 50), (150, 3), (500, 10), (510, 10))
    assert [operation for operation, *_ in faulty.calls] == ["read", "read"]


@pytest.mark.parametrize("wanted", [(3, 3), (5, 1), (100, 5)])
def test_a_range_past_the_end_is_truncated(store, beside, wanted):
    beside.set("a", b"hello")
    with pytest.raises(StoreError) as caught:
        read(store, "a", wanted)
    assert caught.value.outcome is Outcome.TRUNCATED


def test_an_object_that_isnt_there_is_missing(store):
    with pytest.raises(StoreError) as caught:
        read(store, "nobody", (0, 1))
    assert caught.value.outcome is Outcome.MISSING


def test_a_whole_object_is_read_by_its_size(store, beside):
    beside.set("a", b"hello")
    beside.set("none", b"")
    assert store.read_all("a", 5) == b"hello"
    assert store.read_all("none", 0) == b""
    with pytest.raises(StoreError):
        store.read_all("a", 6)


def test_a_listing_is_in_order_and_goes_on_behind_a_path(store, beside):
    for path in ("m/w2/000", "m/w1/001", "m/w1/000", "s/x"):
        beside.set(path, path.encode())
    assert list(store.list("m/")) == [Entry("m/w1/000", 8), Entry("m/w1/001", 8), Entry("m/w2/000", 8)]
    assert list(store.list("m/", after="m/w1/000")) == [Entry("m/w1/001", 8), Entry("m/w2/000", 8)]
    assert list(store.list("m/w2/")) == [Entry("m/w2/000", 8)]
    assert list(store.list("nothing/")) == []


def test_no_cache_hides_what_others_do(store, beside):
    assert list(store.list("m/")) == []
    beside.set("m/1", b"1")
    assert list(store.list("m/")) == [Entry("m/1", 1)]
    assert read(store, "m/1", (0, 1)) == [b"1"]
    beside.set("m/1", b"22")
    assert list(store.list("m/")) == [Entry("m/1", 2)]
    assert read(store, "m/1", (0, 2)) == [b"22"]
    beside.remove("m/1")
    assert list(store.list("m/")) == []


def test_a_delete_is_gone_and_may_be_repeated(store, beside):
    beside.set("a", b"1")
    store.delete("a")
    store.delete("a")
    assert list(store.list("")) == []


def test_a_usable_store_is_left_as_it_was(store):
    check_usable(store)
    assert list(store.list("")) == []


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put("a", b"", create_only=True)


def test_reports_name_the_engine_and_its_tier(any_url, store):
    kind = any_url.split(":")[0]
    expected = {"file": ("local", Tier.DISK), "memory": ("memory", Tier.HOST), "s3": ("s3", Tier.OBJECT)}[kind]
    assert (store.engine, store.tier) == expected
    assert (store.bucket is not None) == (kind == "s3")


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
def test_a_bucket_that_isnt_there_is_said_with_what_to_do(s3):
    with pytest.raises(StoreUnusable, match=r"s3://no-such-bucket/x.*missing.*create it"):
        check_usable(open_store("s3://no-such-bucket/x"))


@pytest.mark.s3
@pytest.mark.parametrize("how", ["variables", "options"])
def test_wrong_credentials_are_said_without_the_key(s3, monkeypatch, how, caplog):
    secret, access = "hunter2-very-secret", "tracekv-access"
    options = {}
    if how == "variables":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    else:
        options = {"key": access, "secret": secret}
    with pytest.raises(StoreUnusable, match="denied") as caught:
        check_usable(open_store(f"s3://{s3.bucket}/x", options))
    chain, seen = caught.value, []
    while chain is not None:
        seen.append(str(chain))
        chain = chain.__cause__
    for text in (*seen, caplog.text):
        assert secret not in text
        assert access not in text
    assert "AWS_SECRET_ACCESS_KEY" in seen[0]


@pytest.mark.s3
def test_an_unreachable_server_is_said_with_what_to_do(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreUnusable, match=r"unavailable.*AWS_ENDPOINT_URL"):
        check_usable(open_store(f"s3://{s3.bucket}/x"))


@pytest.mark.s3
def test_a_large_object_on_s3_is_created_once_and_whole(s3):
    store = open_store(f"s3://{s3.bucket}/{uuid.uuid4().hex}")
    data = bytes(12 << 20)
    store.put("large", data, create_only=True)
    with pytest.raises(AlreadyExists):
        store.put("large", data, create_only=True)
    assert store.read_all("large", len(data)) == data
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

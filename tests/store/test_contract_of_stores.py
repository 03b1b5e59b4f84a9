"""Every engine keeps the contract, bare and with the wrappers around it."""

from __future__ import annotations

import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import botocore.session
import fsspec
import pytest

from tracekv.journal.vocabulary import Tier
from tracekv_fsspec.engines.generic import FsspecStore
from tracekv_fsspec.engines.local import LocalStore
from tracekv_fsspec.engines.s3 import S3Store
from tracekv_fsspec.store import Deadlines, Store, open_engine, open_store
from tracekv_fsspec.testing import StoreContract


class OnFiles(StoreContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.root = tmp_path / "store"
        return self.root

    def set(self, path, data):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def get(self, path):
        return (self.root / path).read_bytes()

    def remove(self, path):
        (self.root / path).unlink()


class TestLocalEngine(OnFiles):
    @pytest.fixture
    def store(self, folder):
        store = open_engine(folder.as_uri())
        assert isinstance(store, LocalStore)
        yield store
        store.close()

    def test_reports_name_it(self, store):
        assert (store.engine, store.tier, store.bucket) == ("local", Tier.DISK, None)


class TestLocalEngineWhereEverythingIsCached(TestLocalEngine):
    """What was just written is, mostly; a kernel without cachestat(2) can't tell."""

    @pytest.fixture(autouse=True)
    def cached(self, monkeypatch):
        monkeypatch.setattr("tracekv_fsspec.engines.local._is_cached", lambda descriptor, offset, length: True)


class TestLocalEngineWhereNothingGoesPastThePageCache(TestLocalEngine):
    """A tmpfs of older kernels, NFS: O_DIRECT is refused when it is asked for."""

    @pytest.fixture(autouse=True)
    def refused(self, monkeypatch):
        monkeypatch.setattr("tracekv_fsspec.engines.local._set_direct", lambda descriptor: False)


class TestGuardedStore(OnFiles):
    @pytest.fixture
    def store(self, folder):
        store = open_store(folder.as_uri())
        yield store
        store.close()


class TestFilesThroughFsspec(OnFiles):
    """The generic engine over files: its listing finds no ``after``, and creating isn't atomic, which it says."""

    @pytest.fixture
    def store(self, folder):
        fs = fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)
        from tracekv_fsspec import protocols

        store = FsspecStore(fs, str(folder), "other", folder.as_uri(), protocols.Secrets("", {}), Deadlines())
        assert not store.is_create_atomic
        yield store
        store.close()


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self):
        self.fs = fsspec.filesystem("memory")
        self.name = uuid.uuid4().hex
        self.fs.makedirs(self.name)
        store = open_engine(f"memory://{self.name}")
        yield store
        store.close()
        self.fs.rm(self.name, recursive=True)

    def set(self, path, data):
        self.fs.pipe_file(f"{self.name}/{path}", data)

    def get(self, path):
        return self.fs.cat_file(f"{self.name}/{path}")

    def remove(self, path):
        self.fs.rm_file(f"{self.name}/{path}")

    def test_reports_name_it(self, store):
        assert (store.engine, store.tier, store.bucket) == ("memory", Tier.HOST, None)


@pytest.mark.s3
class OnS3(StoreContract):
    """Objects are put and looked at with botocore's plain client."""

    client_name: str
    kind: type

    @pytest.fixture
    def store(self, s3, s3_url):
        self.client = botocore.session.Session().create_client("s3", region_name="us-east-1")
        self.bucket, _, self.prefix = s3_url.removeprefix("s3://").partition("/")
        store: Store = open_engine(s3_url, s3_client=self.client_name, deadlines=Deadlines(60, 60))
        assert isinstance(store, self.kind)
        yield store
        store.close()
        self.client.close()

    def set(self, path, data):
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}", Body=data)

    def get(self, path):
        return self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}")["Body"].read()

    def remove(self, path):
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{path}")

    def test_reports_name_it(self, store):
        assert (store.engine, store.tier, store.bucket) == ("s3", Tier.OBJECT, self.bucket)


class TestS3ThroughObstore(OnS3):
    client_name = "obstore"
    kind = S3Store

    def test_a_listing_has_more_than_one_page(self, store):
        wanted = [f"m/{number:04d}" for number in range(1003)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda path: store.put(path, b"", create_only=True), wanted))
        assert [entry.path for entry in store.list("m/")] == wanted
        assert [entry.path for entry in store.list("m/", after="m/0999")] == wanted[1000:]


class TestS3ThroughS3fs(OnS3):
    client_name = "s3fs"
    kind = FsspecStore


def test_a_contract_without_its_fixture_says_so():
    with pytest.raises(NotImplementedError):
        StoreContract().set("a", b"")


def test_a_folder_with_odd_characters_in_its_name_is_that_folder(tmp_path):
    odd = tmp_path / "my cache %20 #1"
    store = open_store(f"file://{odd}")
    store.put("a", b"1", create_only=True)
    assert Path(odd, "a").read_bytes() == b"1"
    shutil.rmtree(odd)

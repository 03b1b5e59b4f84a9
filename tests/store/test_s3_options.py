"""Storage options as fsspec users write them, for either S3 client."""

from __future__ import annotations

import configparser

import pytest

from tracekv_fsspec.s3_options import s3_access
from tracekv_fsspec.settings import Settings
from tracekv_fsspec.store import StoreUnusable, check_usable, open_store, read_whole

KEYS = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "S"}


def access(options, **environ):
    return s3_access(options, "s3://b/p", {**KEYS, **environ})


def test_options_mean_the_same_as_for_s3fs():
    made = access(
        {
            "key": "k", "secret": "s", "token": "t", "requester_pays": True, "use_ssl": True,
            "client_kwargs": {"region_name": "eu-west-1", "verify": False},
            "config_kwargs": {"connect_timeout": 2, "s3": {"addressing_style": "virtual"}},
            "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id", "BucketKeyEnabled": True},
        }
    )  # fmt: skip
    assert made.config == {
        "aws_access_key_id": "k", "aws_secret_access_key": "s", "aws_session_token": "t", "aws_request_payer": True,
        "aws_region": "eu-west-1", "aws_virtual_hosted_style_request": True, "aws_server_side_encryption": "aws:kms",
        "aws_sse_kms_key_id": "id", "aws_sse_bucket_key_enabled": True, "aws_unsigned_payload": True,
    }  # fmt: skip
    assert made.client_options["allow_invalid_certificates"] is True
    assert made.client_options["connect_timeout"].total_seconds() == 2
    assert made.credentials is None


@pytest.mark.parametrize(
    ("endpoint", "is_unsigned"), [(None, True), ("https://minio:9000", True), ("http://minio:9000", False)]
)
def test_bodies_are_left_unsigned_only_over_tls(endpoint, is_unsigned):
    made = access({"endpoint_url": endpoint} if endpoint else {})
    assert made.config["aws_unsigned_payload"] is is_unsigned
    assert made.client_options["allow_http"] is (not is_unsigned)


def test_bodies_are_left_unsigned_elsewhere_where_that_is_allowed():
    made = access({"unsigned_payload": True}, AWS_ENDPOINT_URL_S3="http://minio:9000", AWS_ENDPOINT_URL="https://x")
    assert made.config["aws_unsigned_payload"] is True
    assert made.config["aws_endpoint"] == "http://minio:9000"


def test_anonymous_access_looks_for_no_keys():
    assert s3_access({"anon": True}, "s3://b", {}).config["aws_skip_signature"] is True


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"no_such_option": 1}, "no_such_option"),
        ({"default_block_size": 5}, "default_block_size"),
        ({"client_kwargs": {"verify": "/ca.pem"}}, "client_kwargs.verify"),
        ({"config_kwargs": {"max_pool_connections": 5}}, "config_kwargs.max_pool_connections"),
        ({"config_kwargs": {"s3": {"payload_signing_enabled": True}}}, "config_kwargs.s3"),
        ({"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
        ({"use_ssl": False}, "use_ssl"),
    ],
)
def test_what_obstore_cant_express_is_refused_by_name(options, name):
    with pytest.raises(StoreUnusable, match=f"{name}.*TRACEKV_FSSPEC__S3_CLIENT=s3fs"):
        open_store("s3://b/p", options)


@pytest.mark.parametrize("name", ["no_such_option", "unsigned_payload"])
def test_what_s3fs_doesnt_know_is_refused_by_name(name):
    with pytest.raises(StoreUnusable, match=name):
        open_store("s3://b/p", {name: 1}, s3_client="s3fs")


def test_what_files_dont_know_is_refused_by_name(tmp_path):
    with pytest.raises(StoreUnusable, match="endpoint_url"):
        open_store(tmp_path.as_uri(), {"endpoint_url": "x"})


def test_obstore_is_the_client_unless_another_is_named():
    assert Settings().s3_client == "obstore"


def profile_of(s3, tmp_path, monkeypatch):
    parser = configparser.ConfigParser()
    parser["profile work"] = {
        "aws_access_key_id": s3.access_key, "aws_secret_access_key": s3.secret_key, "region": "us-east-1",
        "endpoint_url": s3.endpoint,
    }  # fmt: skip
    with (tmp_path / "config").open("w") as file:
        parser.write(file)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in s3.environ():
        monkeypatch.delenv(name)


@pytest.mark.s3
@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_profile_of_the_usual_files_is_used(s3, s3_url, tmp_path, monkeypatch, how):
    profile_of(s3, tmp_path, monkeypatch)
    if how == "variable":
        monkeypatch.setenv("AWS_PROFILE", "work")
    store = open_store(s3_url, {"profile": "work"} if how == "option" else {})
    check_usable(store)
    store.close()


@pytest.mark.s3
def test_a_role_that_is_renewed_is_used_anew(s3, tmp_path, monkeypatch):
    """A credential process stands for any source whose keys expire: botocore runs it again when they are due."""
    script = tmp_path / "issue"
    script.write_text(
        "#!/bin/sh\n"
        f"echo run >> {tmp_path}/runs\n"
        f'echo \'{{"Version": 1, "AccessKeyId": "{s3.access_key}", "SecretAccessKey": "{s3.secret_key}", '
        '"SessionToken": null, "Expiration": "2000-01-01T00:00:00Z"}\'\n'
    )
    script.chmod(0o755)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    made = s3_access({}, "s3://b")
    with pytest.raises(Exception, match="expired"):
        made.credentials()  # it asks for new ones, and says that these are old, too
    assert len((tmp_path / "runs").read_text().split()) >= 2


def test_a_profile_that_isnt_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreUnusable, match="nobody"):
        open_store("s3://b/p", {"profile": "nobody"})


@pytest.mark.s3
def test_encryption_is_asked_of_the_server(s3, s3_url):
    store = open_store(s3_url, {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}})
    store.put("a", b"secret", create_only=True)
    assert read_whole(store, "a", 6) == b"secret"
    import botocore.session

    client = botocore.session.Session().create_client("s3", region_name="us-east-1")
    head = client.head_object(Bucket=s3.bucket, Key=s3_url.split("/", 3)[3] + "/a")
    assert head["ServerSideEncryption"] == "AES256"
    client.close()
    store.close()


@pytest.mark.s3
def test_unsigned_bodies_are_taken(s3, s3_url):
    store = open_store(s3_url, {"unsigned_payload": True})
    check_usable(store)
    store.close()

"""Storage options by the names that fsspec users know (s3fs's), as obstore takes them; what it can't express is refused by name.

Credentials come from the options, else from the usual chain: keys in the environment, then whatever botocore finds (profiles, assumed
roles, SSO, web identity, container, instance), refreshed as it sees fit; without botocore obstore's own part of that chain.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tracekv_fsspec.store_errors import StoreUnusable

#: How long credentials are used before botocore is asked again; it refreshes roles well before they expire.
_ASK_AGAIN = timedelta(minutes=5)

_PLAIN = {
    "key": "aws_access_key_id",
    "username": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "password": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "requester_pays": "aws_request_payer",
    "unsigned_payload": "aws_unsigned_payload",
}
_CLIENT = {
    "region_name": "aws_region",
    "endpoint_url": "aws_endpoint",
    "aws_access_key_id": "aws_access_key_id",
    "aws_secret_access_key": "aws_secret_access_key",
    "aws_session_token": "aws_session_token",
}
_ADDITIONAL = {
    "ServerSideEncryption": "aws_server_side_encryption",
    "SSEKMSKeyId": "aws_sse_kms_key_id",
    "BucketKeyEnabled": "aws_sse_bucket_key_enabled",
    "RequestPayer": "aws_request_payer",
}


@dataclass
class S3Access:
    """How to reach a bucket.

    Attributes:
        config: obstore's settings of the store; it holds keys and is never printed.
        client_options: obstore's settings of its HTTP client.
        credentials: Called for the keys of the moment, or None where obstore has or finds them.
    """

    config: dict[str, Any] = field(default_factory=dict, repr=False)
    client_options: dict[str, Any] = field(default_factory=dict)
    credentials: Callable[[], dict[str, Any]] | None = field(default=None, repr=False)


def s3_access(options: Mapping[str, Any], shown_url: str, environ: Mapping[str, str] | None = None) -> S3Access:
    """Options and environment together.

    Raises:
        StoreUnusable: obstore can't express an option, or a profile isn't there.
    """
    environ = os.environ if environ is None else environ
    access = S3Access()
    for name, value in options.items():
        _take(access, name, value, shown_url)
    config = access.config
    if "aws_access_key_id" not in config and not config.get("aws_skip_signature"):
        _find_credentials(access, options.get("profile"), environ, shown_url)
    endpoint = (
        config.get("aws_endpoint") or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        or environ.get("AWS_ENDPOINT")
    )  # fmt: skip
    if endpoint:
        config["aws_endpoint"] = endpoint
    is_tls = not endpoint or endpoint.lower().startswith("https:")
    access.client_options["allow_http"] = not is_tls
    # Over TLS the body can't be changed on its way, and each block has its own checksum; hashing it again for the
    # signature would cost four times the sending.
    config.setdefault("aws_unsigned_payload", is_tls)
    for variable in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if environ.get(variable):
            config.setdefault("aws_region", environ[variable])
    return access


def _take(access: S3Access, name: str, value: Any, shown_url: str) -> None:
    if name in _PLAIN:
        access.config[_PLAIN[name]] = value
    elif name == "anon":
        access.config["aws_skip_signature"] = bool(value)
    elif (name == "use_ssl" and value is True) or name == "profile":
        pass  # https is the rule; the profile is read with the credentials
    elif name == "client_kwargs":
        for inner, setting in value.items():
            if inner == "verify" and isinstance(setting, bool):
                access.client_options["allow_invalid_certificates"] = not setting
            elif inner in _CLIENT:
                access.config[_CLIENT[inner]] = setting
            else:
                _refuse(f"client_kwargs.{inner}", shown_url)
    elif name == "s3_additional_kwargs":
        for inner, setting in value.items():
            if inner not in _ADDITIONAL:
                _refuse(f"s3_additional_kwargs.{inner}", shown_url)
            access.config[_ADDITIONAL[inner]] = setting
    elif name == "config_kwargs":
        _take_config(access, value, shown_url)
    else:
        _refuse(name, shown_url)


def _take_config(access: S3Access, values: Mapping[str, Any], shown_url: str) -> None:
    for inner, setting in values.items():
        if inner == "connect_timeout":
            access.client_options["connect_timeout"] = timedelta(seconds=float(setting))
        elif inner == "region_name":
            access.config["aws_region"] = setting
        elif inner == "s3" and set(setting) <= {"addressing_style"} and setting.get("addressing_style") != "auto":
            access.config["aws_virtual_hosted_style_request"] = setting.get("addressing_style") == "virtual"
        else:
            _refuse(f"config_kwargs.{inner}", shown_url)


def _refuse(name: str, shown_url: str) -> None:
    raise StoreUnusable(
        f"tracekv: obstore can't express the option {name!r} in TRACEKV_FSSPEC__STORAGE_OPTIONS ({shown_url}). "
        "Leave it out, or use the client that can: TRACEKV_FSSPEC__S3_CLIENT=s3fs."
    )


def _find_credentials(access: S3Access, profile: str | None, environ: Mapping[str, str], shown_url: str) -> None:
    if profile is None and environ.get("AWS_ACCESS_KEY_ID"):
        return
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError:
        if profile is not None or environ.get("AWS_PROFILE"):
            raise StoreUnusable(
                f"tracekv: a profile for {shown_url} needs botocore: install tracekv[s3], or set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY."
            ) from None
        return
    try:
        session = Session(profile=profile)
        found = session.get_credentials()
        region = session.get_config_variable("region")
        endpoint = session.get_scoped_config().get("endpoint_url")
    except BotoCoreError as error:
        raise StoreUnusable(f"tracekv: the credentials for {shown_url} can't be had: {error}") from None
    if region:
        access.config.setdefault("aws_region", region)
    if endpoint:
        access.config.setdefault("aws_endpoint", endpoint)
    if found is None:
        return

    def current() -> dict[str, Any]:
        keys = found.get_frozen_credentials()  # botocore renews them here, when they are due
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + _ASK_AGAIN,
        }

    access.credentials = current

"""What differs between fsspec's protocols: the tier and name in reports, options, how secrets are kept out of messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tracekv.journal.vocabulary import Tier

LOCAL = frozenset({"file", "local"})
S3 = frozenset({"s3", "s3a"})
_OBJECT = S3 | {"gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"}

#: Requests that may be in flight on one S3 client. Botocore's default of 10 lets signed requests grow old in a queue.
S3_CONNECTIONS = 64
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas|sign|user", re.IGNORECASE)
_SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def protocol_of(url: str) -> str:
    """The protocol that holds the bytes: the last of a chained URL."""
    innermost = url.rsplit("::", 1)[-1]
    return innermost.split("://", 1)[0] if "://" in innermost else "file"


def engine_of(protocol: str) -> str:
    """The name by which reports call the store."""
    return "local" if protocol in LOCAL else "s3" if protocol in S3 else protocol


def tier_of(protocol: str) -> Tier:
    """Where KV that is read from there comes from."""
    if protocol in LOCAL:
        return Tier.DISK
    if protocol in _OBJECT:
        return Tier.OBJECT
    return Tier.HOST if protocol == "memory" else Tier.REMOTE


def file_system_options(protocol: str, options: Mapping[str, Any], read_s: float = 5.0) -> dict[str, Any]:
    """``storage_options`` over what keeps fsspec's caches from lying.

    Listings and instances are cached by default: a deleted object then exists, a new one doesn't, and sizes are stale
    (storage.md section 6, traps 3, 4, 10).
    """
    merged: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in S3:
        merged |= {"default_fill_cache": False, "default_cache_type": "none"}
        config: dict[str, Any] = {
            "max_pool_connections": S3_CONNECTIONS,
            "connect_timeout": min(3.0, read_s),
            "read_timeout": read_s,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        if options.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3"):
            # Newer botocore sends checksums by default, which break some servers that aren't AWS (trap 14).
            config |= {
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            }
        merged["config_kwargs"] = config | dict(options.get("config_kwargs") or {})
    return merged | {name: value for name, value in options.items() if name != "config_kwargs" or protocol not in S3}


def shown_url(url: str) -> str:
    """The URL without user and password."""
    parts = []
    for link in url.split("::"):
        location = urlsplit(link).netloc if "://" in link else ""
        user, at, _ = location.rpartition("@")
        parts.append(link.replace(f"{user}{at}", "", 1) if at else link)
    return "::".join(parts)


class Secrets:
    """What no message may contain."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        found = {os.environ.get(name, "") for name in _SECRET_VARIABLES} | set(_values(options))
        for link in url.split("::"):
            if "://" in link:
                parts = urlsplit(link)
                found |= {parts.username or "", parts.password or ""}
        self._secrets = sorted((secret for secret in found if len(secret) >= 3), key=len, reverse=True)

    def hidden_in(self, text: str) -> str:
        """``text`` with every secret replaced."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _values(options: Any, named: bool = False) -> list[str]:
    if isinstance(options, Mapping):
        return [
            found
            for name, value in options.items()
            for found in _values(value, named or bool(_SECRET_NAME.search(str(name))))
        ]
    if isinstance(options, (list, tuple)):
        return [found for value in options for found in _values(value, named)]
    return [options] if named and isinstance(options, str) else []

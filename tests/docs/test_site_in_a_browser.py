"""The site in Debian's chromium: it fits, it is searched, nothing is said on its console and nothing is asked of anybody else."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The built site on a loopback port, and the names of its pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield (
            f"http://127.0.0.1:{server.server_port}",
            [str(p.relative_to(folder)) for p in sorted(folder.rglob("*.html"))],
        )
        server.shutdown()


def opened(served, width, scheme):
    chromium, node = shutil.which("chromium"), shutil.which("node")
    assert chromium, "chromium isn't installed: apt-get install -y --no-install-recommends chromium"
    assert node, "node isn't installed: apt-get install -y --no-install-recommends nodejs"
    assert os.environ.get("NODE_PATH"), "NODE_PATH names no folder of playwright-core: npm install playwright-core"
    base, pages = served
    command = [node, Path(__file__).with_name("site.js"), chromium, base, str(width), scheme, *pages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_every_page_fits_and_loads_nothing_from_elsewhere(served, width, scheme):
    told = opened(served, width, scheme)
    assert (told["console"], told["errors"], told["foreign"], told["overflow"]) == ([], [], [], {})
    assert told["found"] > 3
    (ground,) = set(told["grounds"])
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")

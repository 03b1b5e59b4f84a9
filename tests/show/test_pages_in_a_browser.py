"""The report and the diff in Debian's chromium: they draw, zoom, filter, and nothing leaves the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.show.conftest import write_journal
from tests.views.sample_run import (
    bound,
    bring_up,
    call,
    hooks,
    joined,
    queried,
    registered,
    the_run,
    transferred,
    wrapped,
)
from tracekv.cli.app import app
from tracekv.journal.records import ConnectorWrapped
from tracekv.journal.vocabulary import Callback, Direction, Side

pytestmark = pytest.mark.browser

CASES = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def opened(page: Path, width: int = 1280, scheme: str = "light") -> dict[str, Any]:
    chromium, node = shutil.which("chromium"), shutil.which("node")
    assert chromium, "chromium isn't installed: apt-get install -y --no-install-recommends chromium"
    assert node, "node isn't installed: apt-get install -y --no-install-recommends nodejs"
    assert os.environ.get("NODE_PATH"), "NODE_PATH names no folder of playwright-core: npm install playwright-core"
    script = Path(__file__).with_name("browser.js")
    done = subprocess.run(
        [node, script, chromium, page, str(width), scheme], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written(command: str, *arguments: object) -> Path:
    page = Path(str(arguments[-1]))
    done = CliRunner().invoke(app, [command, *map(str, arguments[:-1]), "-o", str(page)])
    assert done.exit_code == 0, done.output
    return page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks; the second request is asked about past its prompt."""
    folder = tmp_path_factory.mktemp("two-ranks")
    other = queried(3000, 3100, request_id=8, offered_tokens=1024)
    write_journal(folder, [*bring_up()[:-1], joined(0, 2), *the_run()[9:], other], process="a")
    load = transferred(Direction.LOAD, 0, [3, 4], 200, 1500, 1540)
    rank = [registered(), joined(1, 2), bound(), load, hooks(), call(Callback.WAIT_FOR_SAVE, 2000, 2050)]
    write_journal(folder, [wrapped(Side.WORKER), *rank], process="b")
    return folder


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def report(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return opened(written("report", folder, tmp_path_factory.mktemp("page") / "report.html"), *request.param)


def test_the_timeline_draws(report: dict[str, Any]) -> None:
    assert report["whole"]["drawn"] > 2000


def test_it_zooms_moves_and_fits_by_button_and_key(report: dict[str, Any]) -> None:
    whole, zoomed, moved, fitted = (report[name] for name in ("whole", "zoomed", "moved", "fitted"))

    assert len({whole["sum"], zoomed["sum"], moved["sum"]}) == 3
    assert (whole["span"], whole["sum"]) == (fitted["span"], fitted["sum"])


def test_keys_step_to_a_bar_and_tell_its_facts(report: dict[str, Any]) -> None:
    assert "took" in report["chosen"]
    assert "after the start" in report["chosen"]


def test_it_filters_by_request(report: dict[str, Any]) -> None:
    assert "request 7" in report["filtered"]["said"]
    assert report["filtered"]["faint"] == 1
    assert report["filtered"]["sum"] != report["whole"]["sum"]


def test_an_unknown_request_is_said_with_the_nearest(report: dict[str, Any]) -> None:
    assert "no request 9999" in report["unknown"]["said"]
    assert "8" in report["unknown"]["said"]
    assert report["unknown"]["invalid"] == "true"


def test_a_request_opens_with_its_waterfall(report: dict[str, Any]) -> None:
    assert "Where its" in report["story"]["text"]
    assert "rank 1" in report["story"]["text"]
    assert report["story"]["bars"] >= 6
    assert report["sorted"] == "descending"


def test_the_broken_rule_is_shown(report: dict[str, Any]) -> None:
    assert "An offer leaves at least one prompt token to compute" in report["text"]


def test_nothing_is_said_on_the_console_and_nothing_leaves_the_file(report: dict[str, Any]) -> None:
    assert report["errors"] == []
    assert [message for message in report["console"] if "127.0.0.1:9" not in message] == []
    assert [url for url in report["requests"] if not url.startswith(("file:", "data:"))] == []
    assert report["fetched"] == "TypeError"


def test_it_fits_its_width_and_every_control_has_a_name(report: dict[str, Any]) -> None:
    assert report["overflow"] <= 0
    assert report["unnamed"] == []


def test_the_scheme_is_the_browser_s(folder: Path, tmp_path: Path) -> None:
    page = written("report", folder, "--no-rules", tmp_path / "report.html")

    assert len({opened(page, 1280, scheme)["ground"] for scheme in ("light", "dark")}) == 2


def test_what_an_id_or_a_class_name_holds_stays_text(tmp_path: Path) -> None:
    hostile = ConnectorWrapped(Side.SCHEDULER, HOSTILE, [], [])
    told = opened(written("report", write_journal(tmp_path / "j", [hostile, *the_run()[2:]]), tmp_path / "report.html"))

    assert told["hacked"] is None
    assert told["errors"] == []
    assert HOSTILE in told["text"]


def test_more_bars_than_a_page_draws_are_joined_and_said(tmp_path: Path) -> None:
    many = [transferred(Direction.LOAD, at % 2, [1], 10, 2000 + 40 * at, 2030 + 40 * at) for at in range(30_000)]
    told = opened(
        written(
            "report", write_journal(tmp_path / "j", [*the_run(), *many], 1 << 24), "--no-rules", tmp_path / "r.html"
        )
    )

    assert "drawn as one hatched bar that says how many" in told["text"]
    assert told["whole"]["drawn"] > 2000
    assert told["errors"] == []


def test_the_diff_draws_too(folder: Path, tmp_path: Path) -> None:
    other = write_journal(tmp_path / ("a-name-that-no-blank-divides" * 4), the_run())
    told = opened(written("diff", folder, other, tmp_path / "diff.html"), 400, "dark")

    assert "What changed most" in told["text"]
    assert (told["errors"], told["overflow"] <= 0) == ([], True)
    assert [message for message in told["console"] if "127.0.0.1:9" not in message] == []

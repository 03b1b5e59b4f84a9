"""The report's file: what it holds, what it says of what it leaves out, and that nothing in it can reach out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.show.conftest import Write, write_journal
from tests.support.journaled import write_journals
from tests.views.sample_run import (
    bring_up,
    built,
    call,
    finished,
    joined,
    looked_up,
    queried,
    the_run,
    transferred,
)
from tracekv.cli.app import app
from tracekv.journal.records import CallCounts, ConnectorWrapped, QueryCall, TracerFault, TracingReduced
from tracekv.journal.scan import scan
from tracekv.journal.vocabulary import Callback, Direction, Side
from tracekv.testing.corpus.tape import Tape
from tracekv.views.html import page
from tracekv.views.report_data import ReportData
from tracekv.views.summary_data import summary_of


def report(folder: Path, *arguments: str, **environ: str) -> str:
    out = folder / "report.html"
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(out), *arguments], env=environ)
    assert done.exit_code == 0, done.output
    return out.read_text()


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_the_numbers_are_the_summary_s(journals: Path) -> None:
    told, summary = data_of(report(journals))["summary"], summary_of(the_run())

    assert (told["prompt_tokens"], told["honoured_tokens"]) == (summary.prompt_tokens, summary.honoured_tokens)
    assert (told["loaded_bytes"], told["load_stall_ns"]) == (summary.loaded_bytes, 10)
    assert {each["name"] for each in told["callbacks"]} == set(summary.callbacks)
    assert [(each["name"], each["count"]) for each in told["misses"]] == [("not_staged", 1)]
    assert all(each["meaning"] for each in told["misses"])


def test_a_request_has_its_parts_which_add_up_and_its_bars(journals: Path) -> None:
    (row,) = data_of(report(journals))["requests"]["rows"]

    assert (row["label"], row["honoured"], row["reason"]) == ("7", 480, "not_staged")
    assert sum(row["told"]["parts"].values()) == row["told"]["whole_ns"] > 0
    assert {bar[1] for bar in row["told"]["bars"]} >= {
        "load, group 0",
        "load, group 1",
        "save, group 0",
        "enqueued",
    } - {"enqueued"}
    assert [(move["way"], move["bytes"]) for move in row["told"]["moved"]] == [
        ("load", 200),
        ("load", 40),
        ("save", 100),
    ]


def test_the_timeline_has_a_lane_per_callback_side_and_layer_group_of_each_rank(write: Write) -> None:
    write([*bring_up()[:-1], joined(0, 2), *the_run()[9:]], process="a")
    folder = write([joined(1, 2), transferred(Direction.LOAD, 0, [3], 100, 1500, 1540)], process="b")
    first, second = data_of(report(folder))["timeline"]["processes"]

    assert (first["name"], second["name"]) == ("rank 0 · node-1 pid 4711", "rank 1 · node-1 pid 4711")
    assert {"requests", "scheduler callbacks", "worker callbacks", "layer hooks, group 1", "load, group 0"} <= {
        lane["label"] for lane in first["lanes"]
    }
    (lane,) = second["lanes"]
    assert [bar[:5] for bar in lane["bars"]] == [[0, 1500, 40, 0, 1]]


def test_rules_are_run_unless_told_otherwise(write: Write) -> None:
    past = [queried(offered_tokens=1024) if isinstance(record, QueryCall) else record for record in the_run()]
    folder = write(past)
    found = data_of(report(folder))["findings"]

    (broken,) = [each for each in found if each["rule"] == "S2"]
    assert (broken["request"], broken["key"], broken["severity"]) == ("7", "0:7", "violation")
    assert data_of(report(folder, "--no-rules"))["findings"] is None


def test_findings_are_all_counted_however_few_are_shown(write: Write) -> None:
    past = [queried(10_000 + at, 10_001 + at, 100 + at, offered_tokens=1024) for at in range(150)]
    told = data_of(report(write([*the_run(), *past])))
    shown = sum(each["rule"] == "S2" for each in told["findings"])

    assert (shown, told["more_findings"]["S2"]) == (100, 50)
    assert told["violations"] >= 150


def test_findings_name_other_requests_by_their_digests_where_ids_are_hashed(tmp_path: Path) -> None:
    tape = Tape()
    for number in (7001, 7002):
        tape.query(number, 100)
        tape.alloc(number, 0, [[1, 2, 3, 4]])
    tape.build([(7001, 0, 100, 100, [[1, 2, 3, 4]]), (7002, 0, 100, 100, [[1, 2, 3, 4]])])
    write_journals(tmp_path, tape.records)

    assert any(each["numbers"].get("other_request") == 7001 for each in data_of(report(tmp_path))["findings"])
    hashed = data_of(report(tmp_path, TRACEKV_HASH_REQUEST_IDS="1"))
    (other,) = {each["numbers"]["other_request"] for each in hashed["findings"] if "other_request" in each["numbers"]}
    assert len(other) == 16
    assert "7001" not in json.dumps(hashed["findings"])


def test_settings_and_layout_are_told_of_each_process(journals: Path) -> None:
    (told,) = data_of(report(journals))["processes"]

    assert [known["name"] for known in told["classes"]] == ["pkg.mod.Leader", "pkg.mod.Worker"]
    assert told["classes"][1]["not_implemented"] == ["get_finished"]
    assert [(g["id"], g["window"], g["layers"]) for g in told["groups"]] == [(0, None, 2), (1, 64, 2)]


def test_calls_that_were_only_counted_are_said_of_their_process(write: Write) -> None:
    counted = CallCounts(9, 1000, 2_500_001_000, [(int(Callback.WAIT_FOR_SAVE), 3, 600, 300)])
    (told,) = data_of(report(write([*the_run(), counted]), "--no-rules"))["processes"]

    assert told["events"] == ["3 calls were only counted, in 2.5 s: they have sums and no bars of their own"]


def test_what_tracing_went_through_again_and_again_is_told_once(write: Write) -> None:
    reduced = [TracingReduced(at, True, 60_000, 50_000) for at in (5200, 5300, 5400)]
    fault = TracerFault(5500, "step", "ValueError", "a.py:1")
    (told,) = data_of(report(write([*the_run(), *reduced, fault]), "--no-rules"))["processes"]

    assert told["events"] == [
        "3 times: tracing took more than its share: calls were only counted for a while",
        "the instrument step failed (ValueError) and was removed",
    ]


def test_one_request_can_be_chosen_and_the_timeline_is_of_its_time(write: Write) -> None:
    later = [queried(90_000, 90_100, 8), looked_up(90_010, 90_090, 8), finished(91_000, 91_010, 8)]
    folder = write([*the_run()[:-1], *later])
    whole, narrow = data_of(report(folder))["timeline"], data_of(report(folder, "--request", "8"))["timeline"]

    assert narrow["narrowed"]
    assert narrow["begin"] >= 90_000
    assert 0 < narrow["drawn"] < whole["drawn"]


def test_a_wall_clock_that_was_set_meanwhile_takes_nothing_apart(tmp_path: Path) -> None:
    folder = write_journal(tmp_path / "journals", the_run(), is_clock_set=True)
    (row,) = data_of(report(folder, "--no-rules"))["requests"]["rows"]

    assert row["told"]["start"] == row["start"] == min(bar[3] for bar in row["told"]["bars"])
    assert data_of(report(folder, "--no-rules", "--request", "7"))["timeline"]["drawn"] > 0


def test_an_unknown_request_is_refused_with_the_nearest(journals: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(journals), "-o", str(journals / "r.html"), "--request", "9"])

    assert done.exit_code == 1
    assert "there is no request 9" in done.stderr
    assert "7" in done.stderr
    assert not (journals / "r.html").exists()


def test_more_bars_than_are_drawn_are_joined_and_counted(tmp_path: Path) -> None:
    many = [transferred(Direction.LOAD, 0, [1], 10, 2000 + 40 * at, 2030 + 40 * at) for at in range(3000)]
    folder = write_journal(tmp_path / "many", [*the_run(), *many], 1 << 21)
    with scan([folder]) as found:
        told = ReportData(found, most_bars=1000).build(None)["timeline"]

    bars = [bar for process in told["processes"] for lane in process["lanes"] for bar in lane["bars"]]
    assert len(bars) == told["drawn"] <= 1000
    assert sum(bar[4] for bar in bars) == told["bars"] > 3000
    assert told["width_ns"] > 0
    assert any(bar[4] > 1 and bar[6]["busy_ns"] for bar in bars)


def test_more_requests_than_are_listed_are_said(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracekv.views.report_data.MOST_LISTED", 10)
    folder = write([*bring_up(), *(queried(5000 + at * 200, 5100 + at * 200 + at, at) for at in range(1, 40))])
    told = data_of(report(folder, "--no-rules"))["requests"]

    assert told["total"] == 39
    assert len(told["rows"]) <= 10
    assert "39" in [row["label"] for row in told["rows"]]


def test_hashed_ids_stay_hashed(journals: Path) -> None:
    told = data_of(report(journals, TRACEKV_HASH_REQUEST_IDS="1"))
    (row,) = told["requests"]["rows"]

    assert len(row["label"]) == 16
    assert row["label"] != "7"
    requests = {
        bar[6].get("request")
        for process in told["timeline"]["processes"]
        for lane in process["lanes"]
        for bar in lane["bars"]
    }
    assert requests <= {None, row["label"]}
    assert row["key"] == f"0:{row['label']}"
    keys = {key for p in told["timeline"]["processes"] for lane in p["lanes"] for bar in lane["bars"] for key in bar[5]}
    assert keys == {row["key"]}


def test_overwritten_records_and_cut_files_are_noted(write: Write) -> None:
    many = [transferred(Direction.LOAD, 0, [1] * 500, 10, at, at + 1) for at in range(6000)]
    notes = data_of(report(write([*the_run(), *many]), "--no-rules"))["notes"]

    assert any("records were overwritten" in note for note in notes)


# -- nothing reaches out -------------------------------------------------------------------------------------------------


def test_the_policy_forbids_the_network_and_names_the_scripts_it_allows(journals: Path) -> None:
    text = report(journals, "--no-rules")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]

    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert [f"'sha256-{digest}'" in policy[1] for digest in digests] == [True]


def test_the_page_names_no_other_address(journals: Path) -> None:
    text = report(journals, "--no-rules")

    assert re.findall(r"(?:https?:)?//[a-z0-9.]+\.[a-z]{2,}", text) == []
    assert re.findall(r'(?:src|href)="(?!#|data:)', text) == []


@pytest.mark.parametrize(
    "hostile",
    ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "\u2028", '"}', "<img src=x onerror=alert(1)>"],
)
def test_what_a_journal_holds_cannot_end_its_element(hostile: str, write: Write) -> None:
    records = [ConnectorWrapped(Side.SCHEDULER, hostile, [], []), *the_run()[2:]]
    text = report(write(records), "--no-rules")

    assert data_of(text)["processes"][0]["classes"][0]["name"] == hostile
    assert text.count("<script") == 2
    assert text.count("</script>") == 2


def test_a_title_is_escaped() -> None:
    assert b"<title>&lt;b&gt;</title>" in page("<b>", ["ui.js"], {})


# -- colours ------------------------------------------------------------------------------------------------------------


def schemes() -> dict[str, dict[str, str]]:
    css = (resources.files("tracekv.views") / "page" / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.S)[:2]
    return {
        name: dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", text))
        for name, text in (("light", light), ("dark", dark))
    }


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, faint = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (faint + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_bars_stand_out_from_what_they_are_on(scheme: str) -> None:
    """WCAG 2.1, 1.4.3: 4.5 for text; bars carry their names in the colour of the card."""
    colours = schemes()[scheme]
    texts = ("text", "muted", "accent", "good", "bad", "warn")
    bars = (
        "requests",
        "events",
        "lookups",
        "scheduler",
        "worker",
        "passes",
        "hooks",
        "loads",
        "saves",
        "store",
        "idle",
        "counted",
    )

    low = {(text, on): contrast(colours[text], colours[on]) for text in texts for on in ("ground", "card", "soft")}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}
    faint = {bar: contrast(colours[bar], colours["card"]) for bar in bars}
    assert {bar: ratio for bar, ratio in faint.items() if ratio < 4.5} == {}


def test_contrast_is_what_the_standard_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_a_process_without_a_scheduler_makes_a_report_too(write: Write) -> None:
    told = data_of(report(write([joined(1, 2), call(Callback.START_LOAD_KV, 10, 20)]), "--no-rules"))

    assert told["requests"]["total"] == 0
    assert told["summary"]["callbacks"][0]["name"] == "worker.start_load_kv"


def test_a_plan_alone_makes_a_report(write: Write) -> None:
    assert data_of(report(write([built()]), "--no-rules"))["summary"]["steps"] == 1

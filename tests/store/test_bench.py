"""The benchmarks run, and say what they promise; their numbers are for the machine that they run on."""

from __future__ import annotations

import json

import msgspec
import pytest
from typer.testing import CliRunner

from tracekv.bench.store import Row
from tracekv.cli.app import app
from tracekv.journal.opening import open_journals
from tracekv.journal.records import StoreCeiling
from tracekv.journal.vocabulary import Direction

FIELDS = {
    "op", "temperature", "block_bytes", "tracekv_mb_s", "seed_mb_s", "limit_mb_s", "ratio_seed", "ratio_limit",
    "cpu_us_per_block", "requests_per_1024_blocks",
}  # fmt: skip
SMALL = ("--block-kib", "64", "--round-mib", "1", "--rounds", "2", "--json")


def bench(*arguments):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def check(rows, expected):
    assert [(row["op"], row["temperature"], row["block_bytes"]) for row in rows] == expected
    for row in rows:
        assert set(row) >= FIELDS
        msgspec.convert(row, Row)
        assert all(row[name] > 0 for name in FIELDS - {"op", "temperature"})
        for low, high in row["spread"].values():
            assert low <= high


def ceilings(folder):
    found = []
    for reader in open_journals(folder, patience_ns=0):
        with reader:
            found += [record for record in reader.read(0)[0] if isinstance(record, StoreCeiling)]
    assert all(record.bytes_per_s > 0 and record.block_bytes == 65536 and record.engine == "local" for record in found)
    return [record.direction for record in found]


def test_files_are_measured_cold_and_warm_and_nothing_is_left(tmp_path):
    folder, written = tmp_path / "kv", tmp_path / "performance.md"
    speed = bench("store", "--store", folder.as_uri(), *SMALL, "--write", str(written))
    assert speed["engine"] == "local"
    check(speed["rows"], [("load", "cold", 65536), ("load", "warm", 65536), ("save", None, 65536)])
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert "<!-- begin store-local -->" in written.read_text()


@pytest.mark.s3
def test_s3_is_measured_with_its_requests(s3_url):
    speed = bench("store", "--store", s3_url, *SMALL)
    check(speed["rows"], [("load", None, 65536), ("save", None, 65536)])
    assert speed["rows"][0]["requests_per_1024_blocks"] == 64  # one for these 16 blocks


def test_ceilings_go_to_the_journal_where_one_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path / "journals"))
    bench("store", "--store", (tmp_path / "kv").as_uri(), *SMALL)
    assert ceilings(tmp_path / "journals") == [Direction.LOAD, Direction.LOAD, Direction.SAVE]


def test_a_store_that_cant_be_opened_is_said():
    result = CliRunner().invoke(app, ["bench", "store", "--store", "nonsense://x"])
    assert result.exit_code == 2
    assert "nonsense" in result.output


def test_a_lookup_is_measured(tmp_path):
    cost = bench("lookup", "--rounds", "3", "--blocks", "8192", "--json", "--write", str(tmp_path / "p.md"))
    assert cost["index_blocks"] == 8192
    assert cost["index_bytes"] >= 0
    assert 0 < cost["prefix_ms"] < cost["hash_and_lookup_ms"]
    assert "longest prefix" in (tmp_path / "p.md").read_text()

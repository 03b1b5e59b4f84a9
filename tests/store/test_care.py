"""``tracekv store``, and deleting while engines use a store."""

from __future__ import annotations

import json
import os
import time

import pytest
from typer.testing import CliRunner

from tests.store.node import DEPLOYMENT, FULL, MIB, keys
from tracekv.cli.app import app
from tracekv.journal.vocabulary import MissReason, Outcome
from tracekv_fsspec import catalog as catalogs
from tracekv_fsspec import removal
from tracekv_fsspec.inventory import survey, verify
from tracekv_fsspec.keys import namespace_digest
from tracekv_fsspec.removal import Plan, bury, carry_out, delete, plan_cleaning
from tracekv_fsspec.store import open_store

DIGEST = DEPLOYMENT.digest()
TENANT = namespace_digest(DIGEST, cache_salt="tenant")
TENANT_LORA = namespace_digest(DIGEST, cache_salt="tenant", lora="x")


@pytest.fixture
def url(tmp_path):
    return (tmp_path / "kv").as_uri()


@pytest.fixture
def kept(node, tmp_path):
    """A store with three namespaces, and the node that wrote them."""
    one = node()
    one.save(keys(4))
    one.save(keys(3, seed=1), TENANT)
    one.save(keys(2, seed=2), TENANT_LORA)
    return one


def tracekv(*arguments, code=0, stdin=None):
    result = CliRunner().invoke(app, ["store", *arguments], input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def as_json(*arguments, code=0, stdin=None):
    return json.loads(tracekv(*arguments, "--json", code=code, stdin=stdin).stdout)


def age(tmp_path, pattern, seconds):
    for path in (tmp_path / "kv").rglob(pattern):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_usage_is_told_by_namespace(kept, url):
    rows = {row["namespace"]: row for row in as_json("ls", "--store", url)["namespaces"]}
    assert {name: row["blocks"] for name, row in rows.items()} == {
        namespace_digest(DIGEST).hex(): 4, TENANT.hex(): 3, TENANT_LORA.hex(): 2,
    }  # fmt: skip
    row = rows[TENANT.hex()]
    assert row["deployment"] == DIGEST.hex()
    assert row["bytes"] > 3 * 4096
    assert abs(row["newest"] - time.time()) < 60
    assert row["last_used"] >= row["newest"] >= row["oldest"]
    assert TENANT.hex()[:16] in tracekv("ls", "--store", url).stdout


def test_usage_fits_80_columns(kept, url, tmp_path):
    age(tmp_path, "*.man", 3 * 86_400)
    lines = tracekv("ls", "--store", url).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["namespace", "deployment", "commits", "blocks", "size", "oldest", "newest", "used"]
    (row,) = [line.split() for line in lines if line.startswith(namespace_digest(DIGEST).hex()[:16])]
    assert (row[1], row[2:4], row[5], row[6:10]) == (DIGEST.hex()[:8], ["1", "4"], "KiB", ["3", "d", "3", "d"])


def test_an_empty_store_is_said_to_be_empty(url):
    assert f"{url} holds no KV" in tracekv("ls", "--store", url).output


def test_last_use_is_what_engines_read(kept, node, url, tmp_path):
    age(tmp_path, "*.man", 5000)
    reader = node()
    reader.stage(keys(3, seed=1))
    reader.stager.close()
    used = {row["namespace"]: row["last_used"] for row in as_json("ls", "--store", url)["namespaces"]}
    assert abs(used[TENANT.hex()] - time.time()) < 60
    assert time.time() - used[TENANT_LORA.hex()] > 4000


def test_totals_tell_what_nobody_will_read(kept, url, tmp_path):
    facts = as_json("stat", "--store", url)
    assert (facts["blocks"], facts["commits"], facts["segments"], facts["broken_commits"]) == (9, 3, 3, 0)
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert facts["free_bytes"] > 0
    next((tmp_path / "kv").rglob("*.man")).unlink()
    (tmp_path / "kv" / "notes").write_text("hello")
    facts = as_json("stat", "--store", url)
    assert (facts["orphans"], facts["other_objects"]) == (1, 1)
    assert "orphans" in tracekv("stat", "--store", url).stdout


def test_verifying_reads_every_byte(kept, url, tmp_path):
    assert as_json("verify", "--store", url)["wrong"] == {}
    segment, other, _ = sorted((tmp_path / "kv").rglob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[5000] ^= 1
    segment.write_bytes(bytes(data))
    other.unlink()
    wrong = as_json("verify", "--store", url, code=1)["wrong"]
    assert wrong == {
        str(segment.relative_to(tmp_path / "kv")): "altered",
        str(other.relative_to(tmp_path / "kv")): "missing",
    }
    assert "altered: " in tracekv("verify", "--store", url, code=1).stdout


def test_a_segment_in_anothers_place_is_foreign(kept, url, tmp_path):
    one, two, _ = sorted((tmp_path / "kv").rglob("*.seg"))
    one.write_bytes(two.read_bytes())
    store = open_store(url)
    found = survey(store)
    wrong = [outcome for commit in found.commits for outcome in verify(store, commit).values()]
    assert wrong == [Outcome.FOREIGN]


def test_a_tenant_is_removed_with_all_its_namespaces_and_nobody_else(kept, node, url):
    said = as_json("rm", "--store", url, "--salt", "tenant", "--dry-run")
    assert len(said["commits"]) == 2
    assert len(as_json("ls", "--store", url)["namespaces"]) == 3
    done = as_json("rm", "--store", url, "--salt", "-", "--grace", "0", stdin="tenant\n")
    assert done["commits"] == said["commits"]
    assert [row["namespace"] for row in as_json("ls", "--store", url)["namespaces"]] == [namespace_digest(DIGEST).hex()]
    assert as_json("verify", "--store", url)["wrong"] == {}
    fresh = node()
    assert fresh.stage(keys(4))[1] == 4
    assert fresh.stage(keys(3, seed=1))[1:] == (0, MissReason.NOT_STORED)


def test_a_namespace_is_removed_by_its_digest_after_a_question(kept, url):
    tracekv("rm", "--store", url, "--namespace", TENANT.hex(), code=1, stdin="n\n")
    assert len(as_json("ls", "--store", url)["namespaces"]) == 3
    tracekv("rm", "--store", url, "--namespace", TENANT.hex(), "--grace", "0", stdin="y\n")
    left = {row["namespace"] for row in as_json("ls", "--store", url)["namespaces"]}
    assert left == {namespace_digest(DIGEST).hex(), TENANT_LORA.hex()}


@pytest.mark.parametrize("arguments", [(), ("--salt", "a", "--namespace", "b" * 8), ("--namespace", "ab")])
def test_what_goes_has_to_be_named(url, arguments):
    tracekv("rm", "--store", url, *arguments, code=2)


def test_a_store_that_cant_be_opened_is_said(tmp_path):
    assert "nonsense" in tracekv("ls", "--store", "nonsense://x", code=2).output


def test_cleaning_deletes_what_was_used_least_recently_down_to_the_low_mark(node, url, tmp_path):
    one = node(page_bytes={FULL: MIB})
    for seed in range(4):
        one.save(keys(2, seed=seed))
        age(tmp_path, "*.man", 100)
    assert as_json("gc", "--store", url, "--high", "100M", "--dry-run")["commits"] == []
    said = as_json("gc", "--store", url, "--high", "7M", "--low", "5M", "--grace", "0")
    assert len(said["commits"]) == 2
    fresh = node(page_bytes={FULL: MIB})
    assert [fresh.stage(keys(2, seed=seed))[1] for seed in range(4)] == [0, 0, 2, 2]


def test_what_was_read_lately_is_kept(node, url, tmp_path):
    one = node(page_bytes={FULL: MIB})
    for seed in range(3):
        one.save(keys(2, seed=seed))
        age(tmp_path, "*.man", 100)
    reader = node(page_bytes={FULL: MIB})
    reader.stage(keys(2, seed=0))
    reader.stager.close()
    assert len(as_json("gc", "--store", url, "--high", "5M", "--grace", "0")["commits"]) == 1
    fresh = node(page_bytes={FULL: MIB})
    assert [fresh.stage(keys(2, seed=seed))[1] for seed in range(3)] == [2, 0, 2]


def test_what_was_idle_for_days_goes(node, url, tmp_path):
    one = node()
    one.save(keys(1))
    age(tmp_path, "*.man", 3 * 86_400)
    one.save(keys(1, seed=1))
    said = as_json("gc", "--store", url, "--idle-days", "2", "--dry-run")
    assert (len(said["commits"]), said["dry_run"]) == (1, True)
    assert len(as_json("ls", "--store", url)["namespaces"]) == 1


def test_room_on_the_disk_is_a_mark_too(kept, url):
    said = as_json("gc", "--store", url, "--min-free", "100000T", "--dry-run")
    assert len(said["commits"]) == 3
    assert as_json("gc", "--store", url, "--min-free", "1", "--dry-run")["commits"] == []
    tracekv("gc", "--store", "memory://x", "--min-free", "1", code=2)


@pytest.mark.parametrize("size", ["much", "1X", "", "-1G", "1e999"])
def test_a_size_that_isnt_one_is_said(url, size):
    tracekv("gc", "--store", url, "--high", size, code=2)


def test_leftovers_of_writers_that_died_go_after_an_hour(kept, url, tmp_path):
    next((tmp_path / "kv").rglob("*.man")).unlink()
    assert as_json("gc", "--store", url)["leftovers"] == []
    age(tmp_path, "*.seg", 2 * removal.ORPHAN_S)
    assert len(as_json("gc", "--store", url)["leftovers"]) == 1
    assert len(list((tmp_path / "kv").rglob("*.seg"))) == 2
    assert as_json("verify", "--store", url)["wrong"] == {}


def test_a_running_engine_offers_nothing_of_a_buried_commit_before_it_is_deleted(kept, node, url):
    engine = node()
    assert engine.stager.prefix(FULL, keys(4), 0) == 4
    store = open_store(url)
    bury(store, survey(store).commits)
    engine.stager.catalog.refresh()
    assert engine.stager.prefix(FULL, keys(4), 0) == 0
    # Its bytes are there yet: what was promised before can still be loaded.
    assert all(not commit.missing for commit in survey(store).commits)
    assert node().stage(keys(4))[1:] == (0, MissReason.NOT_STORED)
    # It may be saved anew, under another commit.
    engine.save(keys(4))
    assert node().stage(keys(4))[1] == 4


def test_an_interrupted_cleaning_is_finished_by_the_next(kept, node, url, tmp_path):
    store = open_store(url)

    def stopped(seconds):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(store, Plan(survey(store).commits), sleep=stopped)
    assert len(list((tmp_path / "kv").rglob("*.seg"))) == 3
    assert plan_cleaning(survey(store)).graves == []
    age(tmp_path, "*.tmb", 100)
    said = as_json("gc", "--store", url)
    assert (len(said["finished"]), said["commits"]) == (3, [])
    assert list((tmp_path / "kv").rglob("*.seg")) == []
    # The tombstone stays for engines that slept; a day later it goes, too.
    assert len(list((tmp_path / "kv").rglob("*.tmb"))) == 1
    age(tmp_path, "*.tmb", 2 * removal.KEPT_S)
    as_json("gc", "--store", url)
    assert list((tmp_path / "kv").rglob("*.tmb")) == []


def test_manifests_go_before_their_segments(kept, url):
    store = open_store(url)
    gone = []
    inner = store.delete
    store.delete = lambda path: (gone.append(path), inner(path))
    delete(store, survey(store).commits)
    kinds = [path.rsplit(".", 1)[1] for path in gone]
    assert kinds == ["man"] * 3 + ["seg"] * 3


def test_an_engine_notices_what_was_deleted_without_a_tombstone(kept, node, tmp_path):
    engine = node()
    for path in (tmp_path / "kv").rglob("*.man"):
        path.unlink()
    engine.stager.catalog._round = 0  # the k-th refresh, which lists everything
    engine.stager.catalog.refresh()
    assert engine.stager.prefix(FULL, keys(4), 0) == 0


def test_an_engine_remembers_nothing_of_what_was_cleaned_away(node, url, monkeypatch):
    """Of a store that is cleaned for months, what is there counts, not what was."""
    one, reader = node(), node()
    catalog = reader.stager.catalog
    for seed in range(5):
        one.save(keys(2, seed=seed))
        catalog.refresh()
        as_json("gc", "--store", url, "--high", "1", "--low", "0", "--grace", "0")
    one.save(keys(2, seed=9))
    monkeypatch.setattr(catalogs, "LIVE_S", 0.0)
    for _ in range(2 * catalogs.FULL_EVERY):
        catalog.refresh()
    index = reader.stager.index
    assert (len(index), len(index.commits()), len(index._removed)) == (2, 1, 0)
    there = {grave.entry.path.split("/")[-2] for grave in survey(open_store(url)).graves}
    assert {writer.hex() for writer in catalog._cursors} == there | {commit.writer.hex() for commit in index.commits()}
    assert catalog._seen_at.keys() == catalog._cursors.keys()
    assert reader.stage(keys(2, seed=9))[1] == 2

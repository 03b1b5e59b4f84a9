"""Objects that are not what they should be, stores that fail: each is a miss or a drop with its reason, and the run goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import uuid
from pathlib import Path

import pytest

from tests.fsspec.engine import B, Engine, prompt
from tracekv.journal.records import Drop, Lookup, StoreOperation
from tracekv.journal.vocabulary import DropReason, MissReason, Operation, Outcome
from tracekv_fsspec.format import HEADER_BYTES, SegmentHeader, pack_segment

TOKENS = prompt(5)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def saved(configure, folder):
    """A prompt of five blocks in a folder."""
    engine = Engine()
    engine.prefill(1, TOKENS)
    assert engine.scheduler.flush(20)
    engine.stop()
    return folder


@pytest.fixture
def engine_of():
    made = []

    def make():
        made.append(Engine())
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def only(folder, pattern):
    (found,) = folder.rglob(pattern)
    return found


def rewrite(path: Path, change):
    data = bytearray(path.read_bytes())
    changed = change(data)
    path.write_bytes(bytes(data if changed is None else changed))


def flip(position):
    def change(data):
        data[position] ^= 1

    return change


def cut(length):
    return lambda data: data[:length]


def other_version(data):
    data[8] += 1


def foreign(data):
    blocks = (len(data) - HEADER_BYTES) // 4096
    header = SegmentHeader(b"d" * 32, b"n" * 32, b"l" * 32, "x", b"w" * 16, 0, 0, 1, B)
    return b"".join(pack_segment(header, [])[0]) + bytes(blocks * 4096)


@pytest.mark.parametrize(
    ("change", "outcome", "offered"),
    [
        pytest.param(cut(HEADER_BYTES + 3 * 4096), Outcome.TRUNCATED, 0, id="truncated"),
        pytest.param(cut(100), Outcome.TRUNCATED, 0, id="nearly nothing"),
        pytest.param(flip(HEADER_BYTES + 2 * 4096 + 17), Outcome.ALTERED, 2, id="altered block"),
        pytest.param(flip(HEADER_BYTES), Outcome.ALTERED, 0, id="altered first block"),
        pytest.param(flip(300), Outcome.ALTERED, 0, id="altered header"),
        pytest.param(other_version, Outcome.VERSION, 0, id="another version"),
        pytest.param(foreign, Outcome.FOREIGN, 0, id="foreign"),
        pytest.param(lambda data: b"hello" * 10_000, Outcome.FOREIGN, 0, id="anything"),
    ],
)
def test_a_segment_that_isnt_what_it_should_be_is_a_miss_with_a_reason(
    saved, engine_of, records, change, outcome, offered
):
    rewrite(only(saved, "*.seg"), change)
    engine = engine_of()
    running = engine.admit(5, TOKENS)
    assert running.offered == offered * B
    assert records.of(Lookup)[-1].reason is MissReason.CORRUPT
    reads = [record for record in records.of(StoreOperation) if record.request_id == 5]
    assert [read.outcome for read in reads] == [outcome]
    engine.run_pass((running, len(TOKENS) - running.position), forward=False)
    assert engine.holds_its_kv(running, 0, offered)
    # It is known from then on, without another look; and it is saved anew.
    again = engine.admit(6, TOKENS)
    assert again.offered == offered * B
    assert records.of(Lookup)[-1].reason is MissReason.CORRUPT
    assert len([record for record in records.of(StoreOperation) if record.request_id == 6]) == 0
    engine.run_pass((again, len(TOKENS) - again.position))
    assert engine.scheduler.flush(20)
    assert engine.admit(7, TOKENS).offered == 5 * B


def test_a_segment_that_is_gone_is_a_miss(saved, engine_of, records):
    only(saved, "*.seg").unlink()
    engine = engine_of()
    assert engine.admit(5, TOKENS).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.NOT_STORED


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        pytest.param(cut(60), Outcome.TRUNCATED, id="truncated"),
        pytest.param(cut(-1), Outcome.TRUNCATED, id="last byte missing"),
        pytest.param(flip(40), Outcome.ALTERED, id="altered header"),
        pytest.param(flip(-3), Outcome.ALTERED, id="altered body"),
        pytest.param(other_version, Outcome.VERSION, id="another version"),
        pytest.param(lambda data: b"hello" * 100, Outcome.FOREIGN, id="anything"),
        pytest.param(lambda data: b"", Outcome.TRUNCATED, id="empty"),
    ],
)
def test_a_manifest_that_isnt_what_it_should_be_is_passed_over_and_reported(saved, engine_of, records, change, outcome):
    rewrite(only(saved, "*.man"), change)
    engine = engine_of()
    assert engine.admit(5, TOKENS).offered == 0
    reads = [record for record in records.of(StoreOperation) if record.operation is Operation.READ]
    assert [read.outcome for read in reads] == [outcome]


def test_a_manifest_under_another_name_is_foreign(saved, engine_of, records):
    manifest = only(saved, "*.man")
    manifest.rename(manifest.with_name("000000000009.man"))
    assert engine_of().admit(5, TOKENS).offered == 0
    outcomes = [record.outcome for record in records.of(StoreOperation) if record.operation is Operation.READ]
    assert outcomes == [Outcome.FOREIGN]


def test_what_else_lies_in_the_folder_is_ignored(saved, engine_of):
    folder = only(saved, "*.man").parent
    (folder / "notes.txt").write_text("hello")
    (folder.parent / "000000000001.man").write_text("hello")
    (folder.parent / "nobody").mkdir()
    assert engine_of().admit(5, TOKENS).offered == 5 * B


def test_a_segment_without_its_manifest_doesnt_exist(saved, engine_of, records):
    only(saved, "*.man").unlink()
    assert engine_of().admit(5, TOKENS).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.NOT_STORED


def failing(error, *operations):
    def before(operation, path):
        if operation in operations:
            raise error

    return staticmethod(before)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), DropReason.NO_SPACE),
        (PermissionError(13, "Permission denied"), DropReason.STORE_REFUSED),
        (ConnectionResetError(104, "reset"), DropReason.STORE_DOWN),
        (TimeoutError(), DropReason.STORE_DOWN),
        (RuntimeError("odd"), DropReason.ERROR),
    ],
    ids=lambda value: getattr(value, "value", type(value).__name__),
)
def test_a_failed_save_is_dropped_and_counted_and_the_run_goes_on(configure, faulty, engine_of, records, error, reason):
    configure(url="faulty://kv")
    engine = engine_of()
    faulty.before = failing(error, "put")
    engine.prefill(1, TOKENS)
    assert engine.scheduler.flush(20)
    drops = records.of(Drop)
    assert [(drop.reason, drop.blocks, drop.request_id, drop.layer_group) for drop in drops] == [(reason, 5, 1, 0)]
    assert drops[0].nbytes == 5 * engine.pools[0][0].numel() * 4
    faulty.before = staticmethod(lambda operation, path: None)
    engine.prefill(2, prompt(3, seed=5))
    assert engine.scheduler.flush(20)
    assert len(records.of(Drop)) == 1
    assert engine_of().admit(3, prompt(3, seed=5)).offered == 3 * B


def test_a_segment_whose_manifest_failed_is_taken_away_again(configure, faulty, engine_of, records):
    configure(url="faulty://kv")
    engine = engine_of()

    def before(operation, path):
        if operation == "put" and path.endswith(".man"):
            raise OSError(28, "No space left on device")

    faulty.before = staticmethod(before)
    engine.prefill(1, TOKENS)
    assert engine.scheduler.flush(20)
    assert [path for path in faulty.store if path.endswith((".seg", ".man"))] == []
    assert records.of(Drop)[0].reason is DropReason.NO_SPACE


def test_a_manifest_whose_answer_was_lost_may_be_there_so_its_segments_stay(
    configure, faulty, engine_of, records, monkeypatch
):
    configure(url="faulty://kv", write_deadline_ms=100)
    engine = engine_of()
    write = faulty.pipe_file

    def lost(self, path, value, **more):
        write(self, path, value, **more)
        if path.endswith(".man"):
            threading.Event().wait(0.1)  # so that no time is left for another try, which would find it there
            raise TimeoutError

    with monkeypatch.context() as losing:
        losing.setattr(faulty, "pipe_file", lost)
        engine.prefill(1, TOKENS)
        assert engine.scheduler.flush(20)
    assert records.of(Drop)[0].reason is DropReason.STORE_DOWN
    configure(url="faulty://kv")
    other = engine_of()
    running = other.prefill(2, TOKENS)
    assert running.honoured == 5 * B
    assert other.holds_its_kv(running)


def test_a_store_that_is_down_is_a_miss_for_now_and_a_hit_when_it_is_back(configure, faulty, engine_of, records):
    configure(url="faulty://kv")
    writer = engine_of()
    writer.prefill(1, TOKENS)
    assert writer.scheduler.flush(20)
    engine = engine_of()
    faulty.before = failing(ConnectionResetError(104, "reset"), "read")
    assert engine.admit(5, TOKENS).offered == 0
    assert records.of(Lookup)[-1].reason is MissReason.STORE_DOWN
    faulty.before = staticmethod(lambda operation, path: None)
    assert engine.admit(6, TOKENS).offered == 5 * B


def test_a_manifest_that_cant_be_read_now_is_read_later(configure, faulty, engine_of):
    configure(url="faulty://kv")
    engine, writer = engine_of(), engine_of()
    writer.prefill(1, TOKENS)
    assert writer.scheduler.flush(20)
    catalog = engine.scheduler._engine.stager.catalog
    faulty.before = failing(TimeoutError(), "read")
    assert catalog.refresh() == (0, 0)
    faulty.before = staticmethod(lambda operation, path: None)
    assert catalog.refresh() == (1, 5)
    assert catalog.refresh() == (0, 0)


def test_a_refresh_that_fails_is_said_once_and_tried_again(configure, faulty, engine_of, caplog):
    configure(url="faulty://kv", refresh_ms=10, read_deadline_ms=10)
    engine = engine_of()
    catalog = engine.scheduler._engine.stager.catalog
    failed, worked = threading.Semaphore(0), threading.Event()
    refresh = catalog.refresh

    def watched():
        try:
            found = refresh()
        except Exception:
            failed.release()
            raise
        worked.set()
        return found

    catalog.refresh = watched
    faulty.before = failing(ConnectionResetError(104, "reset"), "list")
    for _ in range(4):
        assert failed.acquire(timeout=20)
    assert len([record for record in caplog.records if "can't be refreshed" in record.message]) == 1
    faulty.before = staticmethod(lambda operation, path: None)
    worked.clear()
    assert worked.wait(20)
    assert catalog._thread.is_alive()


def test_a_block_with_a_part_of_its_layer_groups_is_not_offered(configure, folder, records):
    windows = (None, 64)
    engine = Engine(windows)
    running = engine.admit(1, TOKENS)
    running.pages[1][2] = -1  # this group's page was gone already
    engine.run_pass((running, len(TOKENS)))
    assert engine.scheduler.flush(20)
    engine.stop()
    fresh = Engine(windows)
    assert fresh.admit(5, TOKENS).offered == 2 * B
    fresh.stop()
    lookup = records.of(Lookup)[-1]
    assert lookup.reason is MissReason.LAYER_GROUP_MISSING
    assert lookup.group_tokens == [5 * B, 2 * B]
    assert lookup.bounding_layer_group == 1


def test_closing_drops_what_cant_be_stored_in_time(configure, faulty, engine_of, records):
    configure(url="faulty://kv")
    engine = engine_of()
    running = engine.admit(1, TOKENS)
    stager = engine.scheduler._engine.stager
    engine.run_pass((running, len(TOKENS)), forward=False)
    engine.scheduler.shutdown()
    engine.worker.wait_for_save(engine.stream)  # too late: nothing is owed to it any more
    assert {drop.reason for drop in records.of(Drop)} == {DropReason.ERROR}
    assert stager.writer.reserve(stager.arena.shards[0], b"k" * 16) is DropReason.CLOSED


SAVE_AND_EXIT = """
    import sys
    from tests.fsspec.engine import Engine, prompt
    engine = Engine()
    engine.prefill(1, prompt(5))
    # No flush and no shutdown: the interpreter's end is enough.
"""


@pytest.mark.parametrize("kind", ["file", pytest.param("s3", marks=pytest.mark.s3)])
def test_what_was_saved_is_stored_when_the_process_just_ends(kind, request, tmp_path, configure, engine_of):
    if kind == "s3":
        configure(url=f"s3://{request.getfixturevalue('s3').bucket}/{uuid.uuid4().hex}")
    command = [sys.executable, "-c", textwrap.dedent(SAVE_AND_EXIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert engine_of().admit(5, TOKENS).offered == 5 * B

"""Writer and reader interleaved in every way, with damage: no record is ever wrong, none that is whole is missed, all losses count."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ring_support import SMALL, drop

from tracekv.journal.layout import FRAME_BYTES, SLOT_BYTES, Area
from tracekv.journal.reader import RingReader
from tracekv.journal.records import AllocCall, Record, RunJoined
from tracekv.journal.ring import RingJournal

SIZES = st.one_of(st.integers(0, 12), st.integers(0, 300), st.integers(1200, 1700))


class Written(NamedTuple):
    """A record as the model has it: where it lies, by the format's rules alone."""

    sequence: int
    record: Record
    ring: str
    position: int
    slots: int


class RingMachine(RuleBasedStateMachine):
    """The model keeps all that was written, and which bytes were damaged after their record was written."""

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.journal = RingJournal.create(Path(self.directory.name) / "test.tkvring", SMALL)
        self.written: list[Written] = []
        self.heads = {"kept": 0, "shared": 0, "engine": 0}
        self.damaged: set[int] = set()
        self.model("kept", self.journal_first())
        self.reader = RingReader(self.journal.path, patience_ns=0)
        self.cursor = 0
        self.got: set[int] = set()

    def journal_first(self) -> Record:
        [first], _, _ = RingReader(self.journal.path).read(0)
        return first

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    def area(self, ring: str) -> Area:
        return getattr(self.journal.layout, ring)

    def model(self, ring: str, record: Record) -> None:
        length = len(msgspec.msgpack.encode(record))
        slots = -(-(FRAME_BYTES + length) // SLOT_BYTES)
        if FRAME_BYTES + length > self.area(ring).slots * SLOT_BYTES // 2:
            return
        self.written.append(Written(len(self.written), record, ring, self.heads[ring], slots))
        self.heads[ring] += slots

    def record(self, size: int) -> AllocCall:
        return AllocCall(3, len(self.written), 0, 1, None, 7, None, [list(range(70_000, 70_000 + size))])

    @rule(size=SIZES, times=st.integers(1, 40))
    def write_shared(self, size: int, times: int) -> None:
        self.journal._engine_thread = 0
        for _ in range(times):
            record = self.record(size)
            self.journal.write(record)
            self.model("shared", record)

    @rule(size=SIZES, times=st.integers(1, 40))
    def write_engine(self, size: int, times: int) -> None:
        assert self.journal.claim_engine_thread()
        for _ in range(times):
            record = self.record(size)
            self.journal.write(record)
            self.model("engine", record)

    @rule(times=st.integers(1, 5))
    def write_kept(self, times: int) -> None:
        for _ in range(times):
            record = RunJoined(bytes(16), len(self.written), 8)
            self.journal.write(record)
            self.model("kept", record)

    @rule(ring=st.sampled_from(["kept", "shared", "engine"]), where=st.floats(0, 1), bits=st.integers(1, 255))
    def damage(self, ring: str, where: float, bits: int) -> None:
        offset, slots, _ = self.area(ring)
        byte = int(where * (slots * SLOT_BYTES - 1))
        self.journal._mapping[offset + byte] ^= bits
        slot = byte // SLOT_BYTES
        self.damaged |= {
            written.sequence
            for written in self.written
            if written.ring == ring and (slot - written.position) % slots < written.slots
        }

    @rule()
    def read(self) -> None:
        self.take(*self.reader.read_frames(self.cursor))

    @rule(limit=st.integers(1, 30))
    def read_a_little(self, limit: int) -> None:
        self.take(*self.reader.read_frames(self.cursor, limit), whole=False)

    @rule()
    def start_another_reader(self) -> None:
        self.reader.close()
        self.reader = RingReader(self.journal.path, patience_ns=0)

    def take(self, frames: list, cursor: int, lost: int, *, whole: bool = True) -> None:
        sequences = [frame.sequence for frame in frames]
        assert sequences == sorted(set(sequences))
        assert all(self.cursor <= sequence < cursor for sequence in sequences)
        for frame in frames:
            assert frame.payload == msgspec.msgpack.encode(self.written[frame.sequence].record)
        assert cursor - self.cursor == len(frames) + lost
        if whole:
            missed = self.survivors() - set(sequences)
            assert not {sequence for sequence in missed if sequence >= self.cursor}
        else:
            missed = self.survivors() - set(sequences)
            assert not {sequence for sequence in missed if self.cursor <= sequence < cursor}
        self.cursor = cursor

    def survivors(self) -> set[int]:
        """Numbers of the records that are whole in the file: not overwritten, not damaged."""
        return {
            written.sequence
            for written in self.written
            if written.position >= self.heads[written.ring] - self.area(written.ring).slots
        } - self.damaged

    @invariant()
    def the_cursor_is_within_what_was_written(self) -> None:
        if hasattr(self, "written"):
            assert self.cursor <= len(self.written)


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_the_model_finds_a_reader_that_skips_a_record() -> None:
    """Negative control: a reader that loses a record without counting it doesn't pass."""
    machine = RingMachine()
    machine.open()
    machine.journal.write(drop(1))
    machine.model("shared", drop(1))
    frames, cursor, lost = machine.reader.read_frames(0)
    try:
        machine.take(frames[1:], cursor, lost)
    except AssertionError:
        return
    finally:
        machine.teardown()
    raise AssertionError("the machine didn't notice")

"""What a process says of itself, its connector and its tracing."""

from __future__ import annotations

from tracekv.journal.records.base import Record
from tracekv.journal.vocabulary import Side


class ProcessStarted(Record, tag=1):
    """First record of a journal. ``wall_ns`` was read beside ``monotonic_ns``: the process's first clock anchor."""

    pid: int
    process_id: bytes
    host: str
    boot_id: str
    monotonic_ns: int
    wall_ns: int
    version: str


class ClockAnchor(Record, tag=2):
    """Both clocks read together, again and again, so that other hosts' journals can be aligned."""

    monotonic_ns: int
    wall_ns: int


class CallbackSource(Record):
    """Where an implemented callback is defined."""

    name: str
    file: str
    line: int


class ConnectorWrapped(Record, tag=3):
    """A traced class was instantiated; ``not_implemented`` are the callbacks it inherits from the base."""

    side: Side
    class_name: str
    implemented: list[CallbackSource]
    not_implemented: list[str]


class RunJoined(Record, tag=4):
    """Which run (16 bytes, made by the leader) and rank this process belongs to; known only after the first metadata."""

    run_id: bytes
    rank: int
    world: int


class SettingsSeen(Record, tag=5):
    """Digest of the settings as resolved here; it differs between ranks only by mistake."""

    digest: bytes


class TracerFault(Record, tag=6):
    """An instrument of tracekv failed and was removed; the engine went on without it."""

    at_ns: int
    instrument: str
    error: str
    where: str


class TracingReduced(Record, tag=7):
    """Less is recorded from here on, or everything again: tracing took more than its share of the engine thread (parts per million),
    so calls are only counted, or somebody switched the detail of the running engine.

    Attributes:
        is_off: The detail was set to ``off``: until the next record of this kind there is none of any callback, in this process.
            Cost and limit aren't judged then, and are 0.
    """

    at_ns: int
    is_reduced: bool
    cost_ppm: int
    limit_ppm: int
    is_off: bool = False

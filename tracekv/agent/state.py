"""How far a journal has been read and exported: a small file beside it, which outlives whoever reads.

It also carries a question of the engine's: "is everything up to here exported?". The file has no lock: each cell is 8 bytes with
one writer.

=======  ============  ==========================================================================================
offset   written by    meaning
=======  ============  ==========================================================================================
0        both          magic ``TKVSTATE``
8        engine        number of its last question
16       reader        number of the last question that is answered: everything before it is handed on or given up
24       reader        sequence up to which metrics and logs have been fed
32 ...   reader        per exporter, 16 bytes each: sequence up to which spans are exported; up to which monotonic
                       time what was quiet there has been ended (:data:`ENDED`: everything, for good)
=======  ============  ==========================================================================================
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from tracekv.journal.directory import SUFFIX

STATE_SUFFIX = ".tkvstate"
MAGIC = b"TKVSTATE"
#: ``expired_ns`` of a journal that is read to its end.
ENDED = (1 << 63) - 1
#: Exporters that have a place, by name.
EXPORTERS = ("file", "otlp")

_ASKED, _ANSWERED, _FED, _MARKS = 8, 16, 24, 32
_BYTES = _MARKS + 16 * len(EXPORTERS)
_cell = struct.Struct("<q")
_mark = struct.Struct("<qq")


class Mark(NamedTuple):
    """How far an exporter has come with a journal; compares in time.

    Attributes:
        sequence: Spans that records below it make are exported.
        expired_ns: And those that ended, after them, because nothing happened until this monotonic time.
    """

    sequence: int
    expired_ns: int = 0


START = Mark(0, 0)


class StateFile:
    """The state of one journal.

    Raises:
        OSError: It can't be made: no room, not ours.
    """

    def __init__(self, journal: Path) -> None:
        self.path = state_path(journal)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        if os.pread(self._descriptor, len(MAGIC), 0) != MAGIC:
            # Made by whoever comes first, engine or reader; zeros are a start.
            os.pwrite(self._descriptor, MAGIC, 0)

    def ask(self) -> int:
        """Ask whether everything written so far is exported; the question's number. The engine's."""
        number = self._read(_ASKED) + 1
        self._write(_ASKED, number)
        return number

    @property
    def asked(self) -> int:
        """Number of the engine's last question."""
        return self._read(_ASKED)

    @property
    def answered(self) -> int:
        """Number of the last question that is answered."""
        return self._read(_ANSWERED)

    def answer(self, number: int) -> None:
        """Say that everything written before question ``number`` is handed on or given up. The reader's."""
        self._write(_ANSWERED, number)

    @property
    def fed(self) -> int:
        """Sequence up to which metrics and logs have seen the records."""
        return self._read(_FED)

    def feed(self, sequence: int) -> None:
        """Metrics and logs have seen the records below ``sequence``."""
        self._write(_FED, sequence)

    def mark(self, exporter: str) -> Mark:
        """How far an exporter has come."""
        packed = os.pread(self._descriptor, _mark.size, self._offset(exporter))
        return Mark(*_mark.unpack(packed)) if len(packed) == _mark.size else START

    def set_mark(self, exporter: str, mark: Mark) -> None:
        """An exporter has come so far. One write, so that a killed reader leaves it old or new."""
        os.pwrite(self._descriptor, _mark.pack(*mark), self._offset(exporter))

    def has_ended(self) -> bool:
        """Whether the journal was read to its end; by an exporter that never came to it, it isn't read again."""
        marks = [mark for name in EXPORTERS if (mark := self.mark(name)) != START]
        return bool(marks) and all(mark.expired_ns == ENDED for mark in marks)

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)

    def _offset(self, exporter: str) -> int:
        return _MARKS + 16 * EXPORTERS.index(exporter)

    def _read(self, offset: int) -> int:
        packed = os.pread(self._descriptor, _cell.size, offset)
        number: int = _cell.unpack(packed)[0] if len(packed) == _cell.size else 0
        return number

    def _write(self, offset: int, number: int) -> None:
        os.pwrite(self._descriptor, _cell.pack(number), offset)


def state_path(journal: Path) -> Path:
    """The state of the ring file ``journal``."""
    return journal.with_suffix(STATE_SUFFIX)


def remove_orphans(directory: Path) -> None:
    """Remove the states of journals that are gone."""
    for path in directory.glob(f"*{STATE_SUFFIX}"):
        if not path.with_suffix(SUFFIX).exists():
            path.unlink(missing_ok=True)

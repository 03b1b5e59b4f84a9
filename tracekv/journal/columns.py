"""The fields of many records of one kind as columns, without an object for any of them.

An encoded record is a MessagePack array: the tag, then the fields in their order (docs/journal-format.md). :class:`Columns` stands at
one place in each record and reads, or skips, the same field of all of them at once.

Needs numpy, which the core doesn't: only views of large runs import this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tracekv.journal.arrays import np, npt
from tracekv.journal.records import Record
from tracekv.journal.vocabulary import Word

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
"""Places in a batch, or in what was chosen of it."""

_Bytes = npt.NDArray[np.uint8]
W = TypeVar("W", bound=Word)

#: What :meth:`Columns.optional_ints` gives for nil.
NIL = -(1 << 63)

#: Bytes that follow the first byte of a value of fixed size; one that has none is 0.
_ODD = 255
_FOLLOWING = np.full(256, _ODD, np.uint8)
_FOLLOWING[:0x80] = _FOLLOWING[0xE0:] = _FOLLOWING[[0xC0, 0xC2, 0xC3]] = 0
_FOLLOWING[[0xCC, 0xD0]] = 1
_FOLLOWING[[0xCD, 0xD1]] = 2
_FOLLOWING[[0xCE, 0xD2]] = 4
_FOLLOWING[[0xCF, 0xD3]] = 8
#: The numbers that one byte is: small ones, nil, false and true.
_ALONE = np.arange(256, dtype=np.int64)
_ALONE[0xE0:] -= 256
_NIL, _FALSE, _TRUE = 0xC0, 0xC2, 0xC3
_ALONE[[_NIL, _FALSE, _TRUE]] = NIL, 0, 1
#: Bytes of a value with its first one, where that tells, else 0; of texts and bytes see :meth:`Columns._skip_one`.
_SIZE = np.where(_FOLLOWING == _ODD, 0, _FOLLOWING.astype(np.int64) + 1)
_SIZE[[0xCA, 0xCB]] = 5, 9
_SIZE[0xA0:0xC0] = 1 + np.arange(32)
_SIZE[0x90:0xA0] = 1
_LENGTH_BYTES = {0xC4: 1, 0xD9: 1, 0xC5: 2, 0xDA: 2, 0xC6: 4, 0xDB: 4}
_BLOBS = (0xC4, 0xC5, 0xC6)
_ARRAY_16 = 0xDC
#: Bytes behind the last record, so that what is read at a record's end is never outside.
_PAD = 64
#: Different words of a set, those of newer versions included, that are told apart.
_MOST_WORDS = 64
#: Elements of a list that are read side by side: of longer ones, each takes a round of its own, and decoding them is quicker.
_MOST_ELEMENTS = 64


class Columns:
    """Stands before the first field of some records of one kind. Fields are read in their order.

    Args:
        kind: Of all of them.
        payloads: The encoded records.

    Attributes:
        odd: Those of which a field isn't as it was asked for, or is missing: what their columns hold means nothing, and they are to be
            decoded one by one. Final once all fields are read.
    """

    def __init__(self, kind: type[Record], payloads: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
        self._bytes: _Bytes = np.frombuffer(b"".join((*payloads, bytes(_PAD))), np.uint8)
        self._ends = np.cumsum(lengths)
        self._at = self._ends - lengths
        # The big-endian number that begins at each byte.
        self._numbers = {
            width: np.ndarray((len(self._bytes) - width,), f">u{width}", self._bytes, 0, (1,)) for width in (1, 2, 4, 8)
        }
        count, self._at = self._lengths_of_arrays()
        self.odd = count < 1
        self._left = count
        self._odd_unless(self.ints() == kind.__struct_config__.tag)

    def ints(self) -> Ints:
        """The next field, a number below 2**63."""
        values, first = self._next()
        self._odd_unless((first != _NIL) & (first != _FALSE) & (first != _TRUE))
        return values

    def optional_ints(self) -> Ints:
        """The next field, a number below 2**63, or nil, which is :data:`NIL`."""
        values, first = self._next()
        self._odd_unless((first != _FALSE) & (first != _TRUE))
        return values

    def truths(self) -> npt.NDArray[np.bool_]:
        """The next field, true or false."""
        values, first = self._next()
        self._odd_unless((first == _FALSE) | (first == _TRUE))
        is_true: npt.NDArray[np.bool_] = values == 1
        return is_true

    def nil(self) -> None:
        """The next field has to be nil."""
        self._odd_unless(self._next()[1] == _NIL)

    def _next(self) -> tuple[Ints, _Bytes]:
        """The next field, a number or what stands alone, and its first byte."""
        self._expect_field()
        first = self._bytes[self._at]
        values = self._ints(slice(None))
        self._check(slice(None))
        return values, first

    def words(self, kind: type[W]) -> tuple[Ints, list[W]]:
        """The next field, a word of a closed set: which of those that there are each one is, and these."""
        self._expect_field()
        words: list[W] = []
        found = np.zeros(len(self._at), np.int64)
        left = np.flatnonzero(~self.odd)
        for _ in range(_MOST_WORDS):
            if not left.size:
                break
            begin = int(self._at[left[0]])
            marker = int(self._bytes[begin])
            length = marker & 31 if marker & 0xE0 == 0xA0 else 0
            text = self._bytes[begin : begin + 1 + length]
            is_same = self._bytes[self._at[left]] == marker
            for at in range(1, 1 + length):
                is_same &= self._bytes[self._at[left] + at] == text[at]
            same = left[is_same]
            try:
                word = kind(bytes(text[1:]).decode())
            except ValueError:  # a newer version's, or no text
                self.odd[same] = True
            else:
                found[same] = len(words)
                words.append(word)
            self._at[same] += 1 + length
            left = left[~is_same]
        self.odd[left] = True
        self._check(slice(None))
        return found, words

    def blobs(self) -> tuple[Ints, Ints]:
        """The next field, bytes: where they begin, for :meth:`read`, and how many they are."""
        self._expect_field()
        marker = self._bytes[self._at]
        lengths = np.zeros(len(marker), np.int64)
        heads = np.ones(len(marker), np.int64)
        for first in _BLOBS:
            here = marker == first
            width = _LENGTH_BYTES[first]
            lengths[here] = self._numbers[width][self._at[here] + 1]
            heads[here] = 1 + width
        self._odd_unless(heads > 1)
        begins = self._at + heads
        self._at = begins + lengths
        self._check(slice(None))
        return begins, lengths

    def read(self, begins: Ints, length: int) -> _Bytes:
        """As many bytes from some places on, a row each."""
        pieces = np.ndarray((len(self._bytes) - length + 1,), f"V{length}", self._bytes, 0, (1,))
        return pieces[begins].view(np.uint8).reshape(len(begins), length)

    def counts(self) -> tuple[Ints, Ints]:
        """The next field, a list of numbers: how many there are, and how many of them are negative. A long one is odd."""
        self._expect_field()
        counts, self._at = self._lengths_of_arrays()
        self._odd_unless((counts >= 0) & (counts <= _MOST_ELEMENTS))
        negative = np.zeros(len(counts), np.int64)
        rows = np.flatnonzero((counts > 0) & ~self.odd)
        done = 0
        while rows.size:
            negative[rows] += self._ints(rows) < 0
            self._check(rows)
            done += 1
            rows = rows[(counts[rows] > done) & ~self.odd[rows]]
        return counts, negative

    def skip(self, fields: int = 1) -> None:
        """Pass over the next fields, whatever they are; one with a long list in it is odd."""
        for _ in range(fields):
            self._expect_field()
            pending = np.ones(len(self._at), np.int64)
            rows = np.flatnonzero(~self.odd)
            while rows.size:
                pending[rows] += self._skip_one(rows) - 1
                self.odd[rows[pending[rows] > _MOST_ELEMENTS]] = True
                self._check(rows)
                rows = rows[(pending[rows] > 0) & ~self.odd[rows]]

    def _expect_field(self) -> None:
        self._left = self._left - 1
        self._odd_unless(self._left >= 0)

    def _odd_unless(self, is_fine: npt.NDArray[np.bool_]) -> None:
        self.odd |= ~is_fine

    def _check(self, rows: Rows | slice) -> None:
        """What lies beyond its record's end is odd, and is read there no more."""
        at, ends = self._at[rows], self._ends[rows]
        beyond = at > ends
        if beyond.any():
            self.odd[rows] |= beyond
            self._at[rows] = np.minimum(at, ends)

    def _ints(self, rows: Rows | slice) -> Ints:
        at = self._at[rows]
        first = self._bytes[at]
        following = _FOLLOWING[first]
        values: Ints = _ALONE[first]
        is_odd = following == _ODD
        for width in np.flatnonzero(np.bincount(following, minlength=256)).tolist():
            if width in (0, _ODD):
                continue
            here = following == width
            read = self._numbers[width][at[here] + 1]
            is_signed = first[here] >= 0xD0
            values[here] = read
            if is_signed.any():
                signed = read.astype(f"u{width}").view(f"i{width}")
                values[here] = np.where(is_signed, signed, values[here])
            if width == 8:
                is_odd[here] = ~is_signed & (values[here] < 0)
        if is_odd.any():
            self.odd[rows] |= is_odd
        self._at[rows] = at + np.where(following == _ODD, 0, following) + 1
        return values

    def _lengths_of_arrays(self) -> tuple[Ints, Ints]:
        """How many elements the arrays have that begin where we stand, -1 for what is none; and where their elements begin."""
        marker = self._bytes[self._at]
        short = (marker & 0xF0) == 0x90
        long = marker == _ARRAY_16
        counts = np.where(short, marker.astype(np.int64) & 15, -1)
        counts[long] = self._numbers[2][self._at[long] + 1]
        return counts, self._at + np.where(long, 3, 1)

    def _skip_one(self, rows: Rows) -> Ints:
        """Pass over one value, of an array its head: how many values follow that belong to it."""
        at = self._at[rows]
        first = self._bytes[at]
        size = _SIZE[first]
        inner = np.where((first & 0xF0) == 0x90, first & 15, 0).astype(np.int64)
        if not size.all():
            for begins, width in _LENGTH_BYTES.items():
                here = first == begins
                size[here] = 1 + width + self._numbers[width][at[here] + 1].astype(np.int64)
            here = first == _ARRAY_16
            inner[here] = self._numbers[2][at[here] + 1]
            size[here] = 3
            self.odd[rows[size == 0]] = True
        self._at[rows] = at + np.maximum(size, 1)
        return inner


def alike(chosen: npt.NDArray[np.bool_], *columns: Ints) -> Iterator[tuple[list[int], Rows]]:
    """The values that some columns have together, where they are chosen, and at which places; for columns of few different values."""
    parts: list[tuple[list[int], Rows]] = [([], np.flatnonzero(chosen))]
    for column in columns:
        parts = [
            ([*values, value], rows[column[rows] == value])
            for values, rows in parts
            for value in np.unique(column[rows]).tolist()
        ]
    yield from parts

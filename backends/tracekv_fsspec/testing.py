"""What any store has to do, as a test class to subclass; for this package's engines and for anybody's own.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self): ...            # the store under test, empty

        def set(self, path, data): ...  # put, get and remove objects without the store under test
        def get(self, path): ...
        def remove(self, path): ...
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest

from tracekv.journal.vocabulary import Outcome, Tier
from tracekv_fsspec.format import ALIGNMENT, aligned
from tracekv_fsspec.store import AlreadyExists, Range, Store, StoreError, check_usable, read_whole
from tracekv_fsspec.tally import tally


def read(store: Store, path: str, *ranges: tuple[int, int]) -> list[bytes]:
    """What the ranges of an object hold."""
    buffers = [bytearray(length) for _, length in ranges]
    store.read(path, [Range(*each) for each in ranges], [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


def listed(store: Store, prefix: str, after: str = "") -> list[tuple[str, int]]:
    """Paths and sizes below a folder."""
    return [(entry.path, entry.size) for entry in store.list(prefix, after=after)]


class _Told:
    """Takes what a read says of its progress, and looks whether it is so."""

    def __init__(self, expected: list[bytes]) -> None:
        self.expected = expected
        self.buffers = [bytearray(len(each)) for each in expected]
        self.ends: dict[int, int] = {}

    def restart(self) -> None:
        self.ends.clear()

    def filled(self, number: int, end: int) -> None:
        assert self.ends.get(number, 0) < end
        assert self.buffers[number][:end] == self.expected[number][:end]
        self.ends[number] = end


class StoreContract:
    """Every promise of :class:`tracekv_fsspec.store.Store`. Objects are put and looked at past the store under test."""

    @pytest.fixture
    def store(self) -> Store:
        """The store under test, empty; a subclass gives and closes it."""
        raise NotImplementedError

    def set(self, path: str, data: bytes) -> None:
        """Put an object without the store under test."""
        raise NotImplementedError

    def get(self, path: str) -> bytes:
        """Read an object without the store under test."""
        raise NotImplementedError

    def remove(self, path: str) -> None:
        """Remove an object without the store under test."""
        raise NotImplementedError

    def test_what_is_put_is_there(self, store: Store) -> None:
        store.put("a/b/c", bytearray(b"hello"), create_only=True)
        assert self.get("a/b/c") == b"hello"

    def test_parts_follow_each_other(self, store: Store) -> None:
        page = aligned(ALIGNMENT)
        page[:5] = b"whole"
        store.put("parts", b"one", bytearray(b""), memoryview(b"xtwox")[1:4], page, b"end", create_only=True)
        assert self.get("parts") == b"onetwowhole" + bytes(ALIGNMENT - 5) + b"end"

    def test_pages_are_written_and_read_as_they_are(self, store: Store) -> None:
        pages = [aligned(ALIGNMENT) for _ in range(40)]
        for number, page in enumerate(pages):
            page[:] = os.urandom(ALIGNMENT)
            page[0] = number
        store.put("pages", *pages, create_only=True)
        assert self.get("pages") == b"".join(pages)
        into = [aligned(ALIGNMENT) for _ in pages]
        order = range(len(pages))
        store.read("pages", [Range(number * ALIGNMENT, ALIGNMENT) for number in order], into)
        assert [bytes(page) for page in into] == [bytes(page) for page in pages]

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        store.put("none", b"", create_only=True)
        assert self.get("none") == b""
        assert read_whole(store, "none", 0) == b""
        assert listed(store, "") == [("none", 0)]

    def test_a_second_create_is_told_and_leaves_the_first(self, store: Store) -> None:
        store.put("a", b"first", create_only=True)
        with pytest.raises(AlreadyExists) as caught:
            store.put("a", b"second", create_only=True)
        assert caught.value.outcome is Outcome.EXISTS
        assert self.get("a") == b"first"

    def test_a_write_that_isnt_create_only_replaces(self, store: Store) -> None:
        store.put("a", b"first", create_only=True)
        store.put("a", b"2nd", create_only=False)
        assert self.get("a") == b"2nd"

    def test_a_create_race_has_one_winner(self, store: Store) -> None:
        if not store.is_create_atomic:
            return  # and says so: such a store relies on its writers' names being unique
        for race in range(3):
            won: list[int] = []
            lost: list[int] = []
            start = threading.Barrier(8)

            def create(
                number: int,
                path: str = f"raced{race}",
                start: threading.Barrier = start,
                won: list[int] = won,
                lost: list[int] = lost,
            ) -> None:
                start.wait()
                try:
                    store.put(path, b"%d" % number * 5000, create_only=True)
                except AlreadyExists:
                    lost.append(number)
                else:
                    won.append(number)

            threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert (len(won), len(lost)) == (1, 7)
            assert self.get(f"raced{race}") == b"%d" % won[0] * 5000

    def test_ranges_fill_their_buffers(self, store: Store) -> None:
        data = bytes(range(256)) * 40
        self.set("a", data)
        ranges = [(0, 10), (10, 90), (100, 1), (5000, 240), (10_000, 240)]
        assert read(store, "a", *ranges) == [data[at : at + length] for at, length in ranges]
        assert read(store, "a") == []

    def test_a_range_larger_than_what_is_merged_comes_whole(self, store: Store) -> None:
        data = os.urandom(5 << 20)
        self.set("large", data)
        assert read(store, "large", (0, len(data))) == [data]
        assert read_whole(store, "large", len(data)) == data

    def test_what_it_says_has_come_is_there(self, store: Store) -> None:
        data = os.urandom(3 << 20)
        self.set("large", data)
        ranges = [
            Range(0, 10),
            Range(10, 700_000),
            Range(700_010, 64),
            Range(1 << 20, 1 << 20),
            Range(len(data) - 5, 5),
        ]
        told = _Told([data[at : at + length] for at, length in ranges])
        tally.progress = told
        try:
            store.read("large", ranges, [memoryview(buffer) for buffer in told.buffers])
        finally:
            tally.progress = None
        assert told.buffers == told.expected
        assert told.ends in ({}, {number: length for number, (_, length) in enumerate(ranges)})

    @pytest.mark.parametrize("wanted", [(3, 3), (5, 1), (100, 5), (0, 8192)])
    def test_a_range_past_the_end_is_truncated(self, store: Store, wanted: tuple[int, int]) -> None:
        self.set("a", b"hello")
        with pytest.raises(StoreError) as caught:
            read(store, "a", wanted)
        assert caught.value.outcome is Outcome.TRUNCATED

    def test_an_object_that_isnt_there_is_missing(self, store: Store) -> None:
        with pytest.raises(StoreError) as caught:
            read(store, "nobody", (0, 1))
        assert caught.value.outcome is Outcome.MISSING

    def test_a_whole_object_is_read_by_its_size(self, store: Store) -> None:
        self.set("a", b"hello")
        assert read_whole(store, "a", 5) == b"hello"
        with pytest.raises(StoreError):
            read_whole(store, "a", 6)

    def test_sizes_are_told_in_the_order_of_the_question(self, store: Store) -> None:
        self.set("d/a", b"hello")
        self.set("d/b", b"")
        assert store.sizes(["d/b", "nobody", "d/a"]) == [0, None, 5]
        assert store.sizes(["d/a"]) == [5]
        assert store.sizes([]) == []

    def test_a_listing_is_in_order_and_goes_on_behind_a_path(self, store: Store) -> None:
        for path in ("m/w2/000", "m/w1/001", "m/w1/000", "s/x"):
            self.set(path, path.encode())
        assert listed(store, "m/") == [("m/w1/000", 8), ("m/w1/001", 8), ("m/w2/000", 8)]
        assert listed(store, "m/", "m/w1/000") == [("m/w1/001", 8), ("m/w2/000", 8)]
        assert listed(store, "m/", "m/w1/~") == [("m/w2/000", 8)]
        assert listed(store, "m/w1/", "m/w1/000") == [("m/w1/001", 8)]
        assert listed(store, "m/w2/") == [("m/w2/000", 8)]
        assert listed(store, "nothing/") == []
        assert listed(store, "m") == listed(store, "m/")

    def test_a_folder_isnt_another_that_begins_alike(self, store: Store) -> None:
        self.set("m/1", b"1")
        self.set("mm/1", b"1")
        assert listed(store, "m/") == [("m/1", 1)]

    def test_no_cache_hides_what_others_do(self, store: Store) -> None:
        assert listed(store, "m/") == []
        self.set("m/1", b"1")
        assert listed(store, "m/") == [("m/1", 1)]
        assert read(store, "m/1", (0, 1)) == [b"1"]
        self.remove("m/1")
        self.set("m/1", b"22")
        assert listed(store, "m/") == [("m/1", 2)]
        assert store.sizes(["m/1"]) == [2]
        assert read(store, "m/1", (0, 2)) == [b"22"]
        self.remove("m/1")
        assert listed(store, "m/") == []
        assert store.sizes(["m/1"]) == [None]

    def test_a_delete_is_gone_and_may_be_repeated(self, store: Store) -> None:
        self.set("d/a", b"1")
        store.delete("d/a")
        store.delete("d/a")
        assert listed(store, "") == []
        store.put("d/a", b"2", create_only=True)
        assert self.get("d/a") == b"2"

    def test_a_usable_store_is_left_as_it_was(self, store: Store) -> None:
        check_usable(store)
        assert listed(store, "") == []

    def test_many_threads_may_call(self, store: Store) -> None:
        data = os.urandom(100_000)
        self.set("a", data)
        wrong: list[int] = []

        def look(number: int) -> None:
            for at in range(0, 90_000, 9_000):
                if read(store, "a", (at + number, 500)) != [data[at + number : at + number + 500]]:
                    wrong.append(number)

        threads: Sequence[threading.Thread] = [threading.Thread(target=look, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_reports_can_name_it(self, store: Store) -> None:
        assert store.engine
        assert isinstance(store.tier, Tier)
        assert "@" not in store.url

"""What a journal tells about its process: clock, run, rank, caches, and where its callbacks are defined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracekv.journal.records import (
    CallbackSource,
    ClockAnchor,
    ConnectorWrapped,
    GroupFacts,
    ProcessStarted,
    Record,
    RegisterCall,
    RunJoined,
)
from tracekv.journal.vocabulary import Callback, Outcome, Side
from tracekv.views import names
from tracekv.views.model import Attributes

#: The group of a layer, or of pages, that the registered layout doesn't name.
UNKNOWN_GROUP = -1

#: How store operations end that moved their bytes; those of others were only to be moved.
MOVED = frozenset({Outcome.OK, Outcome.EXISTS})

#: Records that :class:`Facts` learns from.
TELLING = frozenset({ProcessStarted, ClockAnchor, RunJoined, ConnectorWrapped, RegisterCall})


class Facts:
    """Grows as records are observed; every view that needs it has one per journal.

    Attributes:
        process_id: 16 bytes, b"" before the first record.
        run_id: 16 bytes, b"" while unknown. ``rank`` and ``world`` are None while unknown.
        started: The process's first record.
        groups: The registered layer groups by id.
        has_scheduler: Whether this process has a traced scheduler: then it is the one that ends requests and steps.
        has_worker: Whether it has a traced worker: then it answers ``get_finished``.
        engines: How many engines the process has had: where a half of a connector is constructed again, another one begins, which
            numbers its requests and passes anew.
    """

    def __init__(self) -> None:
        self.started: ProcessStarted | None = None
        self.process_id = b""
        self.run_id = b""
        self.rank: int | None = None
        self.world: int | None = None
        self.groups: dict[int, GroupFacts] = {}
        self.tokens_per_block = 0
        self.has_scheduler = False
        self.has_worker = False
        self.engines = 0
        self._wrapped: set[Side] = set()
        self._group_of_layer: dict[int, int] = {}
        self._offset_ns = 0
        self._classes: dict[Side, str] = {}
        self._sources: dict[tuple[Side, str], CallbackSource] = {}

    def observe(self, record: Record) -> None:
        """Take what a record tells about the process; most tell nothing."""
        match record:
            case ProcessStarted():
                self.started = record
                self.process_id = record.process_id
                self._offset_ns = record.wall_ns - record.monotonic_ns
            case ClockAnchor():
                self._offset_ns = record.wall_ns - record.monotonic_ns
            case RunJoined():
                self.run_id = record.run_id
                self.rank = record.rank if record.rank >= 0 else None
                self.world = record.world if record.world >= 0 else None
            case ConnectorWrapped():
                if not self.engines or record.side in self._wrapped:
                    self.engines += 1
                    self._wrapped.clear()
                self._wrapped.add(record.side)
                self.has_scheduler |= record.side is Side.SCHEDULER
                self.has_worker |= record.side is Side.WORKER
                self._classes[record.side] = record.class_name
                for source in record.implemented:
                    self._sources[record.side, source.name] = source
            case RegisterCall():
                self.tokens_per_block = record.tokens_per_block
                self.groups = {group.layer_group_id: group for group in record.groups}
                self._group_of_layer = {layer: g.layer_group_id for g in record.groups for layer in g.layer_ids}

    @property
    def run(self) -> bytes:
        """What this process's trace ids are derived from: the run id, or the process id while there is none."""
        return self.run_id or self.process_id

    def unix_ns(self, monotonic_ns: int) -> int:
        """A record's time as Unix time, by the clock anchor seen last."""
        return monotonic_ns + self._offset_ns

    def group_of_layer(self, layer: int) -> int:
        """The layer group that owns a layer, or :data:`UNKNOWN_GROUP`."""
        return self._group_of_layer.get(layer, UNKNOWN_GROUP)

    def window(self, group: int) -> int:
        """Window of a group in tokens; 0 for full attention, -1 where the layout doesn't tell."""
        known = self.groups.get(group)
        if known is None:
            return -1
        return known.window_size or 0

    def bytes_per_page(self, group: int) -> int | None:
        """Bytes of one page of a group, None where the layout doesn't tell."""
        known = self.groups.get(group)
        return None if known is None else known.bytes_per_page

    def source_of(self, side: Side, method: str) -> CallbackSource | None:
        """Where a callback is defined, as far as the journal says."""
        return self._sources.get((side, method))

    def function(self, side: Side, method: str) -> str:
        """``Class.method`` of the inner connector; the method alone where its class isn't known."""
        owner = self._classes.get(side)
        return f"{owner}.{method}" if owner else method


def callback_name(number: int) -> tuple[Side, str]:
    """Side and method name of a callback number, also of one that this version doesn't know."""
    try:
        callback = Callback(number)
    except ValueError:
        return (Side.SCHEDULER if number < 32 else Side.WORKER), f"callback_{number}"
    return callback.side, callback.method


def count_pages(slots: Sequence[int]) -> int:
    """How many of some page slots address a page; -1 is a block that has none."""
    return len(slots) if min(slots, default=0) >= 0 else sum(slot >= 0 for slot in slots)


def hook_times(payload: bytes) -> Iterable[tuple[int, int]]:
    """``(started_ns, ended_ns)`` by layer of one hook of a pass (``LayerHooks``)."""
    times = memoryview(payload)[: len(payload) // 16 * 16].cast("q").tolist()
    return zip(times[::2], times[1::2], strict=True)


def page_attributes(facts: Facts, pages: Sequence[Sequence[int]]) -> Attributes:
    """Pages and bytes of page slots by layer group (index is the group's id): what a callback was handed, so ``eligible``.

    -1 is a block without a page: counted apart, and worth no bytes.
    """
    counts = [count_pages(slots) for slots in pages]
    sizes = [facts.bytes_per_page(group) for group in range(len(pages))]
    attributes: Attributes = {
        names.SOURCE: "eligible",
        names.PAGES: sum(counts),
        names.PAGES_ABSENT: sum(map(len, pages)) - sum(counts),
        names.GROUPS: list(range(len(pages))),
        names.GROUP_PAGES: counts,
        names.GROUP_WINDOW: [facts.window(group) for group in range(len(pages))],
    }
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        nbytes = [count * size for count, size in zip(counts, known, strict=True)]
        attributes[names.BYTES] = sum(nbytes)
        attributes[names.GROUP_BYTES] = nbytes
    return attributes

"""What a rule is, and what it finds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from tracekv.journal.records import Record
from tracekv.journal.vocabulary import Callback


class Severity(str, Enum):
    """How sure a rule is: a violation is proved by its records, a suspect is a guess (a limit, a habit, an intent)."""

    VIOLATION = "violation"
    SUSPECT = "suspect"


class By(str, Enum):
    """Whose side a fault is on."""

    CONNECTOR = "connector"
    RUNTIME = "runtime"


#: Pickled None, b"", "", [], {} and the like have no more bytes.
EMPTY_PICKLE = 6


@dataclass(frozen=True, slots=True)
class Evidence:
    """A record that proves a finding, and the process that it came with."""

    source: str
    record: Record


@dataclass(slots=True)
class Finding:
    """A rule was broken.

    Attributes:
        id: ``rule#number``, of this checker.
        rule: Stable id of the rule.
        title: The rule in one sentence.
        fix: What to do.
        by: Whose side it is on.
        callback: The callback's name, or "" where it is none's.
        numbers: What was counted, by name.
        caused_by: Id of the finding that this one follows from.
    """

    id: str
    rule: str
    severity: Severity
    by: By
    title: str
    fix: str
    source: str
    rank: int | None
    step: int
    request: int | None
    callback: str
    at_ns: int
    numbers: dict[str, Any]
    evidence: list[Evidence] = field(default_factory=list)
    caused_by: str | None = None


@dataclass(slots=True)
class Hit:
    """What a rule yields; the checker makes a :class:`Finding` of it."""

    record: Record
    numbers: dict[str, Any]
    request: int | None
    evidence: Sequence[Record]
    callback: int


@dataclass(frozen=True)
class Limits:
    """Where a duration, a size or a count begins to be too much.

    Attributes:
        query_ns: A query; on V1 the radix tree's lock is held meanwhile.
        get_finished_ns: A poll; it gates every pass of every rank.
        metadata_bytes: Pickled metadata of one pass.
        parked_ns: A request that is parked.
        starved_ns: A request that is parked while nothing but ``get_finished`` is called.
        kept_ns: Pages that are kept after ``request_finished``.
        skew_ns: Between the first and the last rank that return an id.
        silent_ns: A request that is in no pass and was not announced.
        noticed_ns: From the end of a load to the poll that names it.
        queued_ns: A load that waits for others.
        io_in_query_ns: A store operation inside a query.
        recompute_factor, recompute_floor_ns: A wait of so many times the computing, and at least so long.
        bounded_lookups: Lookups in a row that one layer group brings to nothing.
        settle_passes: Passes after which reports of a pass are taken as complete.
    """

    query_ns: int = 20_000_000
    get_finished_ns: int = 50_000_000
    metadata_bytes: int = 4 << 20
    parked_ns: int = 60_000_000_000
    starved_ns: int = 10_000_000_000
    kept_ns: int = 60_000_000_000
    skew_ns: int = 10_000_000_000
    silent_ns: int = 300_000_000_000
    noticed_ns: int = 100_000_000
    queued_ns: int = 50_000_000
    io_in_query_ns: int = 5_000_000
    recompute_factor: float = 2.0
    recompute_floor_ns: int = 50_000_000
    bounded_lookups: int = 8
    settle_passes: int = 8


class Rule:
    """One rule of the contract.

    A subclass has a docstring of this shape, from which the page of rules is made::

        What must hold, in one sentence.

        Contract: what the contract says, and where.
        Runtime: what the runtime does about it.
        Fix: what to do.

    and methods, each of which gets an event of :mod:`tracekv.rules.events` and yields what it finds. A rule may keep state, in
    bounds. What nothing can be found in isn't told: that is what keeps the rules cheap. What :mod:`tracekv.rules.plain` finds plain
    is told all the same while a rule listens that isn't listed there; other events are told where it is said below.

    - :class:`~tracekv.rules.events.Query`: ``on_query``, but for plain answers; then ``on_slow_query``, those that may have taken too
      long, and ``on_lookup``, those that aren't as looked up, or that one layer group brought to nothing.
    - :class:`~tracekv.rules.events.Moved`: ``on_astray``, transfers that don't plainly fill whole pages of their request's own;
      then ``on_late``, those of a request that has left or has lost pages, and ``on_load``, all loads.
    - :class:`~tracekv.rules.events.Loaded`: ``on_loaded``, :class:`~tracekv.rules.events.Settled`: ``on_left``; not where all went
      plainly well.
    - ``on_alloc``: without a query, after several, or flat in spite of several groups; ``on_finish``: another one, an odd answer, or
      lists that aren't as told; ``on_start``: unbound, unregistered, or slow.
    - The event of their name: ``on_rekeyed``, ``on_listed``, ``on_claim``, ``on_build``, ``on_bind``, ``on_register``, ``on_pass``,
      ``on_watched``, ``on_stored``, ``on_polled``, ``on_idled``, ``on_returned``, ``on_scheduled``, ``on_failed``, ``on_time``.

    Attributes:
        id: Stable.
        severity: Violation where the records prove it, suspect where it is a guess.
        by: Whose side it is on.
        follows: Ids of rules from which a finding of this one may follow, for the same request or pass.
        once: Found once in a run is enough.
    """

    id: ClassVar[str] = ""
    severity: ClassVar[Severity] = Severity.VIOLATION
    by: ClassVar[By] = By.CONNECTOR
    follows: ClassVar[frozenset[str]] = frozenset()
    once: ClassVar[bool] = False

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @staticmethod
    def finding(
        record: Record,
        *evidence: Record | None,
        request: int | None = None,
        callback: Callback | int | None = None,
        **numbers: Any,
    ) -> Hit:
        """A finding about ``record``; ``evidence`` are further records that prove it."""
        code = getattr(record, "callback", 0) if callback is None else callback
        whose = getattr(record, "request_id", None) if request is None else request
        others = [each for each in evidence if each is not None]
        return Hit(record, numbers, whose, [*others, record], int(code))

    @classmethod
    def parts(cls) -> dict[str, str]:
        """The docstring's parts: ``Title``, ``Contract``, ``Runtime``, ``Fix``."""
        return _parts(cls.__doc__ or "")


@functools.cache
def _parts(docstring: str) -> dict[str, str]:
    lines = inspect.cleandoc(docstring).splitlines()
    found: dict[str, list[str]] = {"Title": []}
    current = "Title"
    for line in lines:
        head, separator, rest = line.partition(": ")
        if separator and head in ("Contract", "Runtime", "Fix"):
            current = head
            found[current] = [rest]
        elif line.strip():
            found[current].append(line.strip())
    return {name: " ".join(text) for name, text in found.items()}

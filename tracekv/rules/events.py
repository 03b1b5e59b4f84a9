"""What rules are told: a record with the state that it changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    FinishCall,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    QueryCall,
    RegisterCall,
    StoreOperation,
    Transfer,
    WatchReport,
)
from tracekv.rules.state import Keyed, Request, Run, Source


class Query(NamedTuple):
    """A query was answered."""

    run: Run
    source: Source
    request: Request
    record: QueryCall


class Rekeyed(NamedTuple):
    """A query's last block has a key that an earlier query's had: what it stood for then, and now."""

    run: Run
    source: Source
    request: Request
    record: QueryCall
    before: Keyed
    now: Keyed


class Alloc(NamedTuple):
    """Pages were told; ``request`` None where none was queried."""

    run: Run
    source: Source
    request: Request | None
    record: AllocCall


class Build(NamedTuple):
    """A pass was built, and something is odd about it.

    Attributes:
        short: ``(request, tokens reached)`` of those whose pages hold fewer tokens.
        asked_again: Requests that were asked about once more and go on with the pages they had.
    """

    run: Run
    source: Source
    record: BuildCall
    short: Sequence[tuple[Request, int]]
    asked_again: Sequence[Request]


class Claim(NamedTuple):
    """A request was given a page; ``other`` held it before, and runs in the same pass."""

    run: Run
    source: Source
    record: Call
    request: Request
    other: Request
    group: int
    page: int


class Listed(NamedTuple):
    """A page was listed more than once for a request: ``slots`` of one layer group, in its block order."""

    run: Run
    source: Source
    record: Call
    request: Request
    group: int
    slots: Sequence[int]


class Bind(NamedTuple):
    """Metadata was bound; ``others`` are what other ranks bound in the same pass, ``built`` what the leader made.

    With one rank only what is empty or large is told.
    """

    run: Run
    source: Source
    record: BindCall
    others: Sequence[tuple[Source, BindCall]]
    built: BuildCall | None


class Register(NamedTuple):
    """Caches were registered; ``before`` is an earlier registration of the same worker."""

    run: Run
    source: Source
    record: RegisterCall
    before: RegisterCall | None


class Start(NamedTuple):
    """``start_load_kv``, where a load took long, or something is odd.

    ``is_bound`` is None where it isn't known whether metadata was bound for it.
    """

    run: Run
    source: Source
    record: Call
    is_bound: bool | None
    loaded_tokens: int


class Pass(NamedTuple):
    """A forward has ended on a rank, and there is something about its hooks; a regular one isn't told.

    Attributes:
        waits, saves: When each layer's hook was entered, by layer; 0 where it wasn't called.
        prefilled: The pass's prompt tokens, as far as they are known.
    """

    run: Run
    source: Source
    record: Call
    hooks: LayerHooks | None
    waits: Sequence[int]
    saves: Sequence[int]
    prefilled: int


class Moved(NamedTuple):
    """A transfer was reported; ``request`` None where it isn't known."""

    run: Run
    source: Source
    request: Request | None
    record: Transfer


class Watched(NamedTuple):
    """The watch saw a pool being indexed with a negative number."""

    run: Run
    source: Source
    record: WatchReport


class Stored(NamedTuple):
    """A store operation was reported."""

    run: Run
    source: Source
    record: StoreOperation


class Finish(NamedTuple):
    """The end of a request was announced; ``first`` is the first announcement where this is another one."""

    run: Run
    source: Source
    request: Request
    record: FinishCall
    first: FinishCall | None


class Polled(NamedTuple):
    """``get_finished`` was given ids, or returned some."""

    run: Run
    source: Source
    record: FinishedCall


class Idled(NamedTuple):
    """``get_finished`` was given nothing and returned nothing for a while, and one of these polls was long."""

    run: Run
    source: Source
    record: IdlePolls


class Returned(NamedTuple):
    """``get_finished`` returned an id.

    Attributes:
        kind: ``saving`` or ``loading``, the list that it was in.
        fate: ``ok``; ``swapped``: it was pending in the other list; ``twice``; ``unknown``.
        before: The record that explains the fate: where it was given, or returned before.
    """

    run: Run
    source: Source
    record: FinishedCall
    kind: str
    request_id: int
    fate: str
    request: Request | None
    before: object


class Scheduled(NamedTuple):
    """A scheduler callback on a rank that does not lead."""

    run: Run
    source: Source
    record: Call


class Failed(NamedTuple):
    """A callback raised; ``built`` is the pass's build, where it had succeeded before."""

    run: Run
    source: Source
    record: Call
    built: BuildCall | None


class Loaded(NamedTuple):
    """Enough passes have gone by that everything about a request's load was reported.

    ``promised`` is what :func:`tracekv.rules.promise.promise` says: the pages that had to be filled, by layer group.
    """

    run: Run
    source: Source
    request: Request
    promised: Mapping[int, frozenset[int]] | None


class Settled(NamedTuple):
    """Enough passes have gone by that everything about a request's end was reported."""

    run: Run
    source: Source
    request: Request


class Time(NamedTuple):
    """About a second has gone by; ``now_ns`` on the leader's clock."""

    run: Run
    source: Source
    now_ns: int

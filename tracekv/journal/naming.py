"""Which records name requests, told by their first fields: most of those that are passed over needn't be decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tracekv.journal.records import AnyRecord, Record

KINDS: tuple[type[Record], ...] = AnyRecord.__args__
TAGS: dict[type[Record], Any] = {kind: kind.__struct_config__.tag for kind in KINDS}
_FIELDS = {kind: frozenset(kind.__struct_fields__) for kind in KINDS}
_LISTS = ("request_ids", "saving_given", "loading_given", "saving_returned", "loading_returned")
#: Kinds that name one request, and those that list some.
NAMING = tuple(kind for kind in KINDS if "request_id" in _FIELDS[kind])
LISTING = tuple(kind for kind in KINDS if not _FIELDS[kind].isdisjoint(_LISTS))


def _head(kind: type[Record]) -> type[msgspec.Struct]:
    """A struct of a kind's fields up to the last one that names a request; what follows is passed over."""
    fields = kind.__struct_fields__
    last = max(at for at, name in enumerate(fields) if name == "request_id" or name in _LISTS)
    return msgspec.defstruct(kind.__name__, fields[: last + 1], array_like=True, tag=TAGS[kind], gc=False)


_HEADS = tuple(_head(kind) for kind in (*NAMING, *LISTING))
_LISTED = {head: tuple(name for name in _LISTS if name in head.__struct_fields__) for head in _HEADS[len(NAMING) :]}
_union: Any = _HEADS[0]
for _each in _HEADS[1:]:
    _union = _union | _each
_heads: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_union)


def named_of(payload: bytes, wanted: frozenset[int]) -> Iterable[int]:
    """Those of some requests that an encoded record of a naming or listing kind is about.

    Raises:
        msgspec.DecodeError: It isn't of this version.
    """
    head = _heads.decode(payload)
    lists = _LISTED.get(type(head))
    if lists is None:
        return (head.request_id,) if head.request_id in wanted else ()
    if len(lists) == 1:
        return wanted.intersection(getattr(head, lists[0]))
    return wanted.intersection(request_id for name in lists for request_id in getattr(head, name))


def concerns(record: Any, request_id: int) -> bool:
    """Whether a record names a request, or lists it."""
    if type(record) in NAMING:
        return bool(record.request_id == request_id)
    return any(request_id in getattr(record, name, ()) for name in _LISTS)

"""What metadata of a known shape plans to move: pages by direction and layer group.

For connectors that know nothing of tracekv: what a pass was meant to move shows beside what it moved, if that is known at all.
A shape is looked for once per class of metadata; an unknown one costs a look into a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tracekv.journal.records import Transfer
from tracekv.journal.vocabulary import Direction, Source, Tier

#: ``(direction, layer group, page slots)``.
Planned = tuple[Direction, int, list[int]]
Describer = Callable[[Any], list[Planned]]

#: A plan names pages, not requests.
_UNKNOWN_REQUEST = -1
_of_class: dict[type, Describer | None] = {}


def plan_of(
    metadata: object, page_bytes: Mapping[int, int], step: int, started_ns: int, ended_ns: int
) -> list[Transfer]:
    """What ``metadata`` plans, as records; ``page_bytes`` by layer group, a group that isn't there yet counts 0 bytes."""
    return [
        Transfer(
            direction, Source.PLANNED, Tier.DISK, _UNKNOWN_REQUEST, step, group, pages,
            len(pages) * page_bytes.get(group, 0), 0, started_ns, ended_ns, 0, 0, 0, 0, 0, None,
        )
        for direction, group, pages in describe(metadata)
    ]  # fmt: skip


def describe(metadata: object) -> list[Planned]:
    """What ``metadata`` plans; empty where its shape isn't known or nothing is planned."""
    kind = type(metadata)
    if kind in _of_class:
        describer = _of_class[kind]
        return describer(metadata) if describer else []
    has_lists = all(isinstance(getattr(metadata, name, None), list) for name in ("load", "save"))
    items: Sequence[Any] = [*metadata.load, *metadata.save] if has_lists else ()  # type: ignore[attr-defined]
    if has_lists and not items:
        return []  # nothing to tell the shape by yet
    _of_class[kind] = describer = _describe_files if has_lists and all(map(_names_a_file, items)) else None
    return describer(metadata) if describer else []


def _names_a_file(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) in (2, 3) and all(isinstance(number, int) for number in item[1:])


def _describe_files(metadata: Any) -> list[Planned]:
    """The document's examples: lists ``load`` and ``save`` of ``(file, page)`` or ``(file, layer group, page)``."""
    return [*_pages(Direction.LOAD, metadata.load), *_pages(Direction.SAVE, metadata.save)]


def _pages(direction: Direction, items: Iterable[tuple[Any, ...]]) -> list[Planned]:
    by_group: dict[int, list[int]] = {}
    for item in items:
        group = item[1] if len(item) == 3 else 0
        by_group.setdefault(group, []).append(item[-1])
    return [(direction, group, pages) for group, pages in by_group.items()]

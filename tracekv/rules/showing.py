"""Findings as plain data, for printing and for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from tracekv.journal.records import Record
from tracekv.journal.vocabulary import Callback
from tracekv.rules.model import Finding

_MOST_ITEMS = 12


def as_data(found: Finding) -> dict[str, Any]:
    """A finding with its evidence, as JSON knows it."""
    return {
        "id": found.id,
        "rule": found.rule,
        "severity": found.severity.value,
        "by": found.by.value,
        "what": found.title,
        "fix": found.fix,
        "source": found.source,
        "rank": found.rank,
        "step": found.step,
        "request": found.request,
        "callback": found.callback,
        "at_ns": found.at_ns,
        "numbers": _plain(found.numbers),
        "caused_by": found.caused_by,
        "evidence": [
            {"source": each.source, "record": type(each.record).__name__, **record_fields(each.record)}
            for each in found.evidence
        ],
    }


def record_fields(record: Record) -> dict[str, Any]:
    """A record's fields by name: a callback by its method, digests in hex, long lists cut."""
    fields = {name: _plain(getattr(record, name)) for name in record.__struct_fields__}
    if fields.get("callback") in {int(callback) for callback in Callback}:
        fields["callback"] = Callback(fields["callback"]).method
    return fields


def in_words(values: dict[str, Any]) -> str:
    """``name value, name value``, without what is absent."""
    return ", ".join(f"{name} {_word(value)}" for name, value in values.items() if value is not None)


def _word(value: Any) -> str:
    return str(value) if not isinstance(value, dict) else "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 32 else f"{len(value)} bytes"
    if isinstance(value, Record):
        return record_fields(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return _cut(value)
    return value


def _cut(values: Iterable[Any]) -> list[Any]:
    plain = [_plain(each) for each in values]
    return plain if len(plain) <= _MOST_ITEMS else [*plain[:_MOST_ITEMS], f"... {len(plain) - _MOST_ITEMS} more"]

"""What is emitted is in the registry of names, with the type that it says."""

from __future__ import annotations

import pytest

from tests.views.sample_run import spans_of
from tests.views.test_any_stream import EVERYTHING
from tracekv.journal.vocabulary import Callback, Operation
from tracekv.views import names
from tracekv.views.model import Attributes, AttributeValue
from tracekv.views.spans import SpanView


def emitted(detail: str) -> list[tuple[str, Attributes]]:
    spans = spans_of(EVERYTHING, SpanView(detail=detail))
    return [
        pair
        for span in spans
        for pair in (
            (span.name, span.attributes),
            *((event.name, event.attributes) for event in span.events),
            *((span.name, link.attributes) for link in span.links),
        )
    ]


def type_of(value: AttributeValue) -> str:
    if isinstance(value, (str, bool, int, float)):
        return type(value).__name__
    kinds = {type(item).__name__ for item in value} or {"int"}
    assert len(kinds) == 1
    return f"{kinds.pop()}[]"


@pytest.mark.parametrize("detail", ["full", "economy"])
def test_every_attribute_is_listed_with_its_type(detail: str) -> None:
    for name, attributes in emitted(detail):
        for key, value in attributes.items():
            assert key in names.ATTRIBUTES, f"{key} on {name}"
            assert names.ATTRIBUTES[key].type == type_of(value), f"{key} on {name}"


def test_every_span_is_listed_or_a_callback() -> None:
    callbacks = {callback.method for callback in Callback}

    for span in spans_of(EVERYTHING):
        assert span.name in names.SPANS or span.name in callbacks


def test_every_store_operation_has_a_listed_span() -> None:
    assert {names.STORE + operation.value for operation in Operation} <= names.SPANS.keys()


def test_every_attribute_has_a_meaning_and_a_known_type() -> None:
    for attribute in names.ATTRIBUTES.values():
        assert attribute.type in {"str", "int", "bool", "str[]", "int[]"}
        assert attribute.meaning

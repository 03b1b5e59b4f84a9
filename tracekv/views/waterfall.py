"""A trace as text: one line per span, indented below its parent, with a bar where it lies in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tracekv.views import names
from tracekv.views.model import AttributeValue, Span, Status

#: Attributes shown beside a span unless others are asked for.
SHOWN = (
    names.REQUEST_ID, names.OUTCOME, names.OFFERED_TOKENS, names.HONOURED_TOKENS, names.TIER, names.LAYER, names.GROUP,
    names.CALLS, names.PAGES, names.BYTES, names.MISS_REASON, names.ERROR_TYPE,
)  # fmt: skip


def waterfall(spans: Iterable[Span], *, width: int = 32, shown: Sequence[str] = SHOWN) -> str:
    """The spans of one trace as text, children in the order of their start.

    A span whose parent isn't among ``spans`` (another process's, say) stands at the left like a root. Times are from the start of
    the first span.

    Args:
        width: Characters of the bar.
        shown: Names of the attributes to print, in this order, where a span has them.
    """
    ordered = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    if not ordered:
        return ""
    known = {span.span_id for span in ordered}
    children: dict[bytes | None, list[Span]] = {}
    for span in ordered:
        parent = span.parent_span_id if span.parent_span_id in known and span.parent_span_id != span.span_id else None
        children.setdefault(parent, []).append(span)
    first = min(span.start_ns for span in ordered)
    last = max(span.end_ns for span in ordered)
    rows: list[tuple[str, Span]] = []
    stack = [(0, span) for span in reversed(children.get(None, []))]
    while stack:
        depth, span = stack.pop()
        rows.append(("  " * depth + span.name, span))
        stack += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]
    label_width = max(len(label) for label, _ in rows)
    return "\n".join(
        f"{label:<{label_width}} |{_bar(span, first, last, width)}| "
        f"{_duration(span.start_ns - first):>9} {_duration(span.end_ns - span.start_ns):>9}{_facts(span, shown)}"
        for label, span in rows
    )


def _bar(span: Span, first: int, last: int, width: int) -> str:
    scale = width / max(1, last - first)
    begin = min(width - 1, int((span.start_ns - first) * scale))
    end = max(begin + 1, min(width, round((span.end_ns - first) * scale)))
    return " " * begin + "█" * (end - begin) + " " * (width - end)


def _duration(ns: int) -> str:
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000)):
        if ns >= size:
            return f"{ns / size:.2f} {unit}"
    return f"{ns} ns"


def _facts(span: Span, shown: Sequence[str]) -> str:
    facts = [f"{_short(name)}={_text(span.attributes[name])}" for name in shown if name in span.attributes]
    if span.status is Status.ERROR:
        facts.append("ERROR")
    return "  " + " ".join(facts) if facts else ""


def _short(name: str) -> str:
    return name.removeprefix("tracekv.").removesuffix(".id")


def _text(value: AttributeValue) -> str:
    return str(value) if isinstance(value, (str, bool, int, float)) else "[" + ",".join(map(str, value)) + "]"

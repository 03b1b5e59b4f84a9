"""What the kit says of a cell: what ran, whether the tokens are right, what moved, which rules were broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from tracekv.journal.records import AllocCall, QueryCall, WatchReport
from tracekv.journal.vocabulary import Direction, Source
from tracekv.rules import Finding, Severity
from tracekv.testing.cells import Cell
from tracekv.testing.journals import Recorded, described
from tracekv.testing.playing import Answer, Played


class Verdict(str, Enum):
    """Of a cell."""

    OK = "ok"
    BROKEN = "broken"
    NOT_SUPPORTED = "not supported"
    COULD_NOT_RUN = "could not run"


@dataclass(frozen=True)
class RequestLine:
    """A request of a cell; ``logit_difference`` is the largest of the first token's logits, None where there is none."""

    prompt_tokens: int
    device_tokens: int
    honoured_tokens: int
    tokens_equal: bool
    logit_difference: float | None
    is_cancelled: bool


@dataclass(frozen=True)
class RuleLine:
    """Findings of a rule."""

    rule: str
    severity: str
    by: str
    count: int
    first: str
    is_consequence: bool


@dataclass(frozen=True)
class CellResult:
    """One line of the report.

    Attributes:
        faults: Why it is broken, the plainest first.
        reason: Why it is not supported or could not run.
        calls: ``"scheduler.NAME"`` / ``"worker.NAME"`` -> calls, of all engines and ranks.
        nbytes: ``"load reported"`` and so on -> bytes.
        is_watch_complete: No byte can have moved unseen.
        notes: What is worth knowing and no fault.
    """

    name: str
    what: str
    verdict: Verdict
    reason: str = ""
    faults: list[str] = field(default_factory=list)
    requests: list[RequestLine] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    is_watch_complete: bool = False
    rules: list[RuleLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "verdict": self.verdict.value}


def compare(answer: Answer, reference: Answer, tolerance: float) -> RequestLine:
    """A request with the same one without a connector; of a cancelled one, the tokens that it came to."""
    expected = reference.tokens[: len(answer.tokens)] if answer.is_cancelled else reference.tokens
    difference = None
    if answer.first_logits is not None and reference.first_logits is not None:
        difference = float((answer.first_logits - reference.first_logits).abs().max())
    is_equal = answer.tokens == expected and (difference is None or difference <= tolerance)
    return RequestLine(
        answer.ask.prompt_tokens,
        answer.device_tokens,
        answer.honoured_tokens,
        is_equal,
        difference,
        answer.is_cancelled,
    )


def judge(
    cell: Cell, played: Played, references: Sequence[Answer], run: Recorded, *, block: int, tolerance: float
) -> CellResult:
    """The verdict on what was played and recorded."""
    lines = [
        compare(answer, reference, tolerance)
        for answer, reference in zip(played.answers, references, strict=True)
        # Of an engine that died the requests under way have no answer to compare.
        if played.error is None or len(answer.tokens) == answer.ask.new
    ]
    findings = run.findings()
    faults = [
        *_died(played),
        *_wrong_tokens(played, lines),
        *_wrongly_served(played),
        *(described(each) for each in _proved(findings)),
    ]
    missing = "" if faults else _not_reached(cell, played, run, block)
    verdict = Verdict.BROKEN if faults else Verdict.NOT_SUPPORTED if missing else Verdict.OK
    return CellResult(
        cell.name,
        cell.what,
        verdict,
        reason=missing,
        faults=faults,
        requests=lines,
        calls=dict(sorted(played.calls.items())),
        nbytes=_bytes(run),
        is_watch_complete=run.is_watch_complete,
        rules=_rule_lines(findings),
        notes=_notes(run, findings),
    )


def _died(played: Played) -> Iterator[str]:
    if played.error is not None:
        yield f"the engine ended: {type(played.error).__name__}: {played.error}"
    for answer in played.answers:
        if answer.error is not None:
            yield f"request {answer.request_id} failed: {answer.error}"


def _wrong_tokens(played: Played, lines: Sequence[RequestLine]) -> Iterator[str]:
    failed = any(answer.error is not None for answer in played.answers)
    for number, line in enumerate(lines, 1):
        if not line.tokens_equal and not failed:
            logits = (
                "" if line.logit_difference is None else f"; the first logits differ by {line.logit_difference:.3g}"
            )
            yield (
                f"request {number} of {len(lines)} ({line.prompt_tokens} prompt tokens, {line.device_tokens} from the device, "
                f"{line.honoured_tokens} from the connector) is answered differently without a connector{logits}"
            )


def _wrongly_served(played: Played) -> Iterator[str]:
    for answer in played.answers:
        ask = answer.ask
        if ask.serving == "none" and answer.honoured_tokens:
            whose = [
                f"{name} {value}"
                for name, value in (("salt", ask.salt), ("LoRA", ask.lora), ("image", ask.image))
                if value
            ]
            yield (
                f"request {answer.request_id} ({', '.join(whose) or 'no salt, LoRA or image'}) was served {answer.honoured_tokens} "
                "tokens of KV that was stored for another salt, LoRA adapter or image"
            )


def _proved(findings: Sequence[Finding]) -> Iterator[Finding]:
    for found in findings:
        if found.severity is Severity.VIOLATION and found.by.value == "connector" and found.caused_by is None:
            yield found


def _not_reached(cell: Cell, played: Played, run: Recorded, block: int) -> str:
    served = any(answer.honoured_tokens for answer in played.answers)
    queries = run.of(QueryCall)
    offered: dict[int, list[int]] = {}
    honoured: dict[int, list[int]] = {}
    for query in queries:
        offered.setdefault(query.request_id, []).append(query.offered_tokens)
    for alloc in run.of(AllocCall):
        honoured.setdefault(alloc.request_id, []).append(alloc.honoured_tokens or 0)
    happened = {
        "served": served,
        "parked": any(query.is_async for query in queries),
        "unaligned": any(query.computed_tokens % block for query in queries),
        "partial": any(sum(taken) < sum(offered.get(request, ())) for request, taken in honoured.items()),
        "replayed": any(count > 1 for count in Counter(query.request_id for query in queries).values()),
        "chunked": any(len(answer.passes) > 1 for answer in played.answers),
    }
    said = {
        "served": "nothing was served, so there was nothing to compare",
        "parked": "no query was answered asynchronously",
        "unaligned": "the device supplied no part of a block",
        "partial": "every offer was honoured whole",
        "replayed": "no request was replayed",
        "chunked": "no prompt ran in chunks",
    }
    return "; ".join(said[name] for name in sorted(cell.reached) if not happened[name])


def _bytes(run: Recorded) -> dict[str, int]:
    return {
        f"{direction.value} {source.value}": run.nbytes(direction, source)
        for direction in Direction
        for source in (Source.REPORTED, Source.OBSERVED)
        if run.transfers(direction, source)
    }


def _rule_lines(findings: Sequence[Finding]) -> list[RuleLine]:
    by_rule: dict[str, list[Finding]] = {}
    for found in findings:
        by_rule.setdefault(found.rule, []).append(found)
    return [
        RuleLine(
            rule,
            of_rule[0].severity.value,
            of_rule[0].by.value,
            len(of_rule),
            described(of_rule[0]),
            all(found.caused_by is not None for found in of_rule),
        )
        for rule, of_rule in by_rule.items()
    ]


def _notes(run: Recorded, findings: Sequence[Finding]) -> list[str]:
    notes = [described(found) for found in findings if found.severity is Severity.SUSPECT]
    reports = [report for report in run.of(WatchReport) if not report.is_complete]
    if reports:
        gaps = sorted({f"{gap.reason.value} at {gap.where}" for report in reports for gap in report.gaps})
        notes.append(f"bytes may have moved unseen: {', '.join(gaps)}")
    if run.lost:
        notes.append(f"{run.lost} records were overwritten unread")
    return notes

"""Rules for one request: judged over the records around it, and told apart from what is about others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracekv.journal.process_scan import ProcessScan
from tracekv.rules import Checker, Finding, Severity
from tracekv.rules.catalogue import RULES
from tracekv.rules.checker import MOST_OF_A_RULE
from tracekv.rules.model import Limits
from tracekv.rules.offline import judge_scanned, source_name
from tracekv.rules.showing import as_data, in_words
from tracekv.views.explain import Broken, Explanation
from tracekv.views.runs import Run

#: So many records are judged as a whole; of more, those around the request.
WHOLE = 50_000
#: Records before a request's first and after its last one that are judged with it.
BEFORE, AFTER = 8_192, 4_096
#: As many findings of a rule as there are.
EVERY = 1 << 62
#: Numbers of findings that are requests' ids.
_IDS = ("other_request", "given_to")


def find_all(
    processes: Sequence[ProcessScan],
    *,
    limits: Limits | None = None,
    most_of_a_rule: int = MOST_OF_A_RULE,
    progress: Callable[[int], object] | None = None,
) -> Checker:
    """All rules over all records."""
    checker = Checker(limits=limits, most_of_a_rule=most_of_a_rule)
    judge_scanned(processes, checker, progress=progress)
    return checker


def find_around(
    processes: Sequence[ProcessScan], run: Run, request_id: int, *, limits: Limits | None = None
) -> list[Finding]:
    """What the rules find in the records around those of a request, or in all where they are few.

    However many others the same rule has: one of the last may be this request's.
    """
    if sum(process.records for process in processes) <= WHOLE:
        return find_all(processes, limits=limits, most_of_a_rule=EVERY).findings
    checker = Checker(limits=limits, most_of_a_rule=EVERY)
    judge_scanned([each.process for each in run.segments], checker, ranges=_ranges(run, request_id))
    return checker.findings


def violations(checker: Checker) -> int:
    """How many were found, those that were only counted among them; the others are suspects."""
    return sum(checker.counts[rule.id] for rule in RULES if rule.severity is Severity.VIOLATION)


def untold(checker: Checker) -> dict[str, int]:
    """By rule, how many findings were counted and not kept."""
    kept = Counter(found.rule for found in checker.findings)
    return {rule: more for rule, count in checker.counts.items() if (more := count - kept[rule])}


def _ranges(run: Run, request_id: int) -> list[tuple[int, int]]:
    """The numbers around a request in each process of its run; where a process doesn't name it, those of the same time."""
    named = [[number for number, _ in segment.of_request(request_id)] for segment in run.segments]
    leader = run.leader
    dated = [record for _, record in leader.of_request(request_id)]
    times = [at for record in dated if (at := getattr(record, "ended_ns", 0))]
    ranges = []
    for segment, numbers in zip(run.segments, named, strict=True):
        shift = (
            0 if segment.process.facts.boot_id == leader.process.facts.boot_id else leader.offset_ns - segment.offset_ns
        )
        if times:
            numbers += [segment.process.sequence_at(at + shift) for at in (min(times), max(times))]
        first = max(segment.first, min(numbers, default=segment.first) - BEFORE)
        last = min(segment.last, max(numbers, default=segment.first) + AFTER)
        ranges.append((first, max(first, last)))
    return ranges


def about(
    findings: Sequence[Finding],
    run: Run,
    told: Explanation | None,
    *,
    hashed: bool,
    rules: Mapping[str, str] | None = None,
) -> list[Broken]:
    """Of these findings, those about a request: its own, those of its passes that name nobody, and those of the bring-up.

    Args:
        findings: Of any run.
        run: The request's.
        told: The request; None for whatever is about the run.
        hashed: Name other requests by their digests.
        rules: The rule of each finding's id, where ``findings`` aren't all that there are.
    """
    rules = rules or {each.id: each.rule for each in findings}
    found = []
    for each in findings:
        whose = _whose(each, told) if is_of_run(each, run) else ""
        if whose:
            found.append(
                Broken(
                    each.rule, each.severity.value, each.by.value, each.title, each.fix, whose, each.callback, each.rank,
                    each.step, in_words(_named(each.numbers, run, hashed=hashed)), rules.get(each.caused_by or ""),
                )
            )  # fmt: skip
    return sorted(found, key=lambda each: each.about != "request")


def _named(numbers: Mapping[str, Any], run: Run, *, hashed: bool) -> dict[str, Any]:
    """A finding's numbers, those that are other requests' ids by their labels."""
    return {
        name: run.request_label(value, hashed=hashed) if name in _IDS and isinstance(value, int) else value
        for name, value in numbers.items()
    }


def as_shown(found: Finding, runs: Sequence[Run], *, hashed: bool) -> dict[str, Any]:
    """A finding as plain data; where ids are hashed, with its requests' digests, and without its proof, which names more.

    Args:
        found: Of one of the runs, or of none that is known: its request has no name then.
        runs: Needed where ids are hashed.
        hashed: Name requests by their digests.
    """
    data = as_data(found)
    if hashed:
        run = next((run for run in runs if is_of_run(found, run)), None)
        data["request"] = run.request_label(found.request, hashed=True) if run and found.request is not None else None
        data["numbers"] = {
            name: value if name not in _IDS else run.request_label(value, hashed=True) if run else None
            for name, value in data["numbers"].items()
        }
        data["evidence"] = []
    return data


def _whose(found: Finding, told: Explanation | None) -> str:
    if found.request is not None:
        return "request" if told is None or found.request == told.request_id else ""
    if not found.step:
        return "engine"
    return "pass" if told is None or told.story.first_step <= found.step <= told.story.last_step else ""


def is_of_run(found: Finding, run: Run) -> bool:
    """Whether a finding is about a run: a process may have had several engines, one after another."""
    parts = [each for each in run.segments if source_name(each.process.facts) == found.source]
    return any(not found.at_ns or each.begins_ns <= found.at_ns < each.ends_ns for each in parts)

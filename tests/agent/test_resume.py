"""An agent that is killed and one that goes on: nothing lost, at most one batch repeated, with the same ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.agent import live
from tests.views.sample_run import bring_up, queried, transferred
from tracekv.agent.exporters import Done
from tracekv.agent.feed import Guard
from tracekv.agent.source import BATCH, Source
from tracekv.agent.state import ENDED, Mark, StateFile
from tracekv.journal.layout import JournalFacts
from tracekv.journal.reader import RingReader
from tracekv.journal.records import Record
from tracekv.journal.ring import RingJournal
from tracekv.journal.vocabulary import Direction
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue, Span
from tracekv.views.sampling import Callers, Sampler

FULL = Settings(detail="full", step_sample=1)


class Killed(BaseException):
    """The agent is gone."""


class Exporter:
    """Hands spans on; dies after so many batches, between handing one on and saying so."""

    def __init__(self, name: str, lives: int = 1 << 30) -> None:
        self.name = name
        self.exported = 0
        self.failed = 0
        self.batches: list[Sequence[Span]] = []
        self.lives = lives

    def export(self, spans: Sequence[Span], resource: Mapping[str, AttributeValue], done: Done | None = None) -> None:
        if spans:
            self.batches.append(spans)
            self.lives -= 1
            if self.lives == 0:
                raise Killed
        if done is not None:
            done()

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float) -> bool:
        return True

    @property
    def spans(self) -> list[Span]:
        return [span for batch in self.batches for span in batch]


class Counting:
    """A listener that counts records by kind."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.records_lost = 0

    def feed_all(self, source: JournalFacts, records: Sequence[Record]) -> None:
        self.kinds.update(type(record).__name__ for record in records)

    def lost(self, source: JournalFacts, count: int) -> None:
        self.records_lost += count

    def journal(self, source: JournalFacts, *, bytes_written: int = 0, undecodable: int = 0) -> None:
        pass

    def ended(self, source: JournalFacts) -> None:
        pass

    def tick(self) -> None:
        pass

    def close(self, timeout_s: float = 2.0) -> None:
        pass


def follow(
    path: Path,
    exporters: Sequence[Exporter],
    *,
    listener: Counting | None = None,
    turns: int = 4,
    until_end: bool = True,
    patience_ns: int = 0,
) -> Source:
    source = Source(
        RingReader(path, patience_ns=patience_ns),
        StateFile(path),
        FULL,
        exporters,
        resource={"service.name": "tracekv"},
        sampler=Sampler(),
        callers=Callers(),
        listeners=[] if listener is None else [listener],
        guard=Guard(),
    )
    for _ in range(10_000 if until_end else turns):
        count = source.collect()
        source.view(perf_counter_ns())
        if not count:
            source.rest(perf_counter_ns())
        source.answer()
        if source.is_done:
            break
    return source


def journal_of(path: Path, requests: int, file_bytes: int = 1 << 20) -> RingJournal:
    journal = RingJournal.create(path, file_bytes)
    for record in live.beginning():
        journal.write(record)
    for number in range(1, requests + 1):
        for record in live.request(number):
            journal.write(record)
    return journal


def expected_of(path: Path) -> list[Span]:
    """What one reader without a past makes of a journal."""
    StateFile(path).path.unlink()
    exporter = Exporter("file")
    follow(path, [exporter]).close()
    return exporter.spans


def test_a_journal_is_read_to_its_end_once(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal_of(path, 3).close()
    first, second = Exporter("file"), Exporter("file")
    follow(path, [first]).close()
    state = StateFile(path)

    assert len(live.roots(first.spans)) == 3
    assert state.has_ended()
    assert state.mark("file").expired_ns == ENDED
    follow(path, [second], until_end=False).close()
    assert second.spans == []


@given(
    requests=st.integers(1, 120),
    deaths=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whenever_agents_are_killed_each_exporter_gets_all_and_at_most_a_batch_twice(
    tmp_path_factory: pytest.TempPathFactory, requests: int, deaths: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "x.tkvring"
    journal_of(path, requests).close()
    got: dict[str, list[Sequence[Span]]] = {"file": [], "otlp": []}
    repeats = 0
    for lives in [*deaths, (1 << 30, 1 << 30)]:
        exporters = [Exporter("file", lives[0]), Exporter("otlp", lives[1])]
        try:
            follow(path, exporters)
        except Killed:
            repeats += 1
        for exporter in exporters:
            got[exporter.name] += exporter.batches
    expected = {span.span_id: span for span in expected_of(path)}

    for batches in got.values():
        times = Counter(span.span_id for batch in batches for span in batch)
        assert times.keys() == expected.keys()
        assert {span.span_id: span for batch in batches for span in batch} == expected
        assert sum(times.values()) - len(times) <= repeats * (BATCH + 32)


def test_a_step_that_ended_in_a_pause_is_not_told_again_after_it(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal = journal_of(path, 2)
    first = Exporter("file")
    source = follow(path, [first], until_end=False)
    source.rest(perf_counter_ns() + 5_000_000_000)
    source.close()
    assert [span.attributes["tracekv.step"] for span in first.spans if span.name == "step"] == [1, 2]
    for record in live.request(3):
        journal.write(record)
    journal.close()
    second = Exporter("file")
    follow(path, [second])

    assert [span.attributes["tracekv.step"] for span in second.spans if span.name == "step"] == [3]


def test_a_story_that_was_open_at_a_restart_is_told_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal = RingJournal.create(path, 1 << 20)
    for record in live.beginning():
        journal.write(record)
    records = live.request(1)
    for record in records[:6]:
        journal.write(record)
    first, second = Exporter("file"), Exporter("file")
    follow(path, [first], until_end=False).close()
    for record in records[6:]:
        journal.write(record)
    journal.close()
    follow(path, [second]).close()
    (root,) = live.roots(second.spans)

    assert live.roots(first.spans) == []
    assert root.attributes["tracekv.offered_tokens"] == 512
    assert root.attributes["tracekv.load.bytes"] == 240
    assert not {span.span_id for span in first.spans} & {span.span_id for span in second.spans}


def test_listeners_count_each_record_once_over_a_restart_and_learn_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal = journal_of(path, 2)
    first, second = Counting(), Counting()
    follow(path, [Exporter("file")], listener=first, until_end=False).close()
    for record in live.request(3):
        journal.write(record)
    follow(path, [Exporter("file")], listener=second, until_end=False).close()

    assert (first.kinds["QueryCall"], second.kinds["QueryCall"]) == (2, 1)
    assert second.kinds["RunJoined"] == second.kinds["RegisterCall"] == 1


def test_what_was_overwritten_between_two_agents_counts_as_lost_once(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal = RingJournal.create(path, 1 << 16)
    for record in bring_up()[1:]:
        journal.write(record)
    first, second, third = Counting(), Counting(), Counting()
    follow(path, [Exporter("file")], listener=first, until_end=False).close()
    for n in range(2000):
        journal.write(queried(n, n + 1, n))
    follow(path, [Exporter("file")], listener=second, until_end=False, turns=10).close()
    follow(path, [Exporter("file")], listener=third, until_end=False, turns=10).close()

    assert first.records_lost == third.records_lost == 0
    assert second.records_lost == 2000 - second.kinds["QueryCall"] > 0


def test_an_exporter_that_fails_on_a_batch_does_not_hold_up_the_end(tmp_path: Path) -> None:
    class Failing(Exporter):
        def export(self, spans: Sequence[Span], resource: object, done: Done | None = None) -> None:
            raise RuntimeError("planted")

    path = tmp_path / "x.tkvring"
    journal_of(path, 1).close()

    assert follow(path, [Failing("file")]).is_done


def test_a_question_is_not_answered_while_records_wait_for_one_in_the_making(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal = journal_of(path, 0)
    journal._append_shared.__self__._next_sequence()  # type: ignore[attr-defined]
    for record in live.request(1):
        journal.write(record)
    state, exporter = StateFile(path), Exporter("file")
    question = state.ask()
    follow(path, [exporter], until_end=False, patience_ns=1 << 60).close()
    assert (state.answered, live.roots(exporter.spans)) == (0, [])

    follow(path, [exporter], until_end=False).close()
    assert (state.answered, len(live.roots(exporter.spans))) == (question, 1)
    journal.close()


def test_a_record_from_the_future_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "x.tkvring"
    journal = journal_of(path, 0)
    first, *others = live.request(1)
    late = transferred(Direction.LOAD, 0, [1], 10, start=1 << 60, end=1 << 61, request_id=1)
    for record in (first, late, *others):
        journal.write(record)
    exporter = Exporter("file")
    follow(path, [exporter], until_end=False).close()
    journal.close()

    assert len(live.roots(exporter.spans)) == 1


def test_marks_compare_in_the_order_of_time() -> None:
    assert Mark(3) < Mark(3, 5) < Mark(3, ENDED) < Mark(4)

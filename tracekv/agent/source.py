"""One journal as the agent follows it: read, viewed, exported, and resumed where an earlier agent ended.

The views are pure functions of the records. So an agent that begins anew feeds them all that the ring still holds, and throws away
what an exporter has handed on already: it comes to the same open stories, and the same span ids, as if nothing had happened.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns

from tracekv.agent.exporters import Done, Exporter
from tracekv.agent.feed import Feed, Guard
from tracekv.agent.listeners import Listener
from tracekv.agent.rules import Rules
from tracekv.agent.state import ENDED, START, Mark, StateFile
from tracekv.journal.layout import detail_of
from tracekv.journal.process import boot_id
from tracekv.journal.reader import RingReader, decode_frames
from tracekv.journal.records import (
    ConnectorWrapped,
    Enqueued,
    ProcessStarted,
    Record,
    RegisterCall,
    RunJoined,
    SettingsSeen,
)
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue, Span
from tracekv.views.sampling import Callers, Sampler

#: Spans of one export.
BATCH = 512
#: Records that tell who writes the others: a listener that counts from here on has to know.
_EXPLAINS = frozenset({ProcessStarted, ConnectorWrapped, RunJoined, SettingsSeen, RegisterCall})
#: Records read from each ring in one turn: what is decoded and not yet viewed stays small.
_READ_LIMIT = 2048


class Source:
    """Follows one journal. One thread; only acknowledgements of exporters come from others.

    Attributes:
        path: The ring file.
        facts: Who writes it.
        is_done: Read to its end, and all of it handed on or given up.
        is_claimed: Its own process reads it.
    """

    def __init__(
        self,
        reader: RingReader,
        state: StateFile,
        settings: Settings,
        exporters: Sequence[Exporter],
        *,
        resource: Mapping[str, AttributeValue],
        sampler: Sampler,
        callers: Callers,
        listeners: Sequence[Listener],
        guard: Guard,
        rules: Rules | None = None,
    ) -> None:
        self.path: Path = reader.path
        self.facts = reader.facts
        self.is_done = False
        self.is_claimed = False
        self.records_lost = 0
        self._reader = reader
        self._state = state
        self._exporters = exporters
        self._callers = callers
        self._guard = guard
        self._detail = settings.detail
        self._listeners = listeners
        name = reader.facts.process_id.hex()
        self._feed = Feed(settings, resource, sampler=sampler, callers=callers, rules=rules, name=name, guard=guard)
        self._cursor = 0
        #: (sequence, record, records lost before it): read, and not yet viewed.
        self._pending: deque[tuple[int, Record, int]] = deque()
        self._batch: list[Span] = []
        self._has_horizon = reader.facts.boot_id == boot_id()
        self._marks = {exporter.name: state.mark(exporter.name) for exporter in exporters}
        #: Where earlier readers' exporters ended: a batch must not reach across one.
        self._boundaries = deque(sorted({mark for mark in self._marks.values() if mark > START}))
        self._resumes_at = min(self._marks.values(), default=START).sequence
        self._fed = state.fed
        self._viewed = 0
        self._run = b""
        self._early: list[Enqueued] = []
        self._has_all = False
        self._has_more = False
        self._asked: deque[tuple[int, Mark]] = deque()
        self._acknowledged = dict(self._marks)

    # -- reading -----------------------------------------------------------------------------------------------------

    def collect(self) -> int:
        """Read on; returns how many records came. Callers' contexts become known here, before any journal is viewed."""
        if not self._has_all and self._state.has_ended():
            # A thread of that process reads it itself, and said so after this source was opened.
            self.is_claimed = True
            return 0
        asked = self._state.asked
        if asked > self._state.answered and (not self._asked or self._asked[-1][0] < asked):
            self._asked.append((asked, Mark(-1)))
        is_alive = self._reader.is_alive()
        expected = self._cursor
        frames, self._cursor, _ = self._reader.read_frames(expected, _READ_LIMIT)
        for frame in frames:
            lost, expected = frame.sequence - expected, frame.sequence + 1
            records, undecodable = decode_frames([frame])
            self._reader.undecodable += undecodable
            for record in records:
                self._learn(record)
                self._pending.append((frame.sequence, record, lost))
        self._has_all = not is_alive and not frames
        self._has_more = len(frames) >= _READ_LIMIT or self._reader.is_waiting
        return len(frames)

    def _learn(self, record: Record) -> None:
        if isinstance(record, RunJoined):
            self._run = record.run_id
            early, self._early = self._early, []
            for enqueued in early:
                self._callers.learn(self._run, enqueued)
        elif isinstance(record, Enqueued):
            if self._run:
                self._callers.learn(self._run, record)
            else:
                self._early = [*self._early[-1023:], record]

    # -- viewing -----------------------------------------------------------------------------------------------------

    def view(self, horizon_ns: int) -> None:
        """Feed what was read and happened before ``horizon_ns``; export what it makes."""
        feed = self._feed
        is_caught_up = not self._has_more
        fresh: list[Record] = []
        detail_now = detail_of(self._reader.control()) or self._detail
        while self._pending:
            sequence, record, lost = self._pending[0]
            # What ended in the future was told by another clock, and would hold up all that follows.
            if self._has_horizon and horizon_ns < getattr(record, "ended_ns", 0) <= perf_counter_ns():
                is_caught_up = False
                break
            self._pending.popleft()
            self._cross(sequence)
            if lost:
                self._lost(lost, sequence)
            # What is replayed is thrown away: a span per hook would cost the most of it.
            feed.view.detail = "economy" if sequence < self._resumes_at else detail_now
            if sequence >= self._fed or type(record) in _EXPLAINS:
                fresh.append(record)
            self._batch += feed.take(record)
            if feed.findings:
                found, feed.findings = feed.findings, []
                fresh += found if sequence >= self._fed else ()
            self._viewed = sequence + 1
            if len(self._batch) >= BATCH:
                self._deliver(Mark(self._viewed))
        for listener in self._listeners:
            if fresh:
                self._guard(listener.feed_all, self.facts, fresh)
        self._settle_questions(is_caught_up)

    def _lost(self, count: int, sequence: int) -> None:
        """``count`` records below ``sequence`` are gone; those that an earlier reader had seen are no loss."""
        seen = self._resumes_at if self._exporters else self._fed
        missed = min(count, max(0, sequence - seen))
        if missed:
            self.records_lost += missed
            self._feed.lost(missed)
            for listener in self._listeners:
                self._guard(listener.lost, self.facts, missed)

    def _cross(self, sequence: int) -> None:
        """Before the record ``sequence`` is fed: end the batch where an exporter had come to."""
        while self._boundaries and self._boundaries[0].sequence <= sequence:
            mark = self._boundaries.popleft()
            self._deliver(Mark(mark.sequence))
            if 0 < mark.expired_ns < ENDED:
                self._batch += self._feed.expire(mark.expired_ns)
                self._deliver(mark)

    def _settle_questions(self, is_caught_up: bool) -> None:
        if self._viewed > self._fed:
            self._fed = self._viewed
            self._guard(self._state.feed, self._fed)
            for listener in self._listeners:
                self._guard(
                    listener.journal,
                    self.facts,
                    bytes_written=self._reader.written_bytes(),
                    undecodable=self._reader.undecodable,
                )
        if is_caught_up:
            self._deliver(Mark(self._viewed))
            self._asked = deque(
                (number, Mark(self._viewed) if mark.sequence < 0 else mark) for number, mark in self._asked
            )

    def rest(self, now_ns: int) -> None:
        """Nothing new came: end what has been quiet for too long; a journal of a dead process, read to its end, ends for good."""
        if self._pending:
            return
        self._cross(self._viewed)
        if self._has_all:
            self._batch += self._feed.end()
            self._deliver(Mark(self._viewed, ENDED))
        elif self._has_horizon:
            self._batch += self._feed.expire(now_ns)
            if self._batch:
                self._deliver(Mark(self._viewed, now_ns))

    # -- exporting ---------------------------------------------------------------------------------------------------

    def _deliver(self, mark: Mark) -> None:
        batch, self._batch = self._batch, []
        for exporter in self._exporters:
            if mark > self._marks[exporter.name]:
                self._marks[exporter.name] = mark
                done = functools.partial(self._acknowledge, exporter.name, mark)
                for begin in range(0, max(1, len(batch)), BATCH):
                    is_last = begin + BATCH >= len(batch)
                    self._export(exporter, batch[begin : begin + BATCH], done if is_last else None)

    def _export(self, exporter: Exporter, batch: Sequence[Span], done: Done | None) -> None:
        faults = self._guard.faults
        self._guard(exporter.export, batch, self._feed.resource, done)
        if done is not None and self._guard.faults > faults:
            done()  # given up

    def _acknowledge(self, exporter: str, mark: Mark) -> None:
        """Written before the exporter goes on: a killed agent repeats what it was just doing, and no more."""
        self._guard(self._state.set_mark, exporter, mark)
        self._acknowledged[exporter] = mark

    def answer(self) -> None:
        """Answer the engine's questions that what was handed on by now answers; see whether all is done."""
        reached = min(self._acknowledged.values(), default=Mark(self._viewed, ENDED))
        while self._asked and self._asked[0][1].sequence >= 0 and self._asked[0][1] <= reached:
            number, _ = self._asked.popleft()
            self._guard(self._state.answer, number)
        self.is_done = self.is_read and reached.expired_ns == ENDED

    @property
    def is_read(self) -> bool:
        """Whether its process is gone and all that it wrote has been viewed, if not exported."""
        return self._has_all and not self._pending

    def close(self) -> None:
        """Give the files back. What is open in the views is told by whoever reads next."""
        for listener in self._listeners:
            self._guard(listener.ended, self.facts)
        self._feed.close()
        self._reader.close()
        self._state.close()

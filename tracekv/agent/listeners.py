"""What sees every record of every journal beside the spans: metrics and logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tracekv.agent.exporters import Exporter
from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import Record
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue


class Listener(Protocol):
    """Told of records in each process's order, on the reading thread; ``source`` says whose they are."""

    def feed_all(self, source: JournalFacts, records: Iterable[Record]) -> None:
        """Take records."""

    def lost(self, source: JournalFacts, count: int) -> None:
        """``count`` records of ``source`` were overwritten unread."""

    def journal(self, source: JournalFacts, *, bytes_written: int = 0, undecodable: int = 0) -> None:
        """What is known of the journal beside its records, since it began."""

    def ended(self, source: JournalFacts) -> None:
        """No more records of ``source`` will come."""

    def tick(self) -> None:
        """Called again and again, also while nothing comes."""

    def close(self, timeout_s: float = 2.0) -> object:
        """No more will come; wait no longer than ``timeout_s``."""


class ViewOf:
    """A listener as a view of one journal."""

    def __init__(self, listener: Listener, source: JournalFacts) -> None:
        self._listener = listener
        self._source = source

    def feed(self, record: Record) -> None:
        """Take one record."""
        self._listener.feed_all(self._source, (record,))

    def lost(self, count: int) -> None:
        """``count`` records were overwritten unread."""
        self._listener.lost(self._source, count)


class MetricsListener:
    """The metrics service as a listener; it serves and sends by itself."""

    def __init__(
        self, settings: Settings, resource: Mapping[str, AttributeValue], exporters: Sequence[Exporter]
    ) -> None:
        from tracekv.agent.metrics import MetricsService

        self.service = MetricsService(settings, resource)
        for exporter in exporters:
            self.service.watch(exporter)
        self.service.start()
        self.feed_all = self.service.feed_all
        self.lost = self.service.lost
        self.journal = self.service.journal
        self.ended = self.service.ended
        self.close = self.service.close
        self.tick = self.service.tick

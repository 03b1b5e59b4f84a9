"""What sees every record of every journal beside the spans: metrics and logs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tracekv.agent.feed import View
from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import Record
from tracekv.settings import Settings
from tracekv.views.model import AttributeValue


class Listener(Protocol):
    """Told of records in each process's order, on the reading thread; ``source`` says whose they are."""

    def feed(self, source: JournalFacts, record: Record) -> object:
        """Take one record."""

    def lost(self, source: JournalFacts, count: int) -> None:
        """``count`` records of ``source`` were overwritten unread."""

    def tick(self) -> None:
        """Called again and again, also while nothing comes."""

    def close(self, timeout_s: float) -> object:
        """No more will come; wait no longer than ``timeout_s``."""


class _ViewOf:
    """A listener as a view of one journal."""

    def __init__(self, listener: Listener, source: JournalFacts) -> None:
        self._listener = listener
        self._source = source

    def feed(self, record: Record) -> object:
        """See :class:`Listener`."""
        return self._listener.feed(self._source, record)

    def lost(self, count: int) -> None:
        """See :class:`Listener`."""
        self._listener.lost(self._source, count)


def views_of(listeners: Sequence[Listener], source: JournalFacts) -> list[View]:
    """The listeners, bound to one journal."""
    return [_ViewOf(listener, source) for listener in listeners]


class MetricsListener:
    """The metrics service as a listener; it serves and pushes by itself."""

    def __init__(self, settings: Settings, resource: Mapping[str, AttributeValue]) -> None:
        service: Any = importlib.import_module("tracekv.agent.metrics").MetricsService(settings, resource)
        service.start()
        self.feed = service.feed
        self.lost = service.lost
        self._close = service.close

    def tick(self) -> None:
        """Nothing to do between records."""

    def close(self, timeout_s: float) -> None:
        """End serving."""
        self._close()


def has_metrics() -> bool:
    """Whether this installation can compute metrics."""
    return importlib.util.find_spec("tracekv.agent.metrics") is not None

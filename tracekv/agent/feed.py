"""One journal's records through the views, and how faults of ours are kept from ending the reading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

from tracekv.agent.rules import Rules
from tracekv.journal.records import Finding, ProcessStarted, Record, Transfer
from tracekv.settings import Settings
from tracekv.views.model import Attributes, AttributeValue, Span
from tracekv.views.sampling import Callers, Sampler
from tracekv.views.spans import SpanView

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("tracekv")

#: What is quiet is looked for at full seconds of monotonic time, so that it doesn't depend on when a reader looks.
_EXPIRE_NS = 1_000_000_000


class View(Protocol):
    """Something else that wants to see each record, on the reading thread."""

    def feed(self, record: Record) -> object:
        """Take one record."""

    def lost(self, count: int) -> None:
        """``count`` records were overwritten unread."""


class Guard:
    """Runs what may fail: a fault is counted, the first is reported, and the reading goes on.

    Attributes:
        faults: Errors that were swallowed.
    """

    def __init__(self) -> None:
        self.faults = 0

    def __call__(self, work: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R | None:
        """What ``work`` returns, None where it raised."""
        try:
            return work(*arguments, **named)
        except Exception as error:  # a reader's fault must not end the reading
            self.faults += 1
            if self.faults == 1:
                _log.warning(
                    "tracekv: the agent failed in %s (%s) and goes on; further failures are counted",
                    getattr(work, "__qualname__", work),
                    type(error).__name__,
                    exc_info=error,
                )
            return None


class Feed:
    """What one journal's records become. A pure function of them, so that a reader that begins anew comes to the same spans.

    Attributes:
        resource: Of the process; complete after its first record.
        view: The spans.
    """

    def __init__(
        self,
        settings: Settings,
        resource: Mapping[str, AttributeValue],
        *,
        sampler: Sampler | None = None,
        callers: Callers | None = None,
        views: Sequence[View] = (),
        rules: Rules | None = None,
        name: str = "",
        guard: Guard | None = None,
    ) -> None:
        #: What the rules have found about this process since the owner looked last.
        self.findings: list[Finding] = []
        self._rules = rules
        self._name = name
        if rules is not None:
            rules.begins(name)
        self.resource: Attributes = dict(resource)
        self.view = SpanView(
            detail=settings.detail,
            hash_request_ids=settings.hash_request_ids,
            sampler=sampler,
            step_sample=settings.step_sample,
            callers=callers,
        )
        self._views = views
        self._guard = guard or Guard()
        self._expired = 0

    def take(self, record: Record) -> list[Span]:
        """The spans that ``record`` finishes."""
        # A transfer's times are the connector's.
        spans = [] if isinstance(record, Transfer) else self.expire(getattr(record, "ended_ns", 0))
        if isinstance(record, ProcessStarted):
            self.resource |= {
                "service.instance.id": record.process_id.hex(),
                "process.pid": record.pid,
                "host.name": record.host,
            }
        for view in self._views:
            self._guard(view.feed, record)
        made = self._guard(self.view.feed, record)
        spans = spans + made if made else spans
        if self._rules is not None:
            for found in self._guard(self._rules.feed, self._name, record) or ():
                spans += self._find(found)
        return spans

    def _find(self, found: Finding) -> list[Span]:
        self.findings.append(found)
        for view in self._views:
            self._guard(view.feed, found)
        return self._guard(self.view.feed, found) or []

    def lost(self, count: int) -> None:
        """``count`` records were overwritten unread."""
        self._guard(self.view.lost, count)
        if self._rules is not None:
            self._guard(self._rules.lost, self._name, count)
        for view in self._views:
            self._guard(view.lost, count)

    def expire(self, now_ns: int) -> list[Span]:
        """The spans of what nothing has happened to for too long."""
        moment = now_ns // _EXPIRE_NS
        if moment <= self._expired:
            return []
        self._expired = moment
        return self._guard(self.view.expire, moment * _EXPIRE_NS) or []

    def close(self) -> None:
        """Nobody feeds it any more."""
        if self._rules is not None:
            self._rules.ended(self._name)

    def end(self) -> list[Span]:
        """The spans of what is open, when no more records come."""
        return self._guard(self.view.close) or []

"""Structured logs: a line per failure, drop and fault, bounded by kind, and a summary per interval. Needs structlog.

structlog's own configuration is left alone: each logger here carries its processors.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, TextIO

import structlog

from tracekv.journal.layout import JournalFacts
from tracekv.journal.records import (
    BuildCall,
    Call,
    Drop,
    Finding,
    FinishCall,
    Lookup,
    Record,
    RunJoined,
    StoreOperation,
    TracerFault,
    TracingReduced,
    Transfer,
)
from tracekv.journal.vocabulary import Outcome
from tracekv.views import ids
from tracekv.views.facts import callback_name

_LEVELS = {
    "trace": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING,
    "warning": logging.WARNING, "error": logging.ERROR, "fatal": logging.CRITICAL, "none": logging.CRITICAL + 10,
}  # fmt: skip
#: Lines of one kind within an interval; further ones are counted.
LINES = 10
INTERVAL_S = 60.0
#: Severities of findings that get a line.
_WARNED = {"violation", "suspect", "problem"}
_ANSWERS = {Outcome.OK, Outcome.EXISTS, Outcome.MISSING}


def agent_logger(environ: Mapping[str, str] | None = None, file: TextIO | None = None) -> Any:
    """A logger for the agent's own process: JSON lines, or for people where ``file`` is a terminal.

    The level is ``OTEL_LOG_LEVEL`` (``info``). Warnings of tracekv's modules come the same way.
    """
    environ = os.environ if environ is None else environ
    file = file or sys.stderr
    level = _level(environ)
    log = structlog.wrap_logger(
        structlog.PrintLogger(file),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer() if file.isatty() else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
    logger = logging.getLogger("tracekv")
    logger.handlers = [_Forward(log)]
    logger.propagate = False
    logger.setLevel(level)
    return log


def host_logger(environ: Mapping[str, str] | None = None) -> Any:
    """A logger within the engine's process: lines of ``key=value`` to the logger ``tracekv``, which the host configures."""
    return structlog.wrap_logger(
        logging.getLogger("tracekv.records"),
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.make_filtering_bound_logger(_level(os.environ if environ is None else environ)),
    )


def _level(environ: Mapping[str, str]) -> int:
    return _LEVELS.get(environ.get("OTEL_LOG_LEVEL", "").strip().lower(), logging.INFO)


class _Forward(logging.Handler):
    """Hands the lines of tracekv's modules to a structlog logger."""

    def __init__(self, log: Any) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"error": record.exc_info[0].__name__} if record.exc_info and record.exc_info[0] else {}
        self._log.log(record.levelno, record.getMessage().removeprefix("tracekv: "), **fields)


class _Process:
    """What lines about a process need to know of it."""

    __slots__ = ("rank", "run")

    def __init__(self, facts: JournalFacts) -> None:
        self.run = facts.process_id
        self.rank: int | None = None


class LogListener:
    """Makes log lines of records: none for a callback that went well.

    Args:
        log: A structlog logger.
        hash_request_ids: Digests instead of request ids.
        before_summary: Called once an interval, before it is summed up.
    """

    def __init__(
        self,
        log: Any,
        *,
        hash_request_ids: bool = False,
        interval_s: float = INTERVAL_S,
        before_summary: Callable[[], object] | None = None,
    ) -> None:
        self._log = log
        self._before_summary = before_summary
        self._hash_request_ids = hash_request_ids
        self._interval_s = interval_s
        self._processes: dict[bytes, _Process] = {}
        self._told: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._since = monotonic()

    def feed_all(self, source: JournalFacts, records: Iterable[Record]) -> None:
        """Take records."""
        for record in records:
            self._feed(source, record)

    def _feed(self, source: JournalFacts, record: Record) -> None:
        match record:
            case RunJoined():
                process = self._process(source)
                process.run, process.rank = record.run_id, record.rank
            case Transfer():
                self._totals[f"{record.direction.value}_bytes"] += 0 if record.error else record.nbytes
                if record.error:
                    self._warn(
                        source, "transfer failed", record.request_id, direction=record.direction.value,
                        tier=record.tier.value, layer_group=record.layer_group, step=record.step, error=record.error,
                    )  # fmt: skip
            case StoreOperation() if record.outcome not in _ANSWERS:
                self._warn(
                    source, "store operation failed", record.request_id, operation=record.operation.value,
                    outcome=record.outcome.value, engine=record.engine, attempts=record.attempts, breaker=record.breaker,
                    error=record.error,
                )  # fmt: skip
            case Drop():
                self._totals["dropped_blocks"] += record.blocks
                self._warn(
                    source, "blocks dropped", record.request_id, direction=record.direction.value,
                    reason=record.reason.value, blocks=record.blocks, bytes=record.nbytes, layer_group=record.layer_group,
                )  # fmt: skip
            case TracerFault():
                self._warn(
                    source,
                    "instrument removed",
                    None,
                    instrument=record.instrument,
                    error=record.error,
                    where=record.where,
                )
            case TracingReduced():
                if record.is_off:
                    self._warn(source, "calls are not recorded: the detail was switched off", None)
                elif record.is_reduced:
                    what = "calls are only counted: tracing takes too much"
                    self._warn(source, what, None, cost_ppm=record.cost_ppm, limit_ppm=record.limit_ppm)
                else:
                    what = "calls are recorded again"
                    self._warn(source, what, None, cost_ppm=record.cost_ppm, limit_ppm=record.limit_ppm)
            case Finding():
                self._totals["findings"] += 1
                if record.severity in _WARNED:
                    self._warn(
                        source, f"rule {record.rule}", record.request_id, severity=record.severity, what=record.what,
                        subject=record.subject, step=record.step, caused_by=record.caused_by,
                    )  # fmt: skip
            case Lookup():
                self._totals["lookups"] += 1
                self._totals["offered_tokens"] += record.offered_tokens
            case BuildCall():
                self._totals["steps"] += 1
            case FinishCall():
                self._totals["requests_finished"] += 1
        if isinstance(record, Call) and record.error is not None:
            side, method = callback_name(record.callback)
            self._warn(
                source, "callback raised", getattr(record, "request_id", None), callback=f"{side.value}.{method}",
                step=record.step, error=record.error,
            )  # fmt: skip

    def lost(self, source: JournalFacts, count: int) -> None:
        """Records were overwritten unread."""
        self._totals["records_lost"] += count
        self._warn(source, "records lost", None, records=count)

    def journal(self, source: JournalFacts, *, bytes_written: int = 0, undecodable: int = 0) -> None:
        """Nothing to say of it."""

    def ended(self, source: JournalFacts) -> None:
        """Forget the process."""
        self._processes.pop(source.process_id, None)

    def tick(self) -> None:
        """Write the summary of an interval that is over."""
        if monotonic() - self._since >= self._interval_s:
            self._summarize()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the summary of what there was."""
        self._summarize()

    def _process(self, source: JournalFacts) -> _Process:
        known = self._processes.get(source.process_id)
        if known is None:
            known = self._processes[source.process_id] = _Process(source)
        return known

    def _warn(self, source: JournalFacts, event: str, request_id: int | None, **fields: Any) -> None:
        self._told[event] += 1
        if self._told[event] > LINES:
            return
        process = self._process(source)
        fields |= {"pid": source.pid, "rank": process.rank}
        if request_id is not None:
            trace = ids.trace_id(process.run, "request", request_id)
            fields |= {
                "request": ids.request_label(process.run, request_id, hashed=self._hash_request_ids),
                "trace_id": trace.hex(),
                "span_id": ids.root_id(trace).hex(),
            }
        elif fields.get("step"):
            trace = ids.trace_id(process.run, "step", fields["step"])
            fields |= {"trace_id": trace.hex(), "span_id": ids.root_id(trace).hex()}
        self._log.warning(event, **{name: value for name, value in fields.items() if value is not None})

    def _summarize(self) -> None:
        if self._before_summary is not None:
            self._before_summary()
        suppressed = {event: count - LINES for event, count in self._told.items() if count > LINES}
        totals = {name: count for name, count in sorted(self._totals.items()) if count}
        if totals or suppressed:
            seconds = round(monotonic() - self._since, 1)
            self._log.info("summary", seconds=seconds, **totals, **({"suppressed": suppressed} if suppressed else {}))
        self._totals.clear()
        self._told.clear()
        self._since = monotonic()

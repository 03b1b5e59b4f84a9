"""The reader of journals: follows them, runs the views and exports what they make."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tracekv.settings import Settings

if TYPE_CHECKING:
    from tracekv.agent.thread import FeedThread, ReadableJournal
    from tracekv.journal.current import Journal

__all__ = ["AgentLike", "start_agent"]

_log = logging.getLogger("tracekv")
_has_said_missing = False


class AgentLike(Protocol):
    """Whatever reads this process's journal, in it or beside it."""

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything written before the call is exported, or given up; False where that took longer."""

    def close(self, timeout_s: float = 2.0) -> bool:
        """As ``flush``, at the engine's end."""


def start_agent(journal: Journal | ReadableJournal, settings: Settings) -> AgentLike | None:
    """Have this process's journal read, as ``TRACEKV_AGENT`` says; None where nobody is to, or there is nowhere to export to.

    Spans go to ``TRACEKV_TRACE_FILE`` and to the endpoint that ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``..._TRACES_ENDPOINT``) names,
    metrics to that endpoint and ``TRACEKV_METRICS_PORT``. ``OTEL_SDK_DISABLED`` turns the endpoint off; the trace file is
    tracekv's own. Without the ``agent`` extra it says once what to install, and nothing is exported. OpenTelemetry's global
    provider is never set.

    ``auto`` starts a process, unless the directory has its agent, and returns without waiting for it. ``external`` starts nothing.
    """
    if settings.agent == "off":
        return None
    from tracekv.agent.main import wants_export
    from tracekv.agent.spawn import AgentHandle, can_export

    path: Path | None = getattr(journal, "path", None)
    if settings.agent == "external":
        return None if path is None else AgentHandle(path, settings, starts=False)
    if not wants_export(settings, os.environ):
        return None
    missing = can_export()
    if missing is not None:
        _say_missing(missing)
        return None
    if settings.agent == "thread":
        return _start_thread(journal, path, settings)
    if path is None:
        return None
    return AgentHandle(path, settings, starts=True)


def _start_thread(journal: ReadableJournal, path: Path | None, settings: Settings) -> FeedThread | None:
    from tracekv.agent.state import ENDED, EXPORTERS, Mark, StateFile, remove_orphans

    if path is not None:
        with contextlib.suppress(OSError):
            remove_orphans(path.parent)
        # An agent of this directory, now or later, finds that this journal is not for it.
        state = StateFile(path)
        for name in EXPORTERS:
            state.set_mark(name, Mark(0, ENDED))
        state.close()
    from tracekv.agent.exporters import Exporter, OtlpExporter, TraceFileExporter, otlp_endpoint_is_set
    from tracekv.agent.listeners import Listener, MetricsListener, ViewOf
    from tracekv.agent.logs import LogListener, host_logger
    from tracekv.agent.thread import FeedThread
    from tracekv.agent.transport import sdk_resource
    from tracekv.journal.reader import RingReader
    from tracekv.views.sampling import sampler_from

    resource = sdk_resource()
    exporters: list[Exporter] = []
    if settings.trace_file is not None:
        exporters.append(TraceFileExporter(settings.trace_file))
    if otlp_endpoint_is_set(os.environ):
        try:
            exporters.append(OtlpExporter())
        except Exception as error:  # an engine must start without its tracing
            _log.warning("tracekv: no spans are sent over OTLP: %s", error)
    if path is None:
        return FeedThread(journal, settings, exporters, resource=resource, sampler=sampler_from(os.environ))
    listeners: list[Listener] = [
        LogListener(host_logger(), hash_request_ids=settings.hash_request_ids),
        MetricsListener(settings, resource, exporters),
    ]
    reader = RingReader(path)
    return FeedThread(
        reader,
        settings,
        exporters,
        resource=resource,
        sampler=sampler_from(os.environ),
        views=[ViewOf(listener, reader.facts) for listener in listeners],
        listeners=listeners,
    )


def _say_missing(name: str) -> None:
    global _has_said_missing
    if not _has_said_missing:
        _has_said_missing = True
        _log.warning(
            "tracekv: nothing is exported, since %s isn't installed. Install the extra: pip install 'tracekv[agent]'",
            name,
        )

"""The reader of journals: follows them, runs the views and exports what they make."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from tracekv.settings import Settings

if TYPE_CHECKING:
    from tracekv.agent.exporters import Exporter
    from tracekv.agent.thread import FeedThread, ReadableJournal

__all__ = ["start_agent"]

_log = logging.getLogger("tracekv")
_has_said_missing = False


def start_agent(journal: ReadableJournal, settings: Settings) -> FeedThread | None:
    """Start the thread that exports this process's spans; None where there is nowhere to export to.

    Spans go to ``TRACEKV_TRACE_FILE`` and to the endpoint that ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``..._TRACES_ENDPOINT``) names.
    ``OTEL_SDK_DISABLED`` turns the endpoint off; the trace file is tracekv's own. Without the ``agent`` extra it
    says once what to install, and nothing is exported. OpenTelemetry's global provider is never set.
    """
    from tracekv.agent.exporters import OtlpExporter, TraceFileExporter, otlp_endpoint_is_set

    if settings.agent != "thread":
        return None
    has_endpoint = otlp_endpoint_is_set(os.environ)
    if not has_endpoint and settings.trace_file is None:
        return None
    try:
        from tracekv.agent.transport import sdk_resource
    except ImportError as error:
        _say_missing(error)
        return None
    from tracekv.agent.thread import FeedThread

    exporters: list[Exporter] = []
    if settings.trace_file is not None:
        exporters.append(TraceFileExporter(settings.trace_file))
    if has_endpoint:
        try:
            exporters.append(OtlpExporter())
        except Exception as error:  # an engine must start without its tracing
            _log.warning("tracekv: no spans are sent over OTLP: %s", error)
    return FeedThread(journal, settings, exporters, resource=sdk_resource()) if exporters else None


def _say_missing(error: ImportError) -> None:
    global _has_said_missing
    if not _has_said_missing:
        _has_said_missing = True
        _log.warning(
            "tracekv: no spans are exported, since %s isn't installed. Install the extra: pip install 'tracekv[agent]'",
            error.name or "OpenTelemetry",
        )

"""Puts an agent together from settings and environment, and runs it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tracekv import settings as settings_module
from tracekv.agent.exporters import Exporter, OtlpExporter, TraceFileExporter, otlp_endpoint_is_set
from tracekv.agent.listeners import Listener, MetricsListener
from tracekv.agent.lock import AgentLock, exports_digest
from tracekv.agent.spawn import keep_small
from tracekv.settings import Settings
from tracekv.views.sampling import sampler_from

#: How long an agent stays without a journal that is written to: an engine that is started again finds it.
GRACE_S = 2.0
#: An engine's memory is worth more than an agent's.
_OOM_SCORE = "500"
_NICE = 10
_METRICS_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


def be_unobtrusive() -> None:
    """What an agent that an engine started owes to it: other CPUs, low priority, and the first place when memory runs out."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def wants_export(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether there is anything that an agent could do: a trace file, an endpoint, a metrics port."""
    if settings.trace_file is not None or settings.metrics_port is not None or otlp_endpoint_is_set(environ):
        return True
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not is_disabled and any(environ.get(name) for name in _METRICS_ENDPOINTS)


def run_agent(
    directory: Path,
    lock: AgentLock,
    settings: Settings | None = None,
    *,
    stays: bool = False,
    grace_s: float = GRACE_S,
    own_log: int | None = None,
) -> int:
    """Be the agent of ``directory`` until its engines are gone; returns the exit status.

    Args:
        lock: Of the directory, taken.
        settings: By default those of the environment.
        stays: Don't end when there is nothing to follow.
        grace_s: How long to stay without an engine.
        own_log: Descriptor of a log file that is nobody else's, and is kept small.
    """
    from tracekv.agent.logs import LogListener, agent_logger
    from tracekv.agent.process import Agent
    from tracekv.agent.transport import sdk_resource

    settings = settings or settings_module.load()
    log = agent_logger()
    lock.tell(exports_digest(settings, os.environ))
    resource = sdk_resource()
    exporters: list[Exporter] = []
    if settings.trace_file is not None:
        exporters.append(TraceFileExporter(settings.trace_file))
    if otlp_endpoint_is_set(os.environ):
        try:
            exporters.append(OtlpExporter())
        except Exception as error:  # the trace file and the metrics go on
            log.warning("no spans are sent over OTLP", error=f"{type(error).__name__}: {error}")
    listeners: list[Listener] = [
        LogListener(
            log,
            hash_request_ids=settings.hash_request_ids,
            before_summary=None if own_log is None else functools.partial(keep_small, own_log),
        ),
        MetricsListener(msgspec.structs.replace(settings, journal_dir=str(directory)), resource, exporters),
    ]
    agent = Agent(
        directory,
        settings,
        exporters,
        resource=resource,
        lock=lock,
        log=log,
        sampler=sampler_from(os.environ),
        listeners=listeners,
        stays=stays,
        grace_s=grace_s,
    )
    agent.stop_on_signals()
    agent.run()
    return 0

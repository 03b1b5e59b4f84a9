"""The checks of ``tracekv doctor``: each looks at one thing and says what is the case and what to do."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import yaml

from tracekv import connectors, settings
from tracekv.agent.lock import holder
from tracekv.agent.metrics import ENDPOINT_FILE
from tracekv.capture import implemented_callbacks
from tracekv.contract import UnknownRuntime, current_runtime
from tracekv.contract.lint import Finding, Severity, lint_arguments, lint_connector
from tracekv.journal.directory import default_directory, journal_files
from tracekv.journal.layout import JournalFormatError
from tracekv.journal.opening import open_journals
from tracekv.journal.records import RunJoined, SettingsSeen
from tracekv.settings import BACKENDS, Settings, SettingsError

OK = "ok"
_CONNECT_S = 2.0
_MIN_JOURNAL_BYTES = 1 << 20
_RING_BYTES = 16 << 20


class Result(msgspec.Struct):
    """One line of the report; ``severity`` is ``ok``, ``note``, ``advice`` or ``problem``."""

    check: str
    severity: str
    subject: str
    what: str
    remedy: str = ""

    @classmethod
    def of(cls, finding: Finding) -> Result:
        """A lint finding as a line."""
        return cls(finding.rule, finding.severity.value, finding.subject, finding.what, finding.remedy)


def _problem(check: str, subject: str, what: str, remedy: str) -> Result:
    return Result(check, Severity.PROBLEM.value, subject, what, remedy)


def check_settings(environ: Mapping[str, str]) -> tuple[Settings | None, list[Result]]:
    """The settings as they resolve here; None where they don't."""
    try:
        resolved = settings.load(environ)
    except SettingsError as error:
        return None, [_problem("settings", "TRACEKV_*", str(error), "Correct or remove it; the engine refuses it too.")]
    changed = [
        f"{field.name}={getattr(resolved, field.name)}"
        for field in msgspec.structs.fields(Settings)
        if getattr(resolved, field.name) != field.default
    ]
    return resolved, [Result("settings", OK, "TRACEKV_*", ", ".join(changed) or "all at their defaults")]


def check_runtime() -> Iterator[Result]:
    """Which rank this would be."""
    try:
        runtime = current_runtime()
    except UnknownRuntime as error:
        yield _problem(
            "runtime", "rank", str(error), "Start under the engine's launcher, or say the rank as told above."
        )
        return
    yield Result("runtime", OK, "rank", f"{runtime.rank} of {runtime.world} on {runtime.host}")


def check_connector(name: str) -> Iterator[Result]:
    """Whether the wrapped connector can be imported and is complete, and what its source does."""
    try:
        connector = connectors.resolve(name)
    except SettingsError as error:
        yield _problem("connector", "TRACEKV_CONNECTOR", str(error), "The engine would stop at bring-up.")
        return
    callbacks = [callback for cls in connector for callback in implemented_callbacks(cls)]
    yield Result("connector", OK, name, f"{len(callbacks)} callbacks implemented, each becomes a span")
    yield from map(Result.of, lint_connector(*connector))


def _journal_folder(resolved: Settings) -> Path:
    return Path(resolved.journal_dir) if resolved.journal_dir else default_directory()


def check_journal(resolved: Settings) -> Iterator[Result]:
    """Room and rights for the ring file, and the engines that write here now."""
    existing = folder = _journal_folder(resolved)
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield _problem(
            "journal", str(folder), "The folder can't be written.", "Set TRACEKV_JOURNAL_DIR to one that can."
        )
        return
    free = os.statvfs(existing)
    room = free.f_bavail * free.f_frsize
    if room < 2 * _MIN_JOURNAL_BYTES:
        yield _problem(
            "journal", str(folder), f"Only {room >> 10} KiB are free: no journal would be written.", "Make room there."
        )
    elif room < 2 * _RING_BYTES:
        yield Result(
            "journal", Severity.ADVICE.value, str(folder), f"Only {room >> 20} MiB are free: the ring will be smaller.",
            "Make room there (in a container: a larger /dev/shm).",
        )  # fmt: skip
    else:
        yield Result("journal", OK, str(folder), f"{room >> 20} MiB free")
    if folder.is_dir():
        yield from _check_running(folder)


def _check_running(folder: Path) -> Iterator[Result]:
    digests: dict[bytes, list[str]] = {}
    alive = 0
    for path in journal_files(folder):
        try:
            readers = open_journals(path, patience_ns=0)
        except (JournalFormatError, OSError) as error:
            yield Result(
                "journal", Severity.ADVICE.value, path.name, str(error), "Remove the file if nothing needs it."
            )
            continue
        for reader in readers:
            if reader.is_alive():
                alive += 1
                records, _, _ = reader.read(0)
                rank = next((str(record.rank) for record in records if isinstance(record, RunJoined)), "?")
                seen = next((record.digest for record in records if isinstance(record, SettingsSeen)), b"")
                digests.setdefault(seen, []).append(rank)
            reader.close()
    if alive:
        yield Result(
            "engines", OK, str(folder), f"{alive} engine process{'' if alive == 1 else 'es'}, writing here now"
        )
    if len(digests) > 1:
        ranks = "; ".join(sorted(f"rank {', '.join(sorted(of_one))}" for of_one in digests.values()))
        yield _problem(
            "engines", str(folder), f"Their settings differ: {ranks}.", "Give every rank the same TRACEKV_* variables."
        )


def check_agent(resolved: Settings, environ: Mapping[str, str]) -> Iterator[Result]:
    """Whether what is recorded can be exported, and to where."""
    if resolved.agent == "off":
        yield Result("agent", Severity.NOTE.value, "TRACEKV_AGENT", "off: journals are written, nothing exports them.")
        return
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        yield _problem(
            "agent", "opentelemetry-sdk", "The agent's libraries aren't installed: nothing would be exported.",
            "pip install 'tracekv[agent]'",
        )  # fmt: skip
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint:
        yield _check_endpoint(endpoint)
    if resolved.trace_file:
        yield _check_trace_file(Path(resolved.trace_file))
    if not endpoint and not resolved.trace_file and resolved.metrics_port is None:
        yield Result(
            "export", Severity.ADVICE.value, "TRACEKV_TRACE_FILE", "Nothing says where spans and metrics should go.",
            "Set TRACEKV_TRACE_FILE, OTEL_EXPORTER_OTLP_ENDPOINT or TRACEKV_METRICS_PORT.",
        )  # fmt: skip
    elif resolved.agent != "thread":
        yield _check_holder(_journal_folder(resolved), is_started=resolved.agent == "auto")


def _check_holder(folder: Path, *, is_started: bool) -> Result:
    there = holder(folder)
    if there is None and is_started:
        return Result("agent", OK, str(folder), "nobody reads the journals now; the first engine starts an agent")
    if there is None:
        return Result(
            "agent", Severity.ADVICE.value, str(folder),
            "Nobody reads the journals: with TRACEKV_AGENT=external no engine starts an agent.",
            "Run `tracekv agent --stay` beside the engines, as their user.",
        )  # fmt: skip
    file = folder / ENDPOINT_FILE
    where = f", metrics at {file.read_text().strip()}" if file.exists() else ""
    return Result("agent", OK, str(folder), f"pid {there.pid} reads the journals{where}")


def _check_endpoint(endpoint: str) -> Result:
    parts = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}")
    shown = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 4318)}"
    try:
        with socket.create_connection((parts.hostname or "", int(shown.rpartition(":")[2])), _CONNECT_S):
            return Result("export", OK, shown, "the endpoint accepts connections")
    except (OSError, ValueError) as error:
        why = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        return _problem(
            "export", shown, f"The OTLP endpoint can't be reached ({why}).",
            "Start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT. The engine runs on regardless; spans are lost.",
        )  # fmt: skip


def _check_trace_file(path: Path) -> Result:
    folder = path.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    target = path if path.exists() else folder
    if not folder.is_dir() or path.is_dir() or not os.access(target, os.W_OK):
        return _problem(
            "export", str(path), "The trace file can't be written.", "Set TRACEKV_TRACE_FILE to one that can."
        )
    return Result("export", OK, str(path), "spans are appended here")


def check_backend(resolved: Settings) -> Iterator[Result]:
    """Whether the backend that is named can be used: its own ``diagnose``."""
    for point in entry_points(group=BACKENDS):
        if point.name == resolved.connector:
            diagnose = getattr(point.load(), "diagnose", None)
            for what, error in diagnose() if diagnose else ():
                subject, _, rest = what.partition(": ")
                yield (
                    Result("store", OK, subject, rest)
                    if error is None
                    else _problem("store", subject, str(error), "The engine would stop at bring-up.")
                )


def check_arguments(path: Path) -> Iterator[Result]:
    """Lint the engine's YAML file."""
    try:
        arguments: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        yield _problem("arguments", str(path), f"The file can't be read as YAML: {error}", "Correct it.")
        return
    if not isinstance(arguments, dict):
        yield _problem(
            "arguments", str(path), "The file holds no mapping of arguments.", "Name the engine's YAML file."
        )
        return
    findings = list(lint_arguments(arguments))
    yield from map(Result.of, findings)
    connector = arguments.get("kv_connector_config") or {}
    if connector.get("connector_module") != "tracekv.trtllm":
        yield Result(
            "arguments", Severity.ADVICE.value, "kv_connector_config", "The engine doesn't load tracekv.",
            "Set connector_module: tracekv.trtllm, and the classes Scheduler and Worker.",
        )  # fmt: skip
    elif not findings:
        yield Result("arguments", OK, str(path), "nothing to say against them")

"""The one parser of ``TRACEKV_*`` variables and the YAML file of the same tree, for engine and command line alike.

A variable ``TRACEKV_DETAIL`` is the key ``detail`` of the tree; ``TRACEKV_FSSPEC__URL`` is ``url`` below ``fsspec``. Variables win
over the file named by ``TRACEKV_CONFIG``. An unknown name is an error that says which valid one is nearest.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

PREFIX = "TRACEKV_"
BACKENDS = "tracekv.backends"


class SettingsError(ValueError):
    """A setting that is unknown or has no valid value; the message names it and says what is valid."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tracekv's own settings; each backend has a struct of its own below its prefix."""

    #: What is wrapped: a backend, a preset of the engine's registry, or ``package.module:SchedulerClass,WorkerClass``.
    connector: str = "fsspec"
    #: ``economy``: per-layer hooks as one span per layer group; ``full``: a span each; ``off``: no records at all.
    detail: Literal["economy", "full", "off"] = "economy"
    #: File to which spans are appended as OTLP JSON lines.
    trace_file: str | None = None
    #: Who reads the journals: ``auto`` (one agent process per node, started by itself), ``external`` (a sidecar that somebody else
    #: starts), ``thread`` (a thread of each process, for tests and notebooks; only the rank that takes requests in joins a caller's
    #: trace) or ``off`` (nobody; the journal is still written).
    agent: Literal["auto", "external", "thread", "off"] = "auto"
    #: Folder of the journals, by default one of the user's own in ``/dev/shm``.
    journal_dir: str | None = None
    #: A step without an exported request's load or save is exported once in so many.
    step_sample: Annotated[int, msgspec.Meta(ge=1)] = 100
    #: Port of the Prometheus endpoint of this node's agent, on the loopback address; 0: a free one; unset: none.
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    #: Bind to the engine's request enqueue, so that a trace begins there and joins its caller's.
    enqueue_hook: bool = False
    #: Share of the engine thread's time that tracing may take, in percent; beyond it only counters are kept.
    budget_pct: Annotated[float, msgspec.Meta(gt=0, le=100)] = 3.0
    #: Replace request ids by a digest in everything that leaves the process.
    hash_request_ids: bool = False
    #: Where a person opens a trace: what ``tracekv explain`` prints, ``{trace_id}`` replaced. By default a Jaeger on this machine.
    trace_url: str = "http://localhost:16686/trace/{trace_id}"
    #: See the bytes that callbacks copy from and to the pages, whatever the connector tells. To find faults with: each copy costs
    #: about a tenth of a millisecond more.
    watch: bool = False
    #: ``replay``: record keyed digests of each request's blocks too, so that ``tracekv replay`` can drive another connector.
    record: Literal["", "replay"] = ""


S = TypeVar("S", bound=msgspec.Struct)


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Tracekv's own settings, with the names of the whole tree checked.

    Raises:
        SettingsError: An unknown variable or key, or a value that doesn't fit.
    """
    environ = os.environ if environ is None else environ
    tree = _file_tree(environ)
    backends = _backend_names()
    own = {name: value for name, value in tree.items() if name not in backends}
    for variable, value in _variables(environ).items():
        section, _, rest = variable.partition("__")
        if not rest:
            own[section.lower()] = value
        elif section.lower() not in backends:
            _unknown(f"{PREFIX}{variable}", _all_variables())
        else:
            _check_backend_name(section.lower(), variable)
    settings = _convert(own, Settings, PREFIX)
    if not settings.journal_dir:
        return settings
    # Absolute, since it is handed on to processes that live elsewhere.
    folder = str(Path(settings.journal_dir).expanduser().absolute())
    return msgspec.structs.replace(settings, journal_dir=folder)


def load_section(section: str, struct: type[S], environ: Mapping[str, str] | None = None) -> S:
    """The settings of a backend: the keys below ``section`` and the variables ``TRACEKV_<SECTION>__*``.

    Raises:
        SettingsError: As :func:`load`.
    """
    environ = os.environ if environ is None else environ
    values = _file_tree(environ).get(section) or {}
    if not isinstance(values, dict):
        raise SettingsError(f"tracekv: {section} in {environ['TRACEKV_CONFIG']} has to be a mapping")
    prefix = f"{section.upper()}__"
    merged = dict(values)
    for variable, value in _variables(environ).items():
        if variable.startswith(prefix):
            merged[variable.removeprefix(prefix).lower()] = value
    return _convert(merged, struct, f"{PREFIX}{prefix}")


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environ if name.startswith(PREFIX) and name != "TRACEKV_CONFIG")
    return {name.removeprefix(PREFIX): environ[name] for name in names}


def _file_tree(environ: Mapping[str, str]) -> dict[str, Any]:
    path = environ.get("TRACEKV_CONFIG")
    if not path:
        return {}
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise SettingsError(f"tracekv: TRACEKV_CONFIG={path} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"tracekv: TRACEKV_CONFIG={path} is no valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise SettingsError(f"tracekv: TRACEKV_CONFIG={path} has to hold a mapping of settings")
    return tree


def _convert(values: Mapping[str, Any], struct: type[S], prefix: str) -> S:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    known: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            upper = str(name).upper()  # a key of the file may be a number
            _unknown(f"{prefix}{upper}", [f"{prefix}{field.upper()}" for field in fields] or _all_variables())
        wanted = fields[name].type
        if value is False and getattr(wanted, "__origin__", None) is Literal and "off" in wanted.__args__:
            value = "off"  # what YAML makes a boolean of
        known[name] = _from_text(value, wanted) if isinstance(value, str) else value
    for name, value in known.items():
        try:
            msgspec.convert(value, fields[name].type, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(f"tracekv: {prefix}{name.upper()} has no valid value: {error}") from None
    try:
        return msgspec.convert(known, struct, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"tracekv: settings below {prefix}: {error}") from None


def _from_text(text: str, wanted: Any) -> Any:
    """Mappings and lists are written as JSON in a variable; booleans as 1/0, true/false, on/off, yes/no."""
    if wanted is bool:
        lowered = text.strip().lower()
        return {"yes": True, "on": True, "no": False, "off": False}.get(lowered, lowered)
    if getattr(wanted, "__origin__", None) in (dict, list, tuple):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def _backend_names() -> set[str]:
    return {point.name for point in entry_points(group=BACKENDS)}


def _backend_struct(name: str) -> type[msgspec.Struct] | None:
    for point in entry_points(group=BACKENDS):
        if point.name == name:
            struct: type[msgspec.Struct] | None = getattr(point.load(), "Settings", None)
            return struct
    return None


def _check_backend_name(section: str, variable: str) -> None:
    struct = _backend_struct(section)
    if struct is None:
        return
    names = [f"{section.upper()}__{field.name.upper()}" for field in msgspec.structs.fields(struct)]
    if variable not in names:
        _unknown(f"{PREFIX}{variable}", [f"{PREFIX}{name}" for name in names])


def _all_variables() -> list[str]:
    names = ["CONFIG", *(field.name.upper() for field in msgspec.structs.fields(Settings))]
    for backend in sorted(_backend_names()):
        struct = _backend_struct(backend)
        for field in msgspec.structs.fields(struct) if struct else ():
            names.append(f"{backend.upper()}__{field.name.upper()}")
    return [f"{PREFIX}{name}" for name in names]


def _unknown(name: str, valid: list[str]) -> None:
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5) or difflib.get_close_matches(
        name, _all_variables(), n=1, cutoff=0.0
    )
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise SettingsError(f"tracekv: there is no setting {name}.{hint} Valid ones: {', '.join(sorted(valid))}")

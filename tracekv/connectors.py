"""From the name of a connector to its two classes."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from importlib.metadata import entry_points
from typing import NamedTuple

from tracekv.capture.classes import implemented_callbacks, side_of
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tracekv.journal.vocabulary import Callback, Side
from tracekv.settings import BACKENDS, SettingsError

_REGISTRY = "tensorrt_llm._torch.pyexecutor.connectors.registry"
_FLAT = (Callback.UPDATE_STATE_AFTER_ALLOC, Callback.REQUEST_FINISHED)
_GROUPED = (Callback.UPDATE_STATE_AFTER_ALLOC_BY_LAYER_GROUP, Callback.REQUEST_FINISHED_BY_LAYER_GROUP)
_BASES = {Side.SCHEDULER: KvCacheConnectorScheduler, Side.WORKER: KvCacheConnectorWorker}


class ConnectorError(SettingsError):
    """``TRACEKV_CONNECTOR`` names nothing that can be imported, or classes that are no complete connector."""


class Connector(NamedTuple):
    """The two halves."""

    scheduler: type
    worker: type


def resolve(name: str) -> Connector:
    """The classes behind ``name``, not traced yet.

    Args:
        name: An entry point of ``tracekv.backends``; a preset of TensorRT-LLM's registry (``lmcache``, ``kvbm``, ...)
            where that is installed; or ``package.module:SchedulerClass,WorkerClass`` (also ``a.b:Scheduler,c.d:Worker``).

    Raises:
        ConnectorError: Nothing has that name, it can't be imported, or a set of callbacks is incomplete.

    Source: contract.md section 3.
    """
    if ":" in name:
        found = _from_path(name)
    elif (backend := _from_entry_point(name)) is not None:
        found = backend
    else:
        found = _from_preset(name)
    check(found)
    return found


def check(connector: Connector) -> None:
    """Refuse what the runtime would refuse at bring-up, with the missing method's name.

    Raises:
        ConnectorError: A class is of the wrong side, an abstract callback is left out, or a scheduler mixes the flat and
            the per-layer-group set.
    """
    for cls, side in ((connector.scheduler, Side.SCHEDULER), (connector.worker, Side.WORKER)):
        where = f"{cls.__module__}.{cls.__qualname__}"
        try:
            actual = side_of(cls)
        except TypeError as error:
            raise ConnectorError(str(error)) from None
        if actual is not side:
            raise ConnectorError(
                f"tracekv: {where} is a {actual.value} class; the {side.value} class goes in its place."
            )
        if side is Side.SCHEDULER:
            _check_sets(cls, where)
        missing = sorted(getattr(cls, "__abstractmethods__", ())) or _missing_of_duck(cls, side)
        if missing:
            raise ConnectorError(
                f"tracekv: {where} doesn't define {', '.join(missing)}. The runtime calls "
                f"{'them' if len(missing) > 1 else 'it'}; an empty method will do where there is nothing to do."
            )


def _check_sets(cls: type, where: str) -> None:
    defined = implemented_callbacks(cls)
    for mine, others in ((_FLAT, _GROUPED), (_GROUPED, _FLAT)):
        has = [callback.method for callback in mine if callback in defined]
        lacks = [callback.method for callback in mine if callback not in defined]
        if has and lacks and not all(other in defined for other in others):
            raise ConnectorError(
                f"tracekv: {where} defines {has[0]} but not {lacks[0]}. The flat set needs update_state_after_alloc and "
                "request_finished, the per-layer-group set both *_by_layer_group methods. TensorRT-LLM refuses such a "
                "connector at bring-up."
            )


def _missing_of_duck(cls: type, side: Side) -> list[str]:
    base = _BASES[side]
    if issubclass(cls, base):
        return []
    replaced = {flat.method: grouped.method for flat, grouped in zip(_FLAT, _GROUPED, strict=True)}
    replaced["register_kv_caches"] = "register_kv_cache_layout"
    return sorted(
        name
        for name in base.__abstractmethods__
        if not hasattr(cls, name) and not hasattr(cls, replaced.get(name, name))
    )


def _from_path(name: str) -> Connector:
    left, separator, right = name.partition(",")
    module, _, scheduler = left.strip().partition(":")
    worker_module, _, worker = right.strip().rpartition(":")
    if not separator or not module or not scheduler or not worker:
        raise ConnectorError(
            f"tracekv: TRACEKV_CONNECTOR={name} is no connector. Write package.module:SchedulerClass,WorkerClass."
        )
    return Connector(_load(module, scheduler, name), _load(worker_module or module, worker, name))


def _load(module: str, attribute: str, name: str) -> type:
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise ConnectorError(
            f"tracekv: TRACEKV_CONNECTOR={name}: the module {module} can't be imported ({type(error).__name__}: {error}). "
            "Check the name, and that it is installed in the engine's environment."
        ) from error
    found = getattr(imported, attribute, None)
    if not isinstance(found, type):
        nearest = difflib.get_close_matches(attribute, vars(imported), n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ConnectorError(f"tracekv: TRACEKV_CONNECTOR={name}: {module} has no class {attribute}.{hint}")
    return found


def _from_entry_point(name: str) -> Connector | None:
    for point in entry_points(group=BACKENDS):
        if point.name != name:
            continue
        try:
            backend = point.load()
            return Connector(backend.Scheduler, backend.Worker)
        except Exception as error:
            raise ConnectorError(
                f"tracekv: the backend {name} ({point.value}) can't be loaded ({type(error).__name__}: {error})."
            ) from error
    return None


def _from_preset(name: str) -> Connector:
    presets: dict[str, dict[str, str]] = {}
    if importlib.util.find_spec("tensorrt_llm"):
        try:
            presets = importlib.import_module(_REGISTRY).CONNECTOR_REGISTRY
        except (ModuleNotFoundError, AttributeError):
            presets = {}
    if name not in presets:
        valid = sorted({*presets, *(point.name for point in entry_points(group=BACKENDS))})
        nearest = difflib.get_close_matches(name, valid, n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        where = "" if presets else " TensorRT-LLM's presets are known only where it is installed."
        raise ConnectorError(
            f"tracekv: TRACEKV_CONNECTOR={name} is no connector.{hint} Known: {', '.join(valid)}, or "
            f"package.module:SchedulerClass,WorkerClass.{where}"
        )
    preset = presets[name]
    module = preset["connector_module"]
    return Connector(
        _load(module, preset["connector_scheduler_class"], name), _load(module, preset["connector_worker_class"], name)
    )

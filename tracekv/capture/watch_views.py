"""What the inner connector is handed in place of the caches: the same memory, through views that tell what is done with them.

A view is a ``torch.Tensor`` subclass over the very same storage. Each torch function that is called with one, on any thread, runs
as it would have run, under a dispatch mode that sees the operations it is made of; results that lie in the caches are views again,
all others plain tensors. What moves no operation (``numpy()``, ``data_ptr()``, ``torch.save``) is told by the function's name.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from time import perf_counter_ns
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tracekv.capture.watch_extents import Extents, pages_of_tensor
from tracekv.capture.watch_ops import Moved, moved_by, pool_of
from tracekv.journal.vocabulary import WatchGap


class Watcher(Protocol):
    """Who is told. Called on the thread that did it."""

    extents: Extents

    def moved(self, moved: Moved, started_ns: int) -> None:
        """An operation read or wrote pages."""

    def gap(self, reason: WatchGap) -> None:
        """From here on bytes may move unseen."""

    def storage_read(self, tensor: torch.Tensor) -> None:
        """All the memory behind a tensor was read."""

    def failed(self, error: Exception) -> None:
        """The watch itself failed, and ends."""


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees each operation. Results are what they were: the operation runs first."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = perf_counter_ns()
        answer = func(*args, **(kwargs or {}))
        try:
            moved = moved_by(self._watcher.extents, func, args, kwargs or {}, answer)
            if moved:
                self._watcher.moved(moved, started)
        except Exception as error:
            self._watcher.failed(error)
        return answer


class _Watching(threading.local):
    """Whether this thread is under a mode already."""

    mode: Mode | None = None


_watching = _Watching()
_watcher: Watcher | None = None


def begin(watcher: Watcher | None) -> None:
    """Tell ``watcher`` from now on; None: nobody, and the views that are out there are plain tensors but in name."""
    global _watcher
    _watcher = watcher


def warm_up(watcher: Watcher) -> None:
    """Let torch import what the first operation under a mode needs: that takes seconds, and belongs to bring-up."""
    with Mode(watcher):
        torch.zeros(1)


def enter() -> None:
    """Watch every operation of this thread, whatever the tensors, until :func:`leave`."""
    if _watcher is not None and _watching.mode is None:
        mode = Mode(_watcher)
        mode.__enter__()  # type: ignore[no-untyped-call]
        _watching.mode = mode


def leave() -> None:
    """Undo :func:`enter`."""
    mode = _watching.mode
    if mode is not None:
        _watching.mode = None
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


#: Functions that give the bytes away without moving them, by the name that torch calls them.
_GIVES_AWAY = {
    "data_ptr": WatchGap.RAW_ADDRESS,
    "const_data_ptr": WatchGap.RAW_ADDRESS,
    "mutable_data_ptr": WatchGap.RAW_ADDRESS,
    "untyped_storage": WatchGap.STORAGE,
    "storage": WatchGap.STORAGE,
    "_typed_storage": WatchGap.STORAGE,
    "numpy": WatchGap.ARRAY,
    "__array__": WatchGap.ARRAY,
    "__dlpack__": WatchGap.DLPACK,
    "share_memory_": WatchGap.SHARED,
}
_DEFAULT_FUNCTION = inspect.getattr_static(torch.Tensor, "__torch_function__").__func__
_ADDRESS_PROPERTIES = (torch.Tensor.__cuda_array_interface__.__get__,)


class WatchedTensor(torch.Tensor):
    """A view of registered caches. Made by :func:`watched`; behaves as the plain tensor does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _ORDINARY.issuperset(types) and any(map(_has_its_own, types)):
            return NotImplemented  # another subclass's function: it will call us back with what it makes of it
        watcher = _watcher
        with torch._C.DisableTorchFunctionSubclass():
            if watcher is None:
                return func(*args, **kwargs)
            _before(watcher, func, args)
            if _watching.mode is not None:
                answer = func(*args, **kwargs)
            else:
                with Mode(watcher):
                    answer = func(*args, **kwargs)
            return _as_views(watcher, answer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, a view is the plain tensor; with it go all the bytes of its storage, as ``torch.save`` writes them."""
        if self.device.type == "cpu" or _watching.mode is None:  # from a GPU it is copied first, by an operation
            _tell(lambda watcher: watcher.storage_read(plain(self)))
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        watcher = _watcher
        with Mode(watcher) if watcher is not None and _watching.mode is None else contextlib.nullcontext():
            return copy.deepcopy(plain(self), memo)

    def __copy__(self) -> torch.Tensor:
        return watched(copy.copy(plain(self)))

    def as_subclass(self, cls: Any) -> Any:
        """As the plain tensor's; of ``torch.Tensor`` itself it stays a view."""
        return torch.Tensor.as_subclass(self, WatchedTensor if cls is torch.Tensor else cls)


#: Tensor classes without a torch function of their own.
_ORDINARY: set[type] = {torch.Tensor, WatchedTensor}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


def watched(tensor: torch.Tensor) -> torch.Tensor:
    """A view over the same memory."""
    return torch.Tensor.as_subclass(tensor, WatchedTensor)


def _has_its_own(kind: type) -> bool:
    function = getattr(kind, "__torch_function__", torch._C._disabled_torch_function_impl)
    is_ordinary = function is torch._C._disabled_torch_function_impl or (
        getattr(function, "__func__", function) is _DEFAULT_FUNCTION
    )
    if is_ordinary:
        _ORDINARY.add(kind)
    return not is_ordinary


def _before(watcher: Watcher, func: Any, args: Any) -> None:
    try:
        name = getattr(func, "__name__", "")
        reason = _GIVES_AWAY.get(name)
        if reason is None and func in _ADDRESS_PROPERTIES:
            reason = WatchGap.RAW_ADDRESS
        if reason is not None:
            watcher.gap(reason)
        elif name == "tolist" and (pool := pool_of(watcher.extents, args[0])) is not None:
            # Read element by element, by no operation.
            watcher.moved(Moved(read=pages_of_tensor(pool, args[0])), perf_counter_ns())
    except Exception as error:
        watcher.failed(error)


def _as_views(watcher: Watcher, answer: Any) -> Any:
    if isinstance(answer, torch.Tensor):
        # In-place functions answer what they were given.
        if type(answer) is torch.Tensor and pool_of(watcher.extents, answer) is not None:
            return watched(answer)
        return answer
    if type(answer) in (tuple, list):
        return type(answer)(_as_views(watcher, item) for item in answer)
    return answer


def _tell(told: Callable[[Watcher], None]) -> None:
    watcher = _watcher
    if watcher is None:
        return
    try:
        told(watcher)
    except Exception as error:
        watcher.failed(error)


def _share(tensor: WatchedTensor) -> Any:
    """To another process, as ``torch.multiprocessing`` shares a plain tensor: what is done there isn't seen."""
    _tell(lambda watcher: watcher.gap(WatchGap.SHARED))
    return reduce_tensor(plain(tensor))  # type: ignore[no-untyped-call]


ForkingPickler.register(WatchedTensor, _share)


# -- layouts -----------------------------------------------------------------------------------------------------------

_region_classes: dict[type, type] = {}


def watched_layout(layout: Any) -> Any:
    """The same layout, of the same classes, whose regions hand out views."""
    groups = []
    for group in layout.groups:
        mine = copy.copy(group)
        for name in ("regions", "replicated_regions"):
            regions = getattr(group, name, None)
            if regions:
                object.__setattr__(mine, name, type(regions)(map(_watched_region, regions)))
        groups.append(mine)
    mine = copy.copy(layout)
    object.__setattr__(mine, "groups", type(layout.groups)(groups))
    return mine


def _watched_region(region: Any) -> Any:
    mine = copy.copy(region)
    object.__setattr__(mine, "_tracekv_region", region)
    object.__setattr__(mine, "__class__", _region_class(type(region)))
    return mine


def _region_class(kind: type) -> type:
    known = _region_classes.get(kind)
    if known is not None:
        return known

    def handing_out(name: str) -> Callable[..., Any]:
        def hand_out(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = getattr(self._tracekv_region, name)(*args, **kwargs)
            return watched(tensor) if _watcher is not None else tensor

        hand_out.__doc__ = getattr(kind, name).__doc__
        return hand_out

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        if name == "base":
            _tell(lambda watcher: watcher.gap(WatchGap.RAW_ADDRESS))
        return object.__getattribute__(self, name)

    def address_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tell(lambda watcher: watcher.gap(WatchGap.RAW_ADDRESS))
        return self._tracekv_region.address_of(*args, **kwargs)

    def __reduce_ex__(self: Any, _: Any) -> Any:  # noqa: N807
        _tell(lambda watcher: watcher.gap(WatchGap.RAW_ADDRESS))
        return copy.copy, (self._tracekv_region,)

    namespace: dict[str, Any] = {
        "__slots__": (),
        "__getattribute__": __getattribute__,
        "__reduce_ex__": __reduce_ex__,
        "__repr__": lambda self: repr(self._tracekv_region),
        "__eq__": lambda self, other: self._tracekv_region == getattr(other, "_tracekv_region", other),
        "__hash__": lambda self: hash(self._tracekv_region),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "address_of": address_of,
    }
    namespace |= {name: handing_out(name) for name in ("as_tensor", "slot_tensor") if hasattr(kind, name)}
    made = _region_classes[kind] = type(kind.__name__, (kind,), namespace)
    return made

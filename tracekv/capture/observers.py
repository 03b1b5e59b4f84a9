"""A recorder that tells others what the callbacks carried: the watch (``TRACEKV_WATCH``), the recording for replay
(``TRACEKV_RECORD``). Imported only where one of them is on.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracekv.capture.recorder import Recorder
from tracekv.capture.session import Session
from tracekv.journal.vocabulary import Side

if TYPE_CHECKING:
    from tracekv.capture.replay import ReplayRecording
    from tracekv.capture.watch import Watch


class Observer:
    """Told on the thread of the callback, after its record is written. What it raises removes it; nothing reaches the engine."""

    def queried(self, request: Any) -> None:
        """``get_num_new_matched_tokens`` comes: told before its record, so that a reader knows the tokens by then."""

    def allocated(self, request: Any, pages: list[list[int]]) -> None:
        """``update_state_after_alloc``."""

    def built(self, scheduler_output: Any) -> None:
        """``build_connector_meta``."""

    def finished(self, request: Any, pages: list[list[int]], answer: Any) -> None:
        """``request_finished``."""

    def hand_out(self, caches: Any) -> Any:
        """The caches are registered: what to give to the inner connector in their place."""
        return caches

    def entered(self) -> None:
        """Any callback but the per-layer hooks begins."""

    def left(self) -> None:
        """It is over."""


class ObservedRecorder(Recorder):
    """As :class:`Recorder`, with observers."""

    __slots__ = ("_observers",)

    def __init__(self, session: Session, run_id: bytes, observers: Sequence[Observer]) -> None:
        super().__init__(session, run_id)
        self._observers = list(observers)

    def enter_bring_up(self, code: int) -> int:
        """As the base's."""
        started = super().enter_bring_up(code)
        if started:
            self._tell("entered")
        return started

    def leave(self) -> None:
        """As the base's."""
        self._tell("left")
        super().leave()

    def hand_out(self, caches: Any) -> Any:
        """The caches as the observers want the inner connector to see them."""
        for observer in tuple(self._observers):
            try:
                caches = observer.hand_out(caches)
            except Exception as error:
                self._drop(observer, error)
        return caches

    def query(self, code: int, started: int, request: Any, computed: int, answer: Any) -> None:
        """As the base's."""
        self._tell("queried", request)
        super().query(code, started, request, computed, answer)

    def alloc(self, code: int, started: int, request: Any, pages: list[list[int]]) -> None:
        """As the base's."""
        super().alloc(code, started, request, pages)
        self._tell("allocated", request, pages)

    def build(self, code: int, started: int, output: Any, metadata: object) -> None:
        """As the base's."""
        super().build(code, started, output, metadata)
        self._tell("built", output)

    def finish(self, code: int, started: int, request: Any, pages: list[list[int]], answer: Any) -> None:
        """As the base's."""
        super().finish(code, started, request, pages, answer)
        self._tell("finished", request, pages, answer)

    def _tell(self, what: str, *facts: Any) -> None:
        for observer in tuple(self._observers):
            try:
                getattr(observer, what)(*facts)
            except Exception as error:
                self._drop(observer, error)

    def _drop(self, observer: Observer, error: Exception) -> None:
        self._observers.remove(observer)
        self._session.fault(type(observer).__name__, error)


_lock = threading.Lock()


class Observation:
    """The observers of a process, made for its first traced instance.

    Attributes:
        watch: None where ``TRACEKV_WATCH`` is off.
        replay: None where ``TRACEKV_RECORD`` is empty.
    """

    def __init__(self, session: Session) -> None:
        # torch and what comes with it are of no use to a process that only records.
        self.watch: Watch | None = (
            importlib.import_module("tracekv.capture.watch").Watch(session) if session.settings.watch else None
        )
        self.replay: ReplayRecording | None = (
            importlib.import_module("tracekv.capture.replay").ReplayRecording(session)
            if session.settings.record == "replay"
            else None
        )

    def of(self, side: Side, llm_args: Any) -> list[Observer]:
        """Who observes an instance."""
        observers: list[Observer] = []
        if self.watch is not None:
            observers.append(self.watch.owners if side is Side.SCHEDULER else self.watch)
        if self.replay is not None:
            self.replay.begins(side, llm_args)
            observers.append(self.replay)
        return observers

    def close(self) -> None:
        """Write what is left."""
        if self.watch is not None:
            self.watch.close()


def observed_recorder(session: Session, side: Side, run_id: bytes, llm_args: Any) -> Recorder:
    """The recorder of an instance whose settings ask for observers."""
    with _lock:  # the two halves are constructed at the same time, on two threads
        if session.observation is None:
            session.observation = Observation(session)
    return ObservedRecorder(session, run_id, session.observation.of(side, llm_args))

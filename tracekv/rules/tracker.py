"""Keeps what the rules share up to date with the records, and tells events."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tracekv.journal.records import (
    AllocCall,
    BindCall,
    BuildCall,
    Call,
    CallCounts,
    CancelLoadCall,
    ConnectorWrapped,
    Drop,
    FinishCall,
    FinishedCall,
    IdlePolls,
    LayerHooks,
    Lookup,
    ProcessStarted,
    QueryCall,
    Record,
    RegisterCall,
    RequestResetCall,
    RunJoined,
    StoreOperation,
    TracingReduced,
    Transfer,
    WatchReport,
)
from tracekv.rules.core import Tell
from tracekv.rules.leader import LeaderRecords
from tracekv.rules.model import Limits
from tracekv.rules.state import Source
from tracekv.rules.worker import WorkerRecords


class Tracker(LeaderRecords, WorkerRecords):
    """The state of every run, and the one place that changes it.

    Attributes:
        takers: What takes a process (:meth:`source`) and a record, by the record's type; there is none for those that tell nothing.
    """

    def __init__(self, limits: Limits, tell: Tell, spared: Collection[str]) -> None:
        super().__init__(limits, tell, spared)
        self.takers: dict[type[Record], Callable[[Source, Any], None]] = {
            ProcessStarted: self._process_started,
            ConnectorWrapped: self._wrapped,
            RunJoined: self._joined,
            TracingReduced: self._reduced,
            CallCounts: self._counted,
            Call: self._call,
            QueryCall: self._query,
            AllocCall: self._alloc,
            BuildCall: self._build,
            FinishCall: self._finish,
            BindCall: self._bind,
            FinishedCall: self._polled,
            IdlePolls: self._idle,
            LayerHooks: self._hooks,
            RegisterCall: self._register,
            CancelLoadCall: self._cancelled,
            RequestResetCall: self._reset,
            Transfer: self._moved,
            Lookup: self._looked_up,
            StoreOperation: self._stored,
            Drop: self._dropped,
            WatchReport: self._watched,
        }

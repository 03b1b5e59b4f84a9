"""Our minimal correct connector is clean over the whole matrix."""

from __future__ import annotations

from typing import ClassVar

from tracekv.testing import ConnectorContract, minimal


class TestMinimalPair(ConnectorContract):
    scheduler, worker = minimal.Scheduler, minimal.Worker
    environment: ClassVar = {minimal.VARIABLE: "{folder}"}
    variants: ClassVar = {"*parked": (minimal.ParkingScheduler, minimal.ParkingWorker)}

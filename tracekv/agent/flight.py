"""The flight recorder's answer: what each process was in the middle of, live or dead, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns, time_ns
from typing import Any

from tracekv.journal.process import boot_id
from tracekv.journal.process_scan import ProcessScan
from tracekv.journal.reader import OpenHook
from tracekv.journal.vocabulary import Callback
from tracekv.views import ids
from tracekv.views.facts import callback_name, count_pages
from tracekv.views.inflight import InFlightView, all_moves, settle


class Flight:
    """One process, read to the end: its ring file, its part of archives, or both.

    Attributes:
        notes: What is wrong with the journal itself.
    """

    def __init__(self, process: ProcessScan, *, hash_request_ids: bool = False) -> None:
        self.process = process
        self.view = InFlightView()
        self.records = process.records
        self.lost = process.lost
        self.notes: list[str] = []
        self._hash = hash_request_ids
        for record in process.select():
            self.view.feed(record)
        self.is_alive = process.is_alive()
        self.state = process.state()
        for path, cut in process.truncated_bytes.items():
            self.notes.append(f"tracekv: {path} is cut short: {cut} bytes after its last whole entry are left out")
        if process.undecodable:
            self.notes.append(f"tracekv: {process.paths[0]} holds {process.undecodable} records of a newer tracekv")
        self.now_ns = self._now()

    def _now(self) -> int:
        """What ages are counted from: now, where this clock is the process's; else the last that is known of it."""
        if self.process.ring is not None and self.process.facts.boot_id == boot_id():
            return perf_counter_ns()
        hooks = [moment for hook in (*self.state.waits, *self.state.saves) for moment in hook[1:]]
        latest = self.process.anchors()[-1].monotonic_ns
        return max([self.view.last_ns, self.state.since_ns, latest, *hooks])

    def callbacks(self) -> list[dict[str, Any]]:
        """The callbacks entered and not left, layer hooks among them."""
        found = []
        if self.state.callback:
            found.append(self._callback(self.state.callback, self.state.since_ns, None))
        for callback, hooks in (
            (Callback.WAIT_FOR_LAYER_LOAD, self.state.waits),
            (Callback.SAVE_KV_LAYER, self.state.saves),
        ):
            found += [self._callback(callback, hook.started_ns, hook) for hook in hooks if not hook.ended_ns]
        return found

    def _callback(self, number: int, since_ns: int, hook: OpenHook | None) -> dict[str, Any]:
        facts = self.view.facts
        side, method = callback_name(number)
        source = facts.source_of(side, method)
        return {
            "callback": f"{side.value}.{method}",
            "age_s": self.age_s(since_ns),
            "layer": None if hook is None else hook.layer,
            "layer_group": None if hook is None else facts.group_of_layer(hook.layer),
            "function": facts.function(side, method),
            "file": None if source is None else source.file,
            "line": None if source is None else source.line,
        }

    def age_s(self, since_ns: int) -> float:
        """Seconds since a moment of the process."""
        return round(max(0, self.now_ns - since_ns) / 1e9, 6)

    def label(self, request_id: int) -> str:
        """How a request is named."""
        return ids.request_label(self.view.facts.run, request_id, hashed=self._hash)


def describe(flights: Sequence[Flight]) -> list[dict[str, Any]]:
    """What each process was in the middle of, as JSON holds it; ages in seconds, counted from now (``Flight.now_ns``)."""
    settle([flight.view for flight in flights])
    moves = all_moves([flight.view for flight in flights])
    return [_describe(flight, found) for flight, found in zip(flights, moves, strict=True)]


def _describe(flight: Flight, moves: Sequence[Any]) -> dict[str, Any]:
    facts, process = flight.view.facts, flight.process
    wall_offset = process.anchors()[-1].wall_ns - process.anchors()[-1].monotonic_ns
    return {
        "journal": str(process.paths[0]),
        "pid": process.facts.pid,
        "host": process.facts.host,
        "is_alive": flight.is_alive,
        "rank": facts.rank,
        "world": facts.world,
        "run": ids.run_label(facts.run_id) if facts.run_id else None,
        "records": flight.records,
        "records_lost": flight.lost,
        "last_record_age_s": flight.age_s(flight.view.last_ns) if flight.view.last_ns else None,
        "seen_at_unix_ns": time_ns() if process.facts.boot_id == boot_id() else flight.now_ns + wall_offset,
        "callbacks": flight.callbacks(),
        "requests": [
            {
                "request": flight.label(request.request_id),
                "waits_for": request.waits_for,
                "age_s": flight.age_s(request.since_ns),
                "prompt_tokens": request.prompt_tokens,
                "computed_tokens": request.computed_tokens,
                "offered_tokens": request.offered_tokens,
                "honoured_tokens": request.honoured_tokens,
                "pages": [count_pages(slots) for slots in request.pages],
                "step": request.step,
            }
            for request in flight.view.requests.values()
        ],
        "moves": [
            {
                "request": flight.label(move.request_id),
                "direction": move.direction.value,
                "layer_group": move.layer_group,
                "pages": len(move.pages),
                "bytes": move.nbytes,
                "age_s": flight.age_s(move.since_ns),
                "step": move.step or None,
                "source": "eligible",
            }
            for move in moves
        ],
        "notes": flight.notes,
    }

"""The kit: puts a connector pair through the cells of a matrix, traced and with the rules on.

.. code-block:: python

   with Kit(MyScheduler, MyWorker, environment={"MY_FOLDER": "{folder}"}) as kit:
       results = [kit.run(cell) for cell in matrix()]
"""

from __future__ import annotations

import fnmatch
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tracekv
from tracekv.capture import implemented_callbacks
from tracekv.connectors import ConnectorError
from tracekv.testing.cells import Cell, Submit
from tracekv.testing.journals import environ, recorded
from tracekv.testing.limits import IoNotes
from tracekv.testing.on_ranks import OnRanks, RanksBroke
from tracekv.testing.playing import Engines, References, lacking
from tracekv.testing.verdicts import CellResult, Verdict, judge
from tracekv.testing.wrappers import IoCounts, with_io_counted

#: Callbacks that the engine waits for, whose file I/O is counted.
_WAITED_FOR = (
    "get_num_new_matched_tokens",
    "build_connector_meta",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
)
_references = References()


class Kit:
    """A pair and what it needs.

    Args:
        scheduler: The scheduler class.
        worker: The worker class.
        environment: Variables that are set while a cell runs; ``{folder}`` in a value is an empty folder of the cell's own.
            A name may begin with a glob of cells and a colon: ``*/parked:MY_MODE``.
        variants: Glob of cells -> the pair to play there.
        not_supported: Glob of cells -> why they aren't run.
        tolerance: Most difference of the first token's logits, for connectors that keep KV with less precision.
        tokens_per_block: Of the engine.
        patience_s: So long nothing may be scheduled while requests are left.
        watch: Observe bytes (``TRACEKV_WATCH``).
    """

    def __init__(
        self,
        scheduler: type,
        worker: type,
        *,
        environment: Mapping[str, str] | None = None,
        variants: Mapping[str, tuple[type, type]] | None = None,
        not_supported: Mapping[str, str] | None = None,
        tolerance: float = 1e-3,
        tokens_per_block: int = 16,
        patience_s: float = 10.0,
        watch: bool = True,
    ) -> None:
        self._pair = (scheduler, worker)
        self._environment = dict(environment or {})
        self._variants = dict(variants or {})
        self._not_supported = dict(not_supported or {})
        self._tolerance = tolerance
        self._block = tokens_per_block
        self._patience_s = patience_s
        self._watch = watch
        self._ranks = OnRanks()
        self._refused: dict[tuple[object, ...], str] = {}

    def run(self, cell: Cell) -> CellResult:
        """Play a cell and judge it. Nothing that the connector raises comes out of here."""
        started = time.monotonic()
        result = self._run(cell)
        return replace(result, seconds=round(time.monotonic() - started, 3))

    def close(self) -> None:
        """End the processes of the ranks."""
        self._ranks.close()

    def __enter__(self) -> Kit:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, cell: Cell) -> CellResult:
        if (why := _matching(self._not_supported, cell)) is not None:
            return CellResult(cell.name, cell.what, Verdict.NOT_SUPPORTED, reason=why)
        if missing := lacking(cell):
            reason = f"the reference executor of this version has no {' and no '.join(missing)}"
            return CellResult(cell.name, cell.what, Verdict.COULD_NOT_RUN, reason=reason)
        pair = _matching(self._variants, cell) or self._pair
        cache = (*pair, cell.mode, cell.groups)
        if cell.ranks > 1 and cache in self._refused:  # two processes would be started to hear the same
            return CellResult(cell.name, cell.what, Verdict.NOT_SUPPORTED, reason=self._refused[cache])
        references = [_references.of(cell, move.ask, self._block) for move in cell.moves if isinstance(move, Submit)]
        with tempfile.TemporaryDirectory(prefix="tracekv-cell-", ignore_cleanup_errors=True) as folder:
            settings = self._settings(cell, Path(folder))
            try:
                if cell.ranks > 1:
                    played, run = self._ranks.play(
                        cell, pair, self._block, {**settings, **self._tracing()}, self._patience_s
                    )
                    notes: list[str] = []
                else:
                    counts = IoNotes(IoCounts())
                    with environ(settings), recorded(**self._tracing()) as run:
                        engines = Engines(cell, self._traced(pair, counts.counts), self._block, self._patience_s)
                        played = engines.play()
                    notes = counts.notes()
            except (NotImplementedError, ConnectorError) as error:
                if cell.ranks == 1 and not cell.options:
                    self._refused[cache] = _one_line(error)
                return CellResult(cell.name, cell.what, Verdict.NOT_SUPPORTED, reason=_one_line(error))
            except RanksBroke as error:
                return CellResult(cell.name, cell.what, Verdict.BROKEN, faults=[str(error)])
            except Exception as error:  # an engine that doesn't start is the report's business
                reason = f"the engine doesn't start: {type(error).__name__}: {_one_line(error)}"
                return CellResult(cell.name, cell.what, Verdict.COULD_NOT_RUN, reason=reason)
        result = judge(
            cell, played, references[: len(played.answers)], run, block=self._block, tolerance=self._tolerance
        )
        return replace(result, notes=result.notes + notes)

    def _settings(self, cell: Cell, folder: Path) -> dict[str, str]:
        found = {}
        for name, value in self._environment.items():
            glob, colon, variable = name.rpartition(":")
            if not colon or fnmatch.fnmatchcase(cell.name, glob):
                found[variable] = value.replace("{folder}", str(folder))
        return found

    def _tracing(self) -> dict[str, str]:
        return {"TRACEKV_WATCH": "1"} if self._watch else {}

    def _traced(self, pair: tuple[type, type], counts: IoCounts) -> tuple[Any, Any]:
        counted = []
        for cls in pair:
            names = {callback.method for callback in implemented_callbacks(cls)} & set(_WAITED_FOR)
            counted.append(with_io_counted(cls, counts, *sorted(names)) if names else cls)
        return tracekv.trace(counted[0]), tracekv.trace(counted[1])


def _matching(table: Mapping[str, Any], cell: Cell) -> Any:
    return next((value for glob, value in table.items() if fnmatch.fnmatchcase(cell.name, glob)), None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

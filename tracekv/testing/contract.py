"""What any connector has to keep, as a test class to subclass; no GPU is needed.

.. code-block:: python

   class TestMyConnector(ConnectorContract):
       scheduler, worker = MyScheduler, MyWorker
       environment = {"MY_FOLDER": "{folder}"}            # an empty folder per cell
       not_supported = {"*/ranks2/*": "one rank only"}    # stated, and held to

Each cell of the matrix is a test. One that isn't supported has to be stated in ``not_supported``, and a stated one must not
work: so the class says what the connector does.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from tracekv.testing.kit import Kit
from tracekv.testing.stories import matrix
from tracekv.testing.verdicts import CellResult, Verdict

_NAMES = [cell.name for cell in matrix()]


class ConnectorContract:
    """The default matrix over one connector pair.

    Attributes:
        scheduler, worker: The classes.
        environment: Variables that are set while a cell runs; see :class:`tracekv.testing.kit.Kit`.
        variants: Glob of cells -> the pair to play there.
        not_supported: Glob of cells -> why. They are run all the same.
        tolerance: Most difference of the first token's logits from those of a run without a connector.
        tokens_per_block: Of the engine.
        patience_s: So long nothing may be scheduled while requests are left.
        watch: Observe bytes.
    """

    scheduler: ClassVar[type]
    worker: ClassVar[type]
    environment: ClassVar[Mapping[str, str]] = {}
    variants: ClassVar[Mapping[str, tuple[type, type]]] = {}
    not_supported: ClassVar[Mapping[str, str]] = {}
    tolerance: ClassVar[float] = 1e-3
    tokens_per_block: ClassVar[int] = 16
    patience_s: ClassVar[float] = 10.0
    watch: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls) -> Iterator[Kit]:
        """The kit over this class's pair; its ranks end with the class."""
        mine: Any = cls
        with Kit(
            mine.scheduler,
            mine.worker,
            environment=mine.environment,
            variants=mine.variants,
            tolerance=mine.tolerance,
            tokens_per_block=mine.tokens_per_block,
            patience_s=mine.patience_s,
            watch=mine.watch,
        ) as kit:
            yield kit

    @pytest.mark.parametrize("name", _NAMES)
    def test_cell(self, kit: Kit, name: str) -> None:
        """Tokens equal those of a run without a connector, no rule is broken, nothing is served across tenants."""
        (cell,) = matrix(self.tokens_per_block, name)
        self.check(kit.run(cell))

    def check(self, result: CellResult) -> None:
        """Hold a result against what the class states.

        Raises:
            AssertionError: The cell is broken, or not as ``not_supported`` says.
        """
        stated = next((why for glob, why in self.not_supported.items() if fnmatch.fnmatchcase(result.name, glob)), None)
        told = f"{result.name} ({result.what}): {result.verdict.value}"
        if stated is not None:
            assert result.verdict is not Verdict.OK, f"{told}, though not_supported says: {stated}. Take it out."
            return
        assert result.verdict is not Verdict.BROKEN, "\n  ".join([told, *result.faults])
        assert result.verdict is Verdict.OK, (
            f"{told}: {result.reason}. State it in not_supported if that is as it should be."
        )

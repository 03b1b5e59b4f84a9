"""numpy, for plain arithmetic: imported without the threads of its linear algebra, since who reads journals forks.

OpenBLAS starts one per core when it is loaded. A process that has imported numpy before keeps what it has.
"""

from __future__ import annotations

import os

_THREADS = "OPENBLAS_NUM_THREADS"

_chosen = os.environ.get(_THREADS)
os.environ[_THREADS] = _chosen or "1"
try:
    import numpy as np
    import numpy.typing as npt
finally:
    if _chosen is None:
        del os.environ[_THREADS]
    else:
        os.environ[_THREADS] = _chosen

__all__ = ["np", "npt"]

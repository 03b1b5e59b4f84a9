"""Any class of a package that imports ``tensorrt_llm``, by the name ``tracekv.testing.behind_fake:package.module:Class``.

For processes that import what they are told by name, such as the harness's ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

from tracekv.testing import fake_trtllm


def __getattr__(name: str) -> Any:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fake_trtllm.install()
    return getattr(importlib.import_module(module), attribute)

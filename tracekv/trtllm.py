"""What TensorRT-LLM's ``connector_module`` names: ``Scheduler`` and ``Worker``, the traced form of ``TRACEKV_CONNECTOR``.

.. code-block:: yaml

   kv_connector_config:
     connector_module: tracekv.trtllm
     connector_scheduler_class: Scheduler
     connector_worker_class: Worker

The classes are made when they are asked for (PEP 562), so that settings and the wrapped connector's own errors show at bring-up.
"""

from __future__ import annotations

from tracekv import settings
from tracekv.capture import trace
from tracekv.connectors import resolve

__all__ = ["Scheduler", "Worker"]  # noqa: F822  # made by __getattr__


def __getattr__(name: str) -> type:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    connector = resolve(settings.load().connector)
    return trace(connector.scheduler if name == "Scheduler" else connector.worker)

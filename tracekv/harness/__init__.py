"""A reference executor: drives any connector pair through the life cycle of the runtime, on a real transformer."""

from __future__ import annotations

from tracekv.harness.executor import Executor
from tracekv.harness.models import build_model, load_model, model_identity
from tracekv.harness.requests import Request

__all__ = ["Executor", "Request", "build_model", "load_model", "model_identity"]

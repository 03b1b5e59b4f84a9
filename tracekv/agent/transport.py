"""The OpenTelemetry SDK's OTLP/HTTP transport, without its span objects. Needs the ``agent`` extra.

``OTLPSpanExporter`` reads ``OTEL_EXPORTER_OTLP_*`` and holds the transport; its public method takes SDK spans only. So the serialized
request goes in one step further inside: through its client (1.4x), or the method before that (1.27 and later).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from tracekv.views.model import Attributes

#: The SDK's instrumentation of HTTP clients looks at this key; it isn't to trace our own posts.
_SUPPRESS = getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")


class OtlpTransport:
    """Sends serialized requests.

    Attributes:
        endpoint: URL that they are posted to.

    Raises:
        RuntimeError: The installed exporter has none of the known insides.
    """

    def __init__(self) -> None:
        self._exporter: Any = OTLPSpanExporter()
        self.endpoint: str = self._exporter._endpoint
        if not hasattr(self._exporter, "_client") and not hasattr(self._exporter, "_export"):
            raise RuntimeError(
                "tracekv: this version of opentelemetry-exporter-otlp-proto-http isn't known; "
                "install one between 1.27 and 1.45, or write to TRACEKV_TRACE_FILE"
            )

    def send(self, payload: bytes) -> str | None:
        """Post a request, retries included. None when it was accepted, else why not.

        Raises:
            Exception: Whatever the transport of the installed version raises when nobody answers.
        """
        client = getattr(self._exporter, "_client", None)
        if client is not None:
            result = client.export(payload)
            if result.success:
                return None
            return f"HTTP status {result.status_code}" if result.status_code else type(result.error).__name__
        response = self._exporter._export(payload)
        return None if response.ok else f"HTTP status {response.status_code}"

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Within it, on this thread, posts aren't instrumented, and the exporter's own log lines are silent.

        It logs every failed attempt; one line of ours says so once.
        """
        ident = threading.get_ident()
        token = context.attach(context.set_value(_SUPPRESS, True))

        def is_ours(record: logging.LogRecord) -> bool:
            return record.thread != ident

        logger: logging.Logger = trace_exporter._logger
        logger.addFilter(is_ours)
        try:
            yield
        finally:
            logger.removeFilter(is_ours)
            context.detach(token)

    def close(self) -> None:
        """End retries and connections."""
        self._exporter.shutdown()


def sdk_resource() -> Attributes:
    """The resource that the SDK makes of ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_SERVICE_NAME`` and its detectors.

    ``service.name`` is ``tracekv`` where nothing names it.
    """
    attributes: Attributes = {}
    for key, value in Resource.create().attributes.items():
        if isinstance(value, (str, bool, int, float)):
            attributes[key] = value
        elif isinstance(value, Sequence):
            attributes[key] = [item if isinstance(item, (str, bool, int, float)) else str(item) for item in value]
    if str(attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        attributes[SERVICE_NAME] = "tracekv"
    return attributes

"""The OpenTelemetry SDK's OTLP transports, without its span objects. Needs the ``agent`` extra.

``OTLPSpanExporter`` reads ``OTEL_EXPORTER_OTLP_*`` and holds the transport; its public method takes SDK spans only. So the serialized
request goes in one step further inside. Over HTTP: through its client (1.4x), or the method before that (1.27 and later). Over
gRPC: through its stub.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from tracekv.agent.exporters import otlp_protocol
from tracekv.views.model import Attributes

#: The SDK's instrumentation of HTTP clients looks at this key; it isn't to trace our own posts.
_SUPPRESS = getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")


#: gRPC status codes after which the same request may succeed (the OTLP specification, "Failures").
_TRANSIENT = {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}


class Transport(Protocol):
    """Sends serialized requests, from one thread.

    Attributes:
        endpoint: Where they go.
    """

    endpoint: str

    def send(self, payload: bytes) -> str | None:
        """Send a request, retries included. None when it was accepted, else why not."""

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """Within it, on this thread, what is sent isn't instrumented, and the SDK's own log lines are silent."""

    def close(self) -> None:
        """End retries and connections."""


def transport_from(environ: Mapping[str, str]) -> Transport:
    """The transport for ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` or ``OTEL_EXPORTER_OTLP_PROTOCOL``.

    Raises:
        ImportError: The exporter package for it isn't installed.
    """
    return GrpcTransport() if otlp_protocol(environ) == "grpc" else HttpTransport()


@contextlib.contextmanager
def _attached(logger: logging.Logger) -> Iterator[None]:
    # The SDK logs every failed attempt; one line of ours says so once.
    ident = threading.get_ident()
    token = context.attach(context.set_value(_SUPPRESS, True))

    def is_not_ours(record: logging.LogRecord) -> bool:
        return record.thread != ident

    logger.addFilter(is_not_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_not_ours)
        context.detach(token)


class HttpTransport:
    """Posts serialized requests.

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

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`Transport`."""
        return _attached(trace_exporter._logger)

    def close(self) -> None:
        """End retries and connections."""
        self._exporter.shutdown()


class GrpcTransport:
    """Sends serialized requests over gRPC. Needs ``opentelemetry-exporter-otlp-proto-grpc``.

    Attributes:
        endpoint: Host and port that they go to.
    """

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.grpc import exporter, trace_exporter
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self._logger: logging.Logger = exporter.logger
        self._parse = ExportTraceServiceRequest.FromString
        self._exporter: Any = trace_exporter.OTLPSpanExporter()
        self.endpoint: str = self._exporter._endpoint
        self._timeout_s = float(self._exporter._timeout)
        self._is_closing = threading.Event()

    def send(self, payload: bytes) -> str | None:
        """Send a request, and again after a transient failure, for as long as ``OTEL_EXPORTER_OTLP_TIMEOUT`` allows."""
        # The stub takes a message. Reading it costs about a microsecond a span.
        request = self._parse(payload)
        deadline = monotonic() + self._timeout_s
        pause_s = 0.5
        while True:
            try:
                self._exporter._client.Export(
                    request=request, metadata=self._exporter._headers, timeout=max(0.001, deadline - monotonic())
                )
                return None
            except Exception as error:
                if not hasattr(error, "code"):  # a grpc.RpcError has it, which has no types to be imported with
                    raise
                code = error.code().name
                pause_s *= 2
                if code not in _TRANSIENT or monotonic() + pause_s > deadline or self._is_closing.wait(pause_s):
                    return f"gRPC status {code}"

    def attached(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`Transport`."""
        return _attached(self._logger)

    def close(self) -> None:
        """End retries and the channel, with what is under way on it."""
        self._is_closing.set()
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

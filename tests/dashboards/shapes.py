"""Which keys the files that no test can run may have, as their projects document them.

``None``: any value. A mapping: these keys and no others, ``*`` for names of one's own; ``(required, shape)`` in place of a shape: the
key has to be there. A list of one shape: a list of such.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shape = Any

_SERVER = {"endpoint": None, "tls": None, "cors": None}
_OTLP_EXPORTER = {
    "endpoint": (True, None),
    "tls": {"insecure": None, "insecure_skip_verify": None, "ca_file": None, "cert_file": None, "key_file": None},
    "headers": None,
    "compression": None,
    "timeout": None,
    "sending_queue": None,
    "retry_on_failure": None,
}
_PIPELINE = {"receivers": (True, [None]), "processors": [None], "exporters": (True, [None])}

#: opentelemetry.io/docs/collector/configuration; the READMEs of otlpreceiver, memorylimiterprocessor, batchprocessor, otlpexporter in
#: opentelemetry-collector, and of tailsamplingprocessor, prometheusexporter, healthcheckextension in opentelemetry-collector-contrib.
COLLECTOR: Shape = {
    "receivers": (True, {"otlp": {"protocols": (True, {"grpc": _SERVER, "http": _SERVER})}}),
    "processors": {
        "memory_limiter": {
            "check_interval": (True, None),
            "limit_mib": None,
            "spike_limit_mib": None,
            "limit_percentage": None,
            "spike_limit_percentage": None,
        },
        "tail_sampling": {
            "decision_wait": None,
            "num_traces": None,
            "expected_new_traces_per_sec": None,
            "decision_cache": None,
            "policies": (
                True,
                [
                    {
                        "name": (True, None),
                        "type": (True, None),
                        "status_code": {"status_codes": (True, [None])},
                        "latency": {"threshold_ms": (True, None), "upper_threshold_ms": None},
                        "numeric_attribute": {
                            "key": (True, None),
                            "min_value": None,
                            "max_value": None,
                            "invert_match": None,
                        },
                        "probabilistic": {"sampling_percentage": (True, None), "hash_salt": None},
                        "ottl_condition": {"error_mode": None, "span": [None], "spanevent": [None]},
                    }
                ],
            ),
        },
        "batch": {"timeout": None, "send_batch_size": None, "send_batch_max_size": None},
    },
    "exporters": (
        True,
        {
            "otlp/tempo": _OTLP_EXPORTER,
            "otlp/jaeger": _OTLP_EXPORTER,
            "prometheus": {
                "endpoint": (True, None),
                "namespace": None,
                "const_labels": None,
                "send_timestamps": None,
                "metric_expiration": None,
                "enable_open_metrics": None,
                "resource_to_telemetry_conversion": None,
                "add_metric_suffixes": None,
                "tls": None,
            },
        },
    ),
    "extensions": {"health_check": {"endpoint": None, "path": None, "tls": None, "response_body": None}},
    "service": (
        True,
        {
            "extensions": [None],
            "telemetry": None,
            "pipelines": (True, {"traces": _PIPELINE, "metrics": _PIPELINE, "logs": _PIPELINE}),
        },
    ),
}

#: grafana.com/docs/tempo/latest/configuration, for Tempo 2.8.
TEMPO: Shape = {
    "server": {"http_listen_address": None, "http_listen_port": None, "grpc_listen_port": None, "log_level": None},
    "distributor": (True, {"receivers": (True, {"otlp": {"protocols": {"grpc": _SERVER, "http": _SERVER}}})}),
    "ingester": None,
    "storage": (
        True,
        {
            "trace": (
                True,
                {
                    "backend": (True, None),
                    "wal": (True, {"path": None}),
                    "local": {"path": None},
                    "s3": None,
                    "pool": None,
                },
            )
        },
    ),
    "compactor": {
        "compaction": {"block_retention": None, "compacted_block_retention": None, "compaction_window": None}
    },
    "usage_report": {"reporting_enabled": None},
}

#: grafana.com/docs/grafana/latest/administration/provisioning, "Data sources" and "Dashboards"; the pages of the three data sources.
DATASOURCES: Shape = {
    "apiVersion": (True, None),
    "prune": None,
    "deleteDatasources": None,
    "datasources": (
        True,
        [
            {
                "name": (True, None),
                "type": (True, None),
                "access": None,
                "orgId": None,
                "uid": None,
                "url": None,
                "user": None,
                "database": None,
                "basicAuth": None,
                "isDefault": None,
                "jsonData": {"timeInterval": None, "httpMethod": None, "exemplarTraceIdDestinations": None},
                "version": None,
                "editable": None,
            }
        ],
    ),
}
PROVIDERS: Shape = {
    "apiVersion": (True, None),
    "providers": (
        True,
        [
            {
                "name": (True, None),
                "orgId": None,
                "folder": None,
                "folderUid": None,
                "type": None,
                "disableDeletion": None,
                "updateIntervalSeconds": None,
                "allowUiUpdates": None,
                "options": (True, {"path": (True, None), "foldersFromFilesStructure": None}),
            }
        ],
    ),
}

#: github.com/compose-spec/compose-spec: 05-services.md, build.md, 07-volumes.md, 11-extension.md.
COMPOSE: Shape = {
    "name": None,
    "x-demo-s3-keys": None,
    "services": (
        True,
        {
            "*": {
                "build": {"context": (True, None), "dockerfile": None, "target": None, "args": None},
                "image": None,
                "command": None,
                "depends_on": None,
                "environment": None,
                "healthcheck": {
                    "test": (True, None),
                    "interval": None,
                    "timeout": None,
                    "retries": None,
                    "start_period": None,
                },
                "init": None,
                "ports": [None],
                "restart": None,
                "shm_size": None,
                "tmpfs": [None],
                "volumes": [None],
            }
        },
    ),
    "volumes": {"*": {"driver": None, "external": None, "name": None}},
}


def misfits(told: Any, shape: Shape, where: str = "") -> Iterator[str]:
    """Where a document isn't of a shape."""
    if isinstance(shape, tuple):
        _, shape = shape
    if shape is None:
        return
    if isinstance(shape, list):
        if not isinstance(told, list):
            yield f"{where} is no list"
            return
        for index, item in enumerate(told):
            yield from misfits(item, shape[0], f"{where}[{index}]")
        return
    if not isinstance(told, dict):
        yield f"{where} is no mapping"
        return
    for key, value in told.items():
        inner = shape.get(key, shape.get("*", ...))
        if inner is ...:
            yield f"{where}.{key} isn't documented"
        else:
            yield from misfits(value, inner, f"{where}.{key}")
    for key, inner in shape.items():
        if isinstance(inner, tuple) and inner[0] and key not in told:
            yield f"{where}.{key} is missing"

"""Files for programs that don't run here: their keys are documented ones, and what they say of each other fits together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards import shapes
from tests.dashboards.commands import assert_is_a_command
from tests.support.seaweed import _switches
from tracekv.settings import _all_variables
from tracekv.views.registry import registry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards"
FILES = {
    "collector/collector.yaml": shapes.COLLECTOR,
    "tempo/tempo.yaml": shapes.TEMPO,
    "provisioning/grafana/datasources/tracekv.yaml": shapes.DATASOURCES,
    "provisioning/grafana/dashboards/tracekv.yaml": shapes.PROVIDERS,
    "compose.yaml": shapes.COMPOSE,
}


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


COMPOSE = read("compose.yaml")
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_a_documented_one_and_none_is_missing(name: str) -> None:
    assert list(shapes.misfits(read(name), FILES[name])) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda told: told["service"]["pipelines"]["traces"].pop("exporters"),
            ".service.pipelines.traces.exporters is missing",
        ),
        (lambda told: told["processors"]["batch"].update(time_out="2s"), ".processors.batch.time_out isn't documented"),
        (
            lambda told: told["processors"]["tail_sampling"].update(policies={}),
            ".processors.tail_sampling.policies is no list",
        ),
    ],
)
def test_a_mistake_would_have_been_found(change: Any, said: str) -> None:
    """The control."""
    told = read("collector/collector.yaml")
    change(told)

    assert list(shapes.misfits(told, shapes.COLLECTOR)) == [said]


def test_the_collectors_pipelines_use_what_is_defined_and_all_of_it() -> None:
    told = read("collector/collector.yaml")
    pipelines = told["service"]["pipelines"].values()

    for part in ("receivers", "processors", "exporters"):
        assert {name for pipeline in pipelines for name in pipeline[part]} == told[part].keys()
    assert set(told["service"]["extensions"]) == told["extensions"].keys()
    for pipeline in pipelines:
        assert (pipeline["processors"][0], pipeline["processors"][-1]) == ("memory_limiter", "batch")


def test_the_collector_samples_by_names_that_are_emitted() -> None:
    policies = read("collector/collector.yaml")["processors"]["tail_sampling"]["policies"]

    for policy in policies:
        assert policy.keys() == {"name", "type", policy["type"]}
    keys = {policy["numeric_attribute"]["key"] for policy in policies if policy["type"] == "numeric_attribute"}
    text = str(policies)
    keys |= set(re.findall(r'attributes\["([^"]+)"\]', text))
    assert keys == {"tracekv.time.stall_ns", "tracekv.rules"}
    assert keys <= registry().attributes.keys()
    assert set(re.findall(r'name == "(\w+)"', text)) <= registry().events.keys()


def test_addresses_in_the_configurations_are_services_of_the_compose_file() -> None:
    texts = [(FOLDER / name).read_text() for name in FILES]
    texts.append((FOLDER / "prometheus" / "prometheus.yml").read_text())
    named = {host for text in texts for host in re.findall(r"(?:https?://|endpoint: |targets: \[\")([a-z]+):\d+", text)}

    assert named <= SERVICES.keys()
    assert {"collector", "tempo", "jaeger", "prometheus", "seaweedfs"} <= named


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned_ports_are_on_the_loopback_address_and_mounts_read_only(service: str) -> None:
    told = SERVICES[service]
    image, tag = told["image"].rsplit(":", 1)
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag) or (tag == "local" and "build" in told), image
    for port in told.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    for volume in told.get("volumes", []):
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            assert mode == ["ro"]
            assert (FOLDER / source).exists()
        else:
            assert source in COMPOSE["volumes"]
        assert target.startswith("/")


def test_every_service_is_looked_after() -> None:
    ready = SERVICES["ready"]["healthcheck"]["test"][-1]
    checked = {name for name, told in SERVICES.items() if "healthcheck" in told} | {
        name for name in SERVICES if f"http://{name}:" in ready
    }

    assert checked == SERVICES.keys()
    for told in SERVICES.values():
        waits = told.get("depends_on", {})
        for name in waits:
            assert name in SERVICES
            if isinstance(waits, dict) and waits[name]["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]


def test_there_is_no_secret_but_a_demo_one_that_says_so() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    secrets = re.findall(r"(?i)^\s*\S*(?:secret|password|token|key)\S*:\s*(\S.*)$", text, re.MULTILINE)

    assert [value for value in secrets if "demo" not in value] == []
    assert COMPOSE["x-demo-s3-keys"]["AWS_SECRET_ACCESS_KEY"] == "not-a-secret-demo-only"


def test_nothing_reports_to_its_makers() -> None:
    assert "-master.telemetry=false" in SERVICES["seaweedfs"]["command"]
    assert read("tempo/tempo.yaml")["usage_report"]["reporting_enabled"] is False
    grafana = SERVICES["grafana"]["environment"]
    assert {name for name, value in grafana.items() if name.startswith("GF_ANALYTICS_") and value == "false"} == {
        "GF_ANALYTICS_REPORTING_ENABLED",
        "GF_ANALYTICS_CHECK_FOR_UPDATES",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES",
    }


def test_seaweedfs_is_started_with_the_switches_that_our_tests_start_it_with() -> None:
    ours = {word.partition("=")[0] for word in _switches("/data", {"s3": 1})}
    told = {word.partition("=")[0] for word in SERVICES["seaweedfs"]["command"] if "=" in word}

    assert ours <= told


def test_the_demo_is_started_with_options_and_settings_that_exist() -> None:
    assert_is_a_command([word for word in SERVICES["demo"]["command"] if not word[0].isdigit() and "://" not in word])
    ours = {name for name in SERVICES["demo"]["environment"] if name.startswith("TRACEKV_")}
    assert ours <= set(_all_variables())


def test_the_image_has_all_that_the_package_is_built_from() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    copied = {word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]}

    assert {told["build"]["target"] for told in SERVICES.values() if "build" in told} <= stages
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "tracekv", "backends"} <= copied
    assert "FROM python:3.11-slim" in text
    assert text.index("USER tracekv", text.index("AS demo")) < text.index("ENTRYPOINT")


def test_provisioned_dashboards_are_where_grafana_looks() -> None:
    (provider,) = read("provisioning/grafana/dashboards/tracekv.yaml")["providers"]
    mounts = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])

    assert mounts[provider["options"]["path"]] == "./grafana"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / "grafana" / Path(home).name).exists()

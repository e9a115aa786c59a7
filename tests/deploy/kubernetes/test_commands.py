"""The commands of the chart's containers: options that Sluice knows, and times and ports that fit each other."""

import contextlib
import io
import re
import tomllib
from functools import cache
from typing import Any

import pytest

from sluice.cli.__main__ import main as sluice
from sluice.gateway.lifecycle import HANG_TIMEOUT_S
from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import find_unknown_variables, read_config
from tests.deploy.dockerfile import DOCKERFILES, stages
from tests.deploy.kubernetes.releases import VALUES, container, containers, each_release, needs_helm, release
from tests.paths import DOCS, ROOT
from tests.tools.helm import Manifest, Rendered, render

pytestmark = needs_helm
# Options that `sluice engine` has and `sluice serve` has not.
OF_ENGINES = {"--listen", "--curve-key", "--allowed-clients", "--health-host", "--health-port", "--insecure"}
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sluice.commands"]
METRICS = set(re.findall(r"\bsluice_\w+", (DOCS / "metrics.md").read_text()))


def commands(rendered: Rendered) -> list[tuple[Manifest, Manifest]]:
    """Return the containers that run a command of Sluice, each with its pod's specification."""
    found = [(each, pod) for each, pod in containers(rendered) if each["name"] in ("server", "gateway", "engine")]
    assert found
    return found


def environment(described: Manifest) -> dict[str, str]:
    """Return the variables of a container. A value from a Secret is an address of Redis or a token."""
    secret = "redis://:password@redis.example.com:6379/0"
    sources = {"secretKeyRef": secret, "resourceFieldRef": "4"}
    return {
        each["name"]: each["value"] if "value" in each else sources[next(iter(each["valueFrom"]))]
        for each in described.get("env", ())
    }


@cache
def flags_of(command: str) -> set[str]:
    """Return the flags in a command's help."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        sluice([command, "--help"])
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", shown.getvalue()))


def config_of(described: Manifest) -> Any:
    """Return the configuration that `sluice serve` reads from a container."""
    command, *arguments = described["args"]
    assert command == "serve"
    image = stages(DOCKERFILES[0])[-1].environment()
    return read_config(parse_flags(arguments), image | environment(described))


@each_release
def test_servers_and_gateways_have_options_of_sluice_serve(name: str) -> None:
    for described, _ in commands(release(name)):
        assert find_unknown_variables(environment(described)) == []
        if described["args"][0] == "serve":
            config_of(described)


@each_release
def test_engines_have_options_of_sluice_engine(name: str) -> None:
    """An engine has its own options, and those of `sluice serve` that concern engines."""
    for described, _ in commands(release(name)):
        command, *arguments = described["args"]
        assert command in COMMANDS
        if command == "engine":
            shared = [each for each in arguments if each.partition("=")[0] not in OF_ENGINES]
            assert len(shared) < len(arguments)
            read_config(parse_flags(shared), environment(described))
            assert {each.partition("=")[0] for each in arguments if each.startswith("-")} <= flags_of(command)


def test_flags_of_a_command_are_read_from_its_help() -> None:
    assert {"--http-port", "--max-num-seqs", "--exit-timeout-secs"} <= flags_of("serve")
    assert "--listen" not in flags_of("serve")


def test_scalers_ask_for_metrics_that_are_served() -> None:
    for name in ("all-single", "all-fleet", "fleet"):
        scalers = release(name).find_all("HorizontalPodAutoscaler") | release(name).find_all("ScaledObject")
        asked = set(re.findall(r"\bsluice_\w+", str(scalers)))
        assert asked and asked <= METRICS


@each_release
def test_ports_of_the_command_are_the_container_s(name: str) -> None:
    for described, _ in commands(release(name)):
        ports = {port["name"]: port["containerPort"] for port in described["ports"]}
        if described["args"][0] == "serve":
            config = config_of(described)
            expected = {"http": config.http.port, "grpc": config.grpc.port, "metrics": config.metrics.port}
            assert config.http.host == "0.0.0.0"
        else:
            options = dict(each.split("=", 1) for each in described["args"] if "=" in each)
            listen = options["--listen"].rpartition(":")
            assert listen[0] == "tcp://0.0.0.0"
            expected = {"engine": int(listen[2]), "health": int(options["--health-port"])}
        assert ports == expected


@each_release
def test_a_pod_may_end_its_streams(name: str) -> None:
    for described, pod in commands(release(name)):
        [exit_timeout] = (each for each in described["args"] if each.startswith("--exit-timeout-secs="))
        before_s = int(described["lifecycle"]["preStop"]["exec"]["command"][1])
        longest_s = before_s + float(exit_timeout.partition("=")[2]) + HANG_TIMEOUT_S
        assert pod["terminationGracePeriodSeconds"] > longest_s


def test_the_other_pods_of_a_group_stay_until_its_streams_have_ended() -> None:
    rendered = release("several-nodes")
    engine, worker = container(rendered, "engine"), container(rendered, "worker")
    [exit_timeout] = (each for each in engine["args"] if each.startswith("--exit-timeout-secs="))
    assert int(worker["lifecycle"]["preStop"]["exec"]["command"][1]) >= int(exit_timeout.partition("=")[2])
    assert worker["command"][0] == "ray" and "livenessProbe" not in worker


@each_release
def test_probes_wait_as_long_as_a_model_may_load(name: str) -> None:
    for described, _ in commands(release(name)):
        startup = described["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
        assert startup["httpGet"] == described["readinessProbe"]["httpGet"]


def test_files_of_the_command_are_mounted() -> None:
    for name in VALUES:
        for described, _ in commands(release(name)):
            mounts = tuple(mount["mountPath"] for mount in described["volumeMounts"])
            named = [each.partition("=")[2] for each in described["args"] if "=/etc/" in each]
            assert all(path.startswith(mounts) for path in named), (name, named)


def test_gateways_look_for_engines_where_they_are() -> None:
    rendered = release("fleet")
    [engines] = (each for each in container(rendered, "gateway")["args"] if each.startswith("--engines="))
    namespace, name = engines.removeprefix("--engines=k8s://").split("/")
    service = rendered.find("Service", name)
    assert service["metadata"]["namespace"] == namespace
    assert [port["name"] for port in service["spec"]["ports"]] == ["engine"]
    assert service["spec"]["clusterIP"] == "None"
    assert rendered.find("StatefulSet", "sluice-engine")["spec"]["serviceName"] == name


def test_redis_is_found_where_it_is() -> None:
    bundled = config_of(container(release("fleet"), "gateway"))
    assert bundled.quotas.store == bundled.streams.store == "redis://sluice-redis:6379/0"
    assert "sluice-redis" in release("fleet").find_all("Service")
    variables = environment(container(release("all-fleet"), "gateway"))
    assert variables["SLUICE_CACHE_CONFIG"] == "redis,host=redis.example.com;redis,port=6380;redis,ttl=86400"
    assert variables["SLUICE_KEYS_STORE"] == "redis://:secret@redis.example.com:6380/2"
    assert "SLUICE_CACHE_CONFIG" not in environment(container(release("inference-gateway"), "server"))


def test_parallel_sizes_follow_the_gpus_and_the_nodes() -> None:
    arguments = container(release("several-nodes"), "engine")["args"]
    assert {"--tensor-parallel-size=8", "--pipeline-parallel-size=2"} <= set(arguments)
    alone = container(release("defaults"), "server")["args"]
    assert not any("parallel" in each for each in alone)
    # The models of a repository say it in their configurations.
    assert not any("parallel" in each for each in container(release("triton"), "server")["args"])
    chosen = render(
        {"model": {"name": "a"}, "engine": {"gpu": {"count": 4}, "tensorParallelSize": 2, "pipelineParallelSize": 2}}
    )
    assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=2"} <= set(container(chosen, "server")["args"])


def test_an_engine_on_the_cpu_has_a_thread_for_each_core_that_it_may_use() -> None:
    assert config_of(container(release("all-single"), "server")).scheduling.num_threads == 4
    variables = {each["name"]: each for each in container(release("all-fleet"), "engine")["env"]}
    reference = variables["SLUICE_NUM_THREADS"]["valueFrom"]["resourceFieldRef"]
    assert reference == {"containerName": "engine", "resource": "limits.cpu", "divisor": "1"}
    for name in ("defaults", "gpu"):
        assert "SLUICE_NUM_THREADS" not in environment(container(release(name), "server"))


@pytest.mark.parametrize("name", ["shared-gpu", "time-slicing"])
def test_a_shared_gpu_s_memory_is_limited(name: str) -> None:
    assert "--kv-cache-memory=4G" in container(release(name), "server")["args"]

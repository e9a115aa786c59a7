import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving import instance
from sluice.serving.instance import (
    HostPolicy,
    Placement,
    Resource,
    choose_host_policy,
    parse_cores,
    parse_host_policies,
    place_instances,
)


def places(text: str, num_gpus: int = 0) -> list[Placement]:
    return place_instances(text_format.Parse(f'name: "m" {text}', ModelConfig()), num_gpus)


def names(text: str, num_gpus: int = 0) -> list[tuple[str, int | None]]:
    return [(each.name, each.gpu) for each in places(text, num_gpus)]


def test_instances_are_numbered_within_their_group() -> None:
    text = 'instance_group { name: "g" count: 2 kind: KIND_CPU } instance_group { name: "h" count: 1 kind: KIND_CPU }'
    assert places(text) == [Placement("g_0"), Placement("g_1"), Placement("h_0")]


def test_without_groups_there_is_one_on_the_cpu() -> None:
    assert places("", num_gpus=4) == [Placement("m_0")]


def test_a_group_of_gpus_has_its_count_on_each() -> None:
    text = 'instance_group { name: "g" count: 2 kind: KIND_GPU gpus: [0, 2] }'
    assert names(text, num_gpus=4) == [("g_0", 0), ("g_1", 0), ("g_2", 2), ("g_3", 2)]


def test_a_group_that_names_no_gpus_is_on_all() -> None:
    assert names('instance_group { name: "g" count: 1 kind: KIND_GPU }', num_gpus=2) == [("g_0", 0), ("g_1", 1)]
    assert names('instance_group { name: "g" count: 1 }', num_gpus=2) == [("g_0", 0), ("g_1", 1)]


def test_without_gpus_their_instances_are_on_the_cpu() -> None:
    text = 'instance_group { name: "g" count: 1 kind: KIND_GPU gpus: [0, 1] }'
    assert places(text) == [Placement("g_0", kind="GPU"), Placement("g_1", kind="GPU")]


def test_cpu_instances_beside_gpus_are_spill_over() -> None:
    text = 'instance_group { name: "g" count: 1 kind: KIND_GPU } instance_group { name: "c" count: 1 kind: KIND_CPU }'
    assert [each.is_spillover for each in places(text)] == [False, True]


def test_what_the_group_asks_of_the_limiter_and_the_host() -> None:
    text = """instance_group { name: "g" count: 1 kind: KIND_CPU passive: true host_policy: "p"
        rate_limiter { resources { name: "r" count: 4 global: true } priority: 3 } }"""
    place = Placement("g_0", is_passive=True, host_policy="p", resources=(Resource("r", 4, True),), priority=3)
    assert places(text) == [place]


MINE = sorted(os.sched_getaffinity(0))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's NUMA nodes: node 0 has every core, node 1 only memory."""
    for node, cores in ((0, ",".join(map(str, MINE))), (1, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(instance, "_NODES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("2-2", {2}), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_cores(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,", "-1", "1-", "1-2-3"])
def test_what_are_no_cores(text: str) -> None:
    with pytest.raises(SluiceError, match="host policy setting 'cpu-cores' format"):
        parse_cores(text)


def test_settings_of_one_name_add_up(nodes: Path) -> None:
    policies = parse_host_policies([f"p,cpu-cores={MINE[0]}", "p,numa-node=0", "q,numa-node=0"])
    assert policies == {
        "p": HostPolicy("p", frozenset({MINE[0]}), 0),
        "q": HostPolicy("q", frozenset(MINE), 0),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p", "option format is"),
        ("p,numa-node", "option format is"),
        (",numa-node=1", "option format is"),
        ("p,numa-node=", "option format is"),
        ("p,numa-node=x", "Can't parse 'x' to integer"),
        ("p,colour=red", "has no setting 'colour'"),
        ("p,cpu-cores=99999", "asks for cores 99999, and the server may use"),
        ("p,numa-node=7", "asks for NUMA node 7, which this host has not"),
        ("p,numa-node=1", "no core of NUMA node 1"),
    ],
)
def test_what_is_no_policy(text: str, message: str, nodes: Path) -> None:
    with pytest.raises(SluiceError, match=message) as refused:
        parse_host_policies([text])
    assert refused.value.code is ErrorCode.INVALID


def test_an_instance_keeps_to_what_its_group_names_or_to_its_devices() -> None:
    policies = {name: HostPolicy(name) for name in ("cpu", "gpu_1", "mine")}
    assert choose_host_policy(Placement("i"), policies) == policies["cpu"]
    assert choose_host_policy(Placement("i", "GPU", 1), policies) == policies["gpu_1"]
    assert choose_host_policy(Placement("i", "GPU", 0), policies) is None
    assert choose_host_policy(Placement("i", "GPU", 1, host_policy="mine"), policies) == policies["mine"]
    assert choose_host_policy(Placement("i", host_policy="unknown"), policies) is None


def test_a_thread_and_those_that_it_starts_are_bound_and_no_other() -> None:
    seen: list[set[int]] = []

    def look() -> None:
        seen.append(os.sched_getaffinity(0))

    def run() -> None:
        HostPolicy("p", frozenset({MINE[-1]})).bind()
        look()
        child = threading.Thread(target=look)
        child.start()
        child.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [{MINE[-1]}] * 2
    assert sorted(os.sched_getaffinity(0)) == MINE


def test_another_process_is_bound() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        HostPolicy("p", frozenset({MINE[0]})).bind(process.pid)
        assert os.sched_getaffinity(process.pid) == {MINE[0]}
        HostPolicy("any").bind(process.pid)
        assert os.sched_getaffinity(process.pid) == {MINE[0]}
        process.communicate(b"\n")

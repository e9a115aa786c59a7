"""A fleet on Ray clusters of several nodes, all of this machine. Its engines are stand-ins."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from sluice.engine.fleet.membership.file import read_members
from sluice.engine.fleet.membership.members import Member
from tests.paths import MODELS
from tests.server_process import running_command
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_S = 180.0
NAME = "test-fleet"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A head with a core, and two nodes that tests may remove."""
    if "ray" not in request.config.getoption("markexpr"):
        pytest.skip("Ray takes a while to start: `make test-ray` runs its tests")
    pytest.importorskip("ray", reason="`make test-ray` runs these tests in an environment that has Ray")
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, namespace="sluice", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def fleet(cluster: Any, tmp_path: Path) -> Iterator["Fleet"]:
    running = Fleet(cluster, tmp_path / "engines.yaml")
    yield running
    running.end()


class Fleet:
    """A fleet of stand-ins, as `sluice fleet` drives it."""

    def __init__(self, cluster: Any, members_file: Path) -> None:
        self.cluster = cluster
        self.members_file = members_file
        self._is_up = False

    def up(self, replicas: int, **fields: Any) -> None:
        from sluice.cli.fleet import session

        spec = {"name": NAME, "command": (str(STAND_IN),), "replicas": replicas, "cpus_per_replica": 1.0}
        session.up({**spec, "members_file": str(self.members_file), **fields})
        self._is_up = True

    def end(self, timeout_s: float = 0.0) -> None:
        from sluice.cli.fleet import session

        if self._is_up:
            session.down(NAME, timeout_s)
        self._is_up = False

    def report(self) -> Any:
        from sluice.cli.fleet import session

        return session.report(NAME)

    def scale(self, replicas: int) -> None:
        from sluice.cli.fleet import session

        session.scale(NAME, replicas)

    def members(self) -> dict[str, Member]:
        found = read_members(self.members_file) if self.members_file.is_file() else ()
        return {each.name: each for each in found}

    def wait_members(self, count: int, *without: str) -> dict[str, Member]:
        """Wait until so many members are listed, none of them at an address in `without`."""

        def is_so() -> bool:
            members = self.members()
            return len(members) == count and not {each.address for each in members.values()} & {*without}

        wait_until(is_so, lambda: f"{self.members()} {self.report()}")
        return self.members()


def connect(member: Member) -> socket.socket:
    host, _, port = member.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def answers(connection: socket.socket) -> bool:
    connection.sendall(b"token")
    return connection.recv(16) == b"token"


def engine_pid(fleet: Fleet, name: str) -> int:
    pid: int = fleet.report().engines[name].pid
    return pid


def test_engines_come_and_a_killed_one_comes_again(fleet: Fleet) -> None:
    node = fleet.cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    fleet.up(2)
    members = fleet.wait_members(2)
    assert set(members) == {f"{NAME}-0", f"{NAME}-1"}
    for each in members.values():
        with connect(each) as connection:
            assert answers(connection)

    # An engine's process: its host starts another.
    first = members[f"{NAME}-0"]
    os.kill(engine_pid(fleet, first.name), signal.SIGKILL)
    members = fleet.wait_members(2, first.address)
    with connect(members[first.name]) as connection:
        assert answers(connection)

    # An actor's process: Ray starts another, and its engine has ended with it.
    first = members[f"{NAME}-1"]
    engine = psutil.Process(engine_pid(fleet, first.name))
    actor = engine.parent()
    assert actor is not None
    actor.kill()
    members = fleet.wait_members(2, first.address)
    psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    with connect(members[first.name]) as connection:
        assert answers(connection)
    fleet.end()
    assert fleet.members() == {}
    fleet.up(1)  # in the same place, and not with the size that the last one ended with
    fleet.wait_members(1)
    fleet.end()
    fleet.cluster.remove_node(node)


def test_an_engine_of_a_node_that_is_gone_comes_on_another(fleet: Fleet) -> None:
    import ray

    first = fleet.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    fleet.up(2)  # one on the head, one on this node
    before = fleet.wait_members(2)
    second = fleet.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    fleet.cluster.remove_node(first, allow_graceful=False)
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
    wait_until(lambda: len(fleet.members()) == 2 and fleet.members() != before, lambda: f"{fleet.report()}")
    for each in fleet.members().values():
        with connect(each) as connection:
            assert answers(connection)
    fleet.end()
    fleet.cluster.remove_node(second)


def test_scaling_in_lets_a_stream_end(fleet: Fleet) -> None:
    node = fleet.cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    fleet.up(3)
    members = fleet.wait_members(3)
    with connect(members[f"{NAME}-2"]) as stream:  # the youngest leaves first
        assert answers(stream)
        fleet.scale(2)
        assert set(fleet.wait_members(2)) == {f"{NAME}-0", f"{NAME}-1"}
        wait_until(lambda: fleet.report().engines[f"{NAME}-2"].state == "draining")
        for _ in range(5):
            assert answers(stream)
            sleep(0.2)
        assert f"{NAME}-2" in fleet.report().engines
    wait_until(lambda: f"{NAME}-2" not in fleet.report().engines)
    fleet.end(PATIENCE_S)
    fleet.cluster.remove_node(node)


def test_a_controller_that_is_killed_goes_on_with_the_same_engines(fleet: Fleet) -> None:
    import ray

    from sluice.cli.fleet.controller import find_controller

    fleet.up(1)
    before = fleet.wait_members(1)
    ray.kill(find_controller(NAME), no_restart=False)
    wait_until(lambda: fleet.report().engines.get(f"{NAME}-0") is not None)
    assert fleet.members() == before
    with connect(before[f"{NAME}-0"]) as connection:
        assert answers(connection)


def test_the_command_finds_a_fleet_and_says_where_there_is_none(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    from sluice.cli.fleet import session
    from sluice.cli.fleet.command import command

    address = f"--ray={fleet.cluster.address}"
    assert command(["status", address, "--name=nothing"]) == 1
    assert "there is no fleet called nothing" in capsys.readouterr().err
    fleet.up(1)
    fleet.wait_members(1)
    wait_until(lambda: command(["status", address, f"--name={NAME}"]) == 0)
    shown = capsys.readouterr().out
    assert f"{NAME}-0" in shown and "ready" in shown
    with pytest.raises(session.FleetSessionError, match="runs already"):
        fleet.up(1)


def test_the_stand_in_is_what_runs(fleet: Fleet) -> None:
    fleet.up(1)
    fleet.wait_members(1)
    assert psutil.Process(engine_pid(fleet, f"{NAME}-0")).cmdline()[:2] == [sys.executable, str(STAND_IN)]


def test_a_gateway_answers_by_real_engines_and_goes_on_when_one_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    from sluice.cli.fleet.command import _parse, engine_command

    node = fleet.cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    model = str(MODELS / "rill" / "1")
    options = ("--served-model-name=rill", "--dtype=f32", "--num-threads=1", "--insecure")
    fleet.up(2, command=engine_command(_parse(["up", model, *options])))
    fleet.wait_members(2)
    body = {"model": "rill", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    arguments = (model, "--served-model-name=rill", f"--engines={fleet.members_file}")
    with running_command(tmp_path / "log", *arguments) as server, server.client() as client:
        server.wait_ready()
        for _ in range(4):
            answer = client.post("/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["message"]["content"] == "Hello! How can I help you?"
        os.kill(engine_pid(fleet, f"{NAME}-0"), signal.SIGKILL)
        for _ in range(4):
            answer = client.post("/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["message"]["content"] == "Hello! How can I help you?"
    fleet.end(PATIENCE_S)
    fleet.cluster.remove_node(node)

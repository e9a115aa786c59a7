"""Faults stay isolated: dead workers, vanished clients, models that cannot load. Garbage: tests/fuzz."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP, Library
from tests.triton.held import Hold, write_held_models
from tests.triton.server import copy_models, serving
from tests.waiting import PATIENCE_S, wait_until

INSTANCES = 2
"""Instances of the model `held`."""
ROW = np.ones((1, 4), np.float32)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose workers may be killed and whose `held` may be unloaded, if it serves again afterwards."""
    folder = tmp_path_factory.mktemp("fragile")
    models = copy_models(folder / "models", ["add_sub", "bad_load"])
    write_held_models(models)
    loads = ("--load-model=held", "--load-model=add_sub")
    with serving(models, folder / "log", "--model-control-mode=explicit", *loads) as server:
        yield server


@pytest.fixture
def holds(tmp_path: Path) -> Iterator[list[Hold]]:
    """More requests than there are instances, so that some wait."""
    holds = [Hold(tmp_path / str(number)) for number in range(3 * INSTANCES)]
    yield holds
    for hold in holds:
        hold.release()


@pytest.fixture
def ask_held(library: Library, fragile: ServerProcess) -> Iterator[Callable[[Hold], Future[bytes]]]:
    """Sends a request from a thread and a client of its own."""

    def ask(hold: Hold) -> bytes:
        with library.client(fragile) as client:
            word: bytes = client.infer("held", hold.inputs(library)).as_numpy("SAID")[0]
        return word

    with ThreadPoolExecutor(3 * INSTANCES) as threads:
        yield lambda hold: threads.submit(ask, hold)


def check_add_sub(library: Library, server: ServerProcess) -> None:
    with library.client(server) as client:
        result = client.infer("add_sub", [library.tensor(name, ROW) for name in ("INPUT0", "INPUT1")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ROW + ROW)


def started(holds: list[Hold]) -> list[Hold]:
    """Return the requests that have an instance, once every instance has one."""
    wait_until(lambda: sum(hold.is_started for hold in holds) == INSTANCES, "every instance is busy")
    return [hold for hold in holds if hold.is_started]


def test_a_killed_worker_fails_its_requests_alone(
    library: Library, fragile: ServerProcess, holds: list[Hold], ask_held: Callable[[Hold], Future[bytes]]
) -> None:
    answers = {hold: ask_held(hold) for hold in holds}
    doomed = started(holds)[0]
    os.kill(doomed.wait_started(), signal.SIGKILL)
    with pytest.raises(InferenceServerException, match="is not healthy"):
        answers.pop(doomed).result(PATIENCE_S)
    check_add_sub(library, fragile)
    for hold in answers:
        hold.release()
    assert [answer.result(PATIENCE_S) for answer in answers.values()] == [b"released"] * (len(holds) - 1)


def test_unload_loses_nothing_that_was_accepted(
    library: Library, fragile: ServerProcess, holds: list[Hold], ask_held: Callable[[Hold], Future[bytes]]
) -> None:
    answers = [ask_held(hold) for hold in holds]
    started(holds)
    with library.client(fragile) as client:
        wait_until(lambda: _pending(fragile, "held") == len(holds) - INSTANCES, "the others wait")
        client.unload_model("held")
        with pytest.raises(InferenceServerException, match="has no available versions"):
            client.infer("held", holds[0].inputs(library))
        check_add_sub(library, fragile)
        for hold in holds:
            hold.release()
        assert [answer.result(PATIENCE_S) for answer in answers] == [b"released"] * len(holds)
        client.load_model("held")
        assert client.infer("held", holds[0].inputs(library)).as_numpy("SAID")[0] == b"released"


def _pending(server: ServerProcess, model: str) -> int:
    lines = httpx.get(server.metrics_url).text.splitlines()
    series = f'nv_inference_pending_request_count{{model="{model}"'
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series)))


# --- clients that vanish ---


def post(address: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a whole request, and return its connection."""
    split = urlsplit(address)
    connection = socket.create_connection((split.hostname, split.port), timeout=PATIENCE_S)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_a_client_that_leaves_while_it_waits(triton: ServerProcess, hold: Hold) -> None:
    tensor = {"name": "PATH", "shape": [1], "datatype": "BYTES", "data": [str(hold.path)]}
    connection = post(triton.base_url, "/v2/models/held/infer", {"inputs": [tensor]})
    hold.wait_started()
    connection.close()
    hold.wait_cancelled()


def test_a_client_that_leaves_its_stream(triton: ServerProcess, hold: Hold) -> None:
    connection = post(triton.base_url, "/v2/models/held_stream/generate_stream", {"PATH": str(hold.path)})
    with connection:
        received = b""
        while b'"SAID":"started"' not in received:
            received += connection.recv(4096)
    hold.wait_cancelled()


def test_a_grpc_connection_that_is_lost(triton: ServerProcess, hold: Hold) -> None:
    def ignore(result: Any, error: InferenceServerException | None) -> None:
        pass

    with GRPC.client(triton) as client:
        client.async_infer("held", hold.inputs(GRPC), callback=ignore)
        hold.wait_started()
    hold.wait_cancelled()


# --- large tensors ---


def test_large_tensors(client: Any, library: Library) -> None:
    """A request and an answer of 100 MB each."""
    values = np.arange(25_000_000, dtype=np.float32).reshape(5000, 5000)
    result = client.infer("identity", [library.tensor("INPUT0", values)])
    assert np.array_equal(result.as_numpy("OUTPUT0"), values)


# --- what cannot load, and the end ---


def test_a_failed_load_says_why(library: Library, fragile: ServerProcess) -> None:
    """The server is not ready from then on, even after the model is unloaded, as with Triton."""
    with library.client(fragile) as client:
        with pytest.raises(InferenceServerException, match=r"load failed for model 'bad_load'.*cannot start"):
            client.load_model("bad_load")
        assert not client.is_model_ready("bad_load")
        assert (client.is_server_live(), client.is_server_ready()) == (True, False)
        answer = library.ask(client, "get_model_repository_index")
    models = answer if library is HTTP else answer["models"]
    [entry] = [model for model in models if model["name"] == "bad_load"]
    assert entry["state"] == "UNAVAILABLE"
    assert "cannot start" in entry["reason"]
    check_add_sub(library, fragile)


def test_nothing_outlives_a_killed_server(tmp_path: Path) -> None:
    write_held_models(tmp_path / "models")
    server_ended = pytest.raises(AssertionError)  # it is killed, so its exit status is no success
    with server_ended, serving(tmp_path / "models", tmp_path / "log") as server:
        workers = psutil.Process(server.pid).children(recursive=True)
        server.process.kill()
        _, alive = psutil.wait_procs(workers, PATIENCE_S)
    assert len(workers) >= 2 * INSTANCES
    assert not alive

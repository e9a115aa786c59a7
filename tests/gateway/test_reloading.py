"""Models that are loaded and unloaded leave no objects behind in the gateway."""

import asyncio
import gc
import multiprocessing
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import onnx
import psutil
import pytest
import uvloop
from prometheus_client import generate_latest

from sluice.gateway.assembly import make_application, make_server
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.serving import RepositoryOptions
from sluice.gateway.server import Server
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.settings import ControlMode
from tests import paths
from tests.serving.backends.onnxruntime.parts import one_op
from tests.serving.repository.small_models import write_python
from tests.waiting import PATIENCE_S, until

WARM_UP = 8
"""Rounds after which libraries have cached everything that they keep."""
ROUNDS = {"onnxruntime": 20, "openvino": 20, "tensorflow": 20, "ensemble": 20, "python": 10}
BLOCKS_A_ROUND = 20
NUM_LOOKS = 10
PAUSE_S = 0.5
SAVED_MODEL = paths.DATA / "tensorflow" / "dense" / "model.savedmodel"
ENSEMBLE = """
platform: "ensemble"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
ensemble_scheduling { step [ { model_name: "onnxruntime" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model of each backend, under the backend's name."""
    root = tmp_path_factory.mktemp("models")
    for name in ("onnxruntime", "openvino"):
        put(root / name, f'backend: "{name}" default_model_filename: "model.onnx"')
        onnx.save(one_op("Neg"), root / name / "1" / "model.onnx")
    put(root / "tensorflow", 'backend: "tensorflow"')
    shutil.copytree(SAVED_MODEL, root / "tensorflow" / "1" / SAVED_MODEL.name)
    put(root / "ensemble", ENSEMBLE)
    write_python(root / "python", ("x", "FP32 [2]"), ("y", "FP32 [2]"), "-given", 8)
    return root


def put(folder: Path, config: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)


@asynccontextmanager
async def serving(models: Path) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    config = ServeConfig(repository=RepositoryOptions(paths=(str(models),), control_mode=ControlMode.EXPLICIT))
    server = make_server(config)
    await server.accounts.calls.access.ring.start()
    await server.plane.repository.start()
    server.plane.health.begin_serving()
    listener = listen("127.0.0.1", 0, "--http-port")
    http = HttpServer(make_application(server, config), listener)
    http.start()
    try:
        async with httpx.AsyncClient(base_url=listener_url(listener), timeout=PATIENCE_S) as client:
            yield server, client
    finally:
        await http.stop(PATIENCE_S)
        await server.rooms.close()


async def reload(server: Server, client: httpx.AsyncClient, name: str) -> None:
    (await client.post(f"/v2/repository/models/{name}/load")).raise_for_status()
    (await client.get(f"/v2/models/{name}/stats")).raise_for_status()
    generate_latest(server.metrics.registry)
    body = {"parameters": {"unload_dependents": True}}
    (await client.post(f"/v2/repository/models/{name}/unload", json=body)).raise_for_status()
    await until(lambda: all(row.state in (None, ModelState.UNAVAILABLE) for row in server.plane.repository.index()))


async def settle() -> None:
    """Threads of unloaded models end by themselves."""
    await until(lambda: not any(each.name.endswith("_0_0") for each in threading.enumerate()))
    gc.collect()


def objects() -> Counter[str]:
    """Count the garbage collector's objects by kind."""
    kinds: Counter[str] = Counter()
    for each in gc.get_objects():
        kinds[f"{type(each).__module__}.{type(each).__name__}"] += 1
    return kinds


def grown(before: Counter[str], num_rounds: int) -> dict[str, int]:
    """Return the kinds of objects that grow by at least one in two rounds."""
    return {kind: number for kind, number in (objects() - before).items() if number >= num_rounds // 2}


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(check: Coroutine[None, None, None]) -> None:
    """Run on uvloop, like the server: asyncio's own loop keeps cancelled timers for long."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check)


@pytest.fixture(scope="module")
def own_process() -> Iterator[ProcessPoolExecutor]:
    """A process of this module's own: what other tests have left running allocates too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("name", ROUNDS)
def test_a_model_that_comes_and_goes_leaves_nothing(models: Path, own_process: ProcessPoolExecutor, name: str) -> None:
    assert own_process.submit(reload_often, models, name).result() == {}


def reload_often(models: Path, name: str) -> dict[str, int]:
    """Reload a model again and again, and return by how much each kind of object has grown for good."""
    growing: dict[str, int] = {}

    async def check() -> None:
        async with serving(models) as (server, client):
            for _ in range(WARM_UP):
                await reload(server, client, name)
            await settle()
            files, others = num_files(), set(psutil.Process().children())
            growing.update(await find_growing(server, client, name))
            if growing:  # a leak grows every time; what a library allocates for itself does so once
                again = await find_growing(server, client, name)
                for kind in growing.keys() - again.keys():
                    del growing[kind]
            await until(lambda: num_files() <= files and set(psutil.Process().children()) <= others)

    run(check())
    return growing


async def find_growing(server: Server, client: httpx.AsyncClient, name: str) -> dict[str, int]:
    """Reload a model many times, and return the kinds of objects that have grown, and `memory` where that has.

    What a thread or a timer lets go of a moment later has not grown: the count is repeated until nothing has.
    """
    before, blocks = objects(), sys.getallocatedblocks()
    for _ in range(ROUNDS[name]):
        await reload(server, client, name)
    for _ in range(NUM_LOOKS):
        await settle()
        growing = grown(before, ROUNDS[name])
        more_blocks = sys.getallocatedblocks() - blocks
        if more_blocks >= BLOCKS_A_ROUND * ROUNDS[name]:  # what the garbage collector does not know, too
            growing["memory"] = more_blocks
        if not growing:
            break
        await asyncio.sleep(PAUSE_S)
    return growing


def test_names_that_there_are_not_are_not_remembered(models: Path) -> None:
    num_names = 20

    async def check() -> None:
        async with serving(models) as (_, client):
            before = objects()
            for number in range(num_names):
                assert (await client.post(f"/v2/repository/models/nope{number}/load")).status_code >= 400
                assert (await client.post(f"/v2/repository/models/nope{number}/unload")).status_code == 200
            gc.collect()
            assert not {kind for kind in grown(before, num_names) if kind.startswith("pipelines.")}

    run(check())

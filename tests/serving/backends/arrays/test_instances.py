"""Instances: host policies, and what remains of a model that is unloaded."""

import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.priority import NICENESS
from sluice.serving.backends.arrays.backend import ArrayBackend
from sluice.serving.backends.arrays.session import ArrayRun, ArraySession, Signature, TensorSignature
from sluice.serving.instance import HostPolicy, Placement
from sluice.serving.model import Model, infer_one
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Array
from tests.serving.backends.builders import request
from tests.serving.backends.onnxruntime import parts as onnx_parts
from tests.serving.backends.openvino import parts as openvino_parts
from tests.waiting import until


async def load_onnx(folder: Path) -> Model:
    threads = 'parameters { key: "intra_op_thread_count" value { string_value: "5" } }'
    return await onnx_parts.load(folder, onnx_parts.one_op("Neg"), f"{threads} {TWO}")


async def load_openvino(folder: Path) -> Model:
    return await openvino_parts.load(folder, openvino_parts.doubled(), TWO)


TWO = "instance_group { count: 2 kind: KIND_CPU }"


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("load", [load_onnx, load_openvino])
async def test_threads_that_compute_give_way_to_the_gateway(
    tmp_path: Path, load: Callable[[Path], Awaitable[Model]]
) -> None:
    """Else a model that encodes documents would keep `/health` and streams waiting."""
    before = native_threads()
    model = await load(tmp_path)
    await infer_one(model, request(x=np.ones((1, 2), np.float32)))
    instances = {each.native_id for each in threading.enumerate() if each.name.startswith("m_")}
    made = {os.getpriority(os.PRIO_PROCESS, thread or 0) for thread in instances | native_threads() - before}
    assert made == {min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS, 19)}
    await model.close()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("load", [load_onnx, load_openvino])
async def test_an_unloaded_model_leaves_no_thread_behind(
    tmp_path: Path, load: Callable[[Path], Awaitable[Model]]
) -> None:
    """The library's threads end with its session at once, without the garbage collector."""
    await (await load(tmp_path)).unload()
    await until(lambda: not instance_threads())
    before = num_native_threads()
    model = await load(tmp_path)
    for _ in range(2):
        await infer_one(model, request(x=np.ones((1, 2), np.float32)))
    assert num_native_threads() > before
    assert instance_threads()
    await model.unload()
    await until(lambda: num_native_threads() <= before and not instance_threads())


def num_native_threads() -> int:
    """Return the number of threads that Python did not start."""
    return psutil.Process().num_threads() - threading.active_count()


def native_threads() -> set[int]:
    """Return the ids of the threads that Python did not start."""
    return {each.id for each in psutil.Process().threads()} - {each.native_id for each in threading.enumerate()}


def instance_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("m_")]


class CoresRun(ArrayRun):
    """Returns the cores that its thread may run on, as bits."""

    def execute(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        return [np.array([[sum(1 << core for core in os.sched_getaffinity(0))]], np.int64)]

    def stop(self) -> None: ...


class CoresSession(ArraySession):
    library = "none"
    signature = Signature(
        {"x": TensorSignature("x", DATA_TYPES["INT64"], (-1, 1))},
        {},
        {"y": TensorSignature("y", DATA_TYPES["INT64"], (-1, 1))},
    )

    def __init__(self) -> None:
        self.opened_on = os.sched_getaffinity(0)
        self.num_closed = 0

    def open_run(self) -> CoresRun:
        return CoresRun()

    def convert_error(self, error: Exception) -> SluiceError:
        raise error

    def close(self) -> None:
        self.num_closed += 1


class CoresBackend(ArrayBackend):
    name = "cores"

    def __init__(self) -> None:
        self.sessions: list[CoresSession] = []

    def read_signature(self, source: ModelSource) -> Signature:
        return CoresSession.signature

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> CoresSession:
        self.sessions.append(session := CoresSession())
        return session


CONFIG = """name: "m" backend: "cores" max_batch_size: 4
    input { name: "x" data_type: TYPE_INT64 dims: [1] } output { name: "y" data_type: TYPE_INT64 dims: [1] }
    instance_group { name: "g" count: 2 kind: KIND_CPU host_policy: "one" }"""


async def load_cores(backend: CoresBackend, policies: dict[str, HostPolicy]) -> Model:
    config: ModelConfig = text_format.Parse(CONFIG, ModelConfig())
    context = replace(onnx_parts.context(), host_policies=policies)
    return await backend.load(ModelSource(Path("unread"), 1, config), context)


async def cores_of_a_run(model: Model) -> int:
    response = await infer_one(model, request(x=np.zeros((1, 1), np.int64)))
    return int(response.outputs[0].array.item())


async def test_instances_keep_to_their_host_policy() -> None:
    core = max(os.sched_getaffinity(0))
    backend = CoresBackend()
    model = await load_cores(backend, {"one": HostPolicy("one", frozenset({core}))})
    assert [session.opened_on for session in backend.sessions] == [{core}]
    assert [await cores_of_a_run(model) for _ in range(2)] == [1 << core] * 2
    await model.close()


async def test_without_a_policy_of_that_name_instances_are_not_bound() -> None:
    backend = CoresBackend()
    model = await load_cores(backend, {})
    assert await cores_of_a_run(model) == sum(1 << core for core in os.sched_getaffinity(0))
    await model.close()


async def test_a_session_is_closed_once_when_its_last_instance_is() -> None:
    backend = CoresBackend()
    model = await load_cores(backend, {})
    (session,) = backend.sessions
    await model.close()
    await until(lambda: session.num_closed > 0)
    await model.close()
    assert session.num_closed == 1

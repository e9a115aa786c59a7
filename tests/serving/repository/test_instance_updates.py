"""A change of `instance_group` alone changes the instances of a model that goes on serving.

What becomes of requests and sequences meanwhile: tests/serving/batching/test_instance_changes.py.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from sluice.errors import SluiceError
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor
from tests.serving.repository.parts import context_for
from tests.serving.repository.small_models import write_onnx

pytestmark = pytest.mark.slow
SCRIPT = """
import os
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(args["model_repository"]).parent.parent
        if (self.folder / "fail").exists():
            raise ValueError("no more")
        (self.folder / f"started_{os.getpid()}").touch()

    def execute(self, requests):
        made = np.array([[os.getpid()]], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("pid", made)]) for _ in requests]

    def finalize(self):
        (self.folder / f"ended_{os.getpid()}").touch()
"""
PYTHON = """
backend: "python"
max_batch_size: 1
input [ { name: "x" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "pid" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
ONNX = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def groups(count: int, kind: str = "KIND_CPU") -> str:
    return f"instance_group [ {{ count: {count} kind: {kind} }} ]\n"


async def load(repository: ModelRepository, root: Path, config: str) -> Model:
    """Write the model's configuration, and return the model that serves after a load."""
    (root / "m" / "config.pbtxt").write_text(config)
    await repository.load("m")
    return repository.find("m")


@pytest.fixture
def scripted(root: Path) -> Path:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.py").write_text(SCRIPT)
    return root


@pytest.fixture
async def repository(root: Path) -> AsyncIterator[ModelRepository]:
    repository = ModelRepository((root,), ControlMode.EXPLICIT, context_for)
    await repository.start()
    yield repository
    await repository.close()


def request() -> InferRequest:
    return InferRequest({"x": Tensor.of("x", np.array([[1]], np.int64))})


async def ask(model: Model) -> int:
    response = await infer_one(model, request())
    return int(response.outputs[0].array.item())


def pids(root: Path, what: str) -> set[int]:
    return {int(each.name.removeprefix(what)) for each in root.parent.glob(f"{what}*")}


async def test_a_change_of_instance_group_alone_keeps_model_statistics_and_instances(
    scripted: Path, repository: ModelRepository
) -> None:
    model = await load(repository, scripted, PYTHON + groups(1))
    first = await ask(model)

    assert await load(repository, scripted, PYTHON + groups(2)) is model
    assert model.config.instance_group[0].count == 2
    assert len(pids(scripted, "started_")) == 2
    assert model.statistics.inference_count == 1

    await load(repository, scripted, PYTHON + groups(1))
    assert pids(scripted, "ended_") == pids(scripted, "started_") - {first}
    assert await ask(model) == first


async def test_an_instance_that_fails_to_start_fails_the_load_and_leaves_the_model_as_it_was(
    scripted: Path, repository: ModelRepository
) -> None:
    model = await load(repository, scripted, PYTHON + groups(1))
    (scripted.parent / "fail").touch()
    with pytest.raises(SluiceError, match="no more"):
        await load(repository, scripted, PYTHON + groups(2))
    assert repository.find("m") is model
    assert model.config.instance_group[0].count == 1


async def test_a_change_of_more_than_instance_group_loads_anew(scripted: Path, repository: ModelRepository) -> None:
    model = await load(repository, scripted, PYTHON + groups(1))
    again = await load(repository, scripted, PYTHON + groups(2) + "dynamic_batching {}")
    assert again is not model
    os.utime(scripted / "m" / "1" / "model.py")
    assert await load(repository, scripted, PYTHON + groups(1) + "dynamic_batching {}") is not again


async def test_onnx_models_get_and_lose_instances_while_they_answer(root: Path, repository: ModelRepository) -> None:
    write_onnx(root / "m" / "1" / "model.onnx", ["x"], "y", 2)
    model = await load(repository, root, ONNX + groups(1))
    is_over = asyncio.Event()

    async def repeat() -> None:
        while not is_over.is_set():
            await infer_one(model, request())

    clients = [asyncio.create_task(repeat()) for _ in range(4)]
    for count in (3, 1, 2):
        assert await load(repository, root, ONNX + groups(count)) is model
        assert model.config.instance_group[0].count == count
    is_over.set()
    await asyncio.gather(*clients)

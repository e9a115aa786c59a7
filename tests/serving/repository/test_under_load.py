"""Versions come, change and go under constant load: every request is answered, by a version that served."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import infer_one
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor
from tests.serving.backends.onnxruntime.parts import graph, value
from tests.serving.repository.parts import context_for, rows
from tests.waiting import until

pytestmark = pytest.mark.slow

NUM_CLIENTS = 16
CONFIG = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 500 }
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
version_policy { all {} }
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "m" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } },
  { model_name: "m" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
] }
"""
"""`y = x + 2 * stamp`."""
PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy() + {stamp})]
            )
            for each in requests
        ]
"""


def _write_onnx(folder: Path, stamp: int) -> None:
    """`y = x + stamp`."""
    added = numpy_helper.from_array(np.array([stamp], np.float32), "stamp")
    node = helper.make_node("Add", ["x", "stamp"], ["y"])
    onnx.save(graph([node], [value("x", ["n", 1])], [value("y", ["n", 1])], [added]), folder / "model.onnx")


def _write_python(folder: Path, stamp: int) -> None:
    (folder / "model.py").write_text(PYTHON_MODEL.format(stamp=stamp))


WRITERS: dict[str, Callable[[Path, int], None]] = {"onnxruntime": _write_onnx, "python": _write_python}


class Versions:
    """A model's versions on disk."""

    def __init__(self, root: Path, backend: str, config: str = CONFIG) -> None:
        self.folder = root / "m"
        self._write = WRITERS[backend]
        self._trash = itertools.count()
        self.folder.mkdir()
        (self.folder / "config.pbtxt").write_text(f'backend: "{backend}"\n{config}')

    def put(self, version: int, stamp: int) -> None:
        """Whole at once, as a careful operator does it."""
        staged = self.folder.parent / f".staged-{version}-{stamp}"
        staged.mkdir()
        self._write(staged, stamp)
        self.remove(version)
        staged.rename(self.folder / str(version))

    def remove(self, version: int) -> None:
        if (self.folder / str(version)).exists():
            (self.folder / str(version)).rename(self.folder.parent / f".trash-{next(self._trash)}")


class Load:
    """Clients that ask for the newest version again and again, and one that asks for version 1."""

    def __init__(self, repository: ModelRepository, name: str = "m") -> None:
        self._repository = repository
        self._name = name
        self._is_over = False
        self.answers: Counter[int] = Counter()
        self.failures: list[SluiceError] = []
        self.failures_of_version_1: list[SluiceError] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client(-1) for _ in range(NUM_CLIENTS)), self._client(1))

    async def _client(self, version: int) -> None:
        while not self._is_over:
            try:
                response = await infer_one(self._repository.find(self._name, version), _request())
            except SluiceError as error:
                (self.failures if version == -1 else self.failures_of_version_1).append(error)
                await asyncio.sleep(0.005)
            else:
                self.answers[int(response.outputs[0].array[0, 0])] += 1

    async def answered(self, num: int = 40) -> None:
        """Until so many more have been answered."""
        goal = self.answers.total() + num
        await until(lambda: self.answers.total() >= goal or bool(self.failures))

    def end(self) -> None:
        self._is_over = True


def _request() -> InferRequest:
    return InferRequest({"x": Tensor.of("x", np.zeros((1, 1), np.float32))})


def _serving(repository: ModelRepository, *versions: int) -> Callable[[], bool]:
    return lambda: [model.version for model in repository.models()] == list(versions)


async def _change_everything(
    repository: ModelRepository, versions: Versions, load: Load, take_up: Callable[[], Awaitable[None]]
) -> None:
    async def then(*serving: int) -> None:
        await take_up()
        await until(_serving(repository, *serving))
        await load.answered()

    await load.answered()
    versions.put(2, 20)
    await then(1, 2)
    versions.put(3, 30)
    await then(1, 2, 3)
    for stamp in (31, 32, 33):  # the newest is replaced in place
        before = repository.find("m", 3)
        versions.put(3, stamp)
        await take_up()
        await until(lambda before=before: repository.find("m", 3) is not before)
        await load.answered()
    versions.remove(3)
    await then(1, 2)
    assert not load.failures_of_version_1
    versions.put(4, 40)
    versions.remove(1)
    await then(2, 4)
    (versions.folder / "config.pbtxt").write_text((versions.folder / "config.pbtxt").read_text() + "\n# touched")
    await take_up()
    await load.answered()


@pytest.mark.parametrize("mode", [ControlMode.EXPLICIT, pytest.param(ControlMode.POLL, marks=pytest.mark.long)])
@pytest.mark.parametrize("backend", ["onnxruntime", pytest.param("python", marks=pytest.mark.long)])
async def test_no_request_fails_while_versions_change(root: Path, backend: str, mode: ControlMode) -> None:
    versions = Versions(root, backend)
    versions.put(1, 10)
    repository = ModelRepository([root], mode, context_for, poll_s=0.05)
    assert await repository.start(["m"]) == {}
    load = Load(repository)
    running = asyncio.ensure_future(load.run())

    async def take_up() -> None:
        if mode is ControlMode.EXPLICIT:
            await repository.load("m")

    try:
        await _change_everything(repository, versions, load, take_up)
    finally:
        load.end()
        await running
    assert not load.failures, load.failures[0].message
    assert {10, 20, 30, 31, 32, 33, 40} <= load.answers.keys()
    assert {error.code for error in load.failures_of_version_1} <= {ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE}
    await until(lambda: all(row[0] is not ModelState.UNLOADING for row in rows(repository).values()))
    await repository.close()


async def test_no_request_to_an_ensemble_fails_while_its_member_changes(root: Path) -> None:
    versions = Versions(root, "onnxruntime", CONFIG.replace("all {}", "latest { num_versions: 1 }"))
    versions.put(1, 10)
    (root / "chain" / "1").mkdir(parents=True)
    (root / "chain" / "config.pbtxt").write_text(ENSEMBLE)
    repository = ModelRepository([root], ControlMode.EXPLICIT, context_for)
    assert await repository.start(["chain"]) == {}
    load = Load(repository, "chain")
    running = asyncio.ensure_future(load.run())
    try:
        for version, stamp in ((1, 11), (2, 20), (2, 21), (3, 30)):
            await load.answered()
            versions.put(version, stamp)
            await repository.load("m")
        versions.remove(3)
        await repository.load("m")
        await load.answered()
    finally:
        load.end()
        await running
    failures = load.failures + load.failures_of_version_1
    assert not failures, failures[0].message
    # Both steps of a request run on the version that it found when it began.
    assert load.answers.keys() == {20, 22, 40, 42, 60}
    await repository.close()

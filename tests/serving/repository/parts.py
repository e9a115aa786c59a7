"""A backend whose models answer with their version, and what a test needs to watch and steer its loads."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import Backend, BackendContext, ModelLookup
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.job import InferJob
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.tensors.tensor import Tensor
from tests import paths

DATA = paths.DATA / "repository"

CONFIG = """
backend: "stamp"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


class StampModel(Model):
    """Answers with the number in its model file, when `gate` is open."""

    def __init__(self, source: ModelSource, backend: "StampBackend") -> None:
        super().__init__(source.config, build_spec(source.config, source.version))
        self.source = source
        self.stamp = int(source.model_file.read_text() or 0)
        self.gate = asyncio.Event()
        self.gate.set()
        self._backend = backend
        self._waiting: set[asyncio.Task[None]] = set()
        self.is_closed = False
        backend.open_models.add(self)
        backend.made.append(self)

    def _start(self, job: InferJob) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(job))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer(self, job: InferJob) -> None:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            job.fail(SluiceError(ErrorCode.UNAVAILABLE, "the model is closed"))
            raise
        job.respond(InferResponse([Tensor.of("OUT", np.array([self.stamp], np.int32))]))

    async def close(self) -> None:
        for task in self._waiting:
            task.cancel()
        self.is_closed = True
        self._backend.open_models.discard(self)


class StampBackend(Backend):
    """A model file holds a number; `fail` in place of one fails the load, `hang` waits for `release`."""

    name = "stamp"
    default_model_filename = "stamp.txt"

    def __init__(self) -> None:
        self.open_models: set[StampModel] = set()
        self.made: list[StampModel] = []
        self.loads: list[tuple[str, int]] = []
        self.release = asyncio.Event()
        self.is_hanging = asyncio.Event()
        self.num_loading = 0
        self.most_loading = 0
        self.completes: Callable[[ModelConfig], None] = lambda config: None

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = ModelConfig()
        config.CopyFrom(source.config)
        self.completes(config)
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        self.loads.append((source.name, source.version))
        self.num_loading += 1
        self.most_loading = max(self.most_loading, self.num_loading)
        try:
            text = source.model_file.read_text()
            await asyncio.sleep(0)
            if text == "hang":
                self.is_hanging.set()
                await self.release.wait()
                source.model_file.write_text("0")
            if text == "fail":
                raise SluiceError(ErrorCode.INTERNAL, "RuntimeError: cannot start")
            if text == "raise":
                raise KeyError("what no backend should raise")
            return StampModel(source, self)
        finally:
            self.num_loading -= 1


class JoinModel(Model):
    """An ensemble that passes its request to its first member."""

    def __init__(self, source: ModelSource, member: Model) -> None:
        super().__init__(source.config, build_spec(source.config, source.version))
        self.member = member

    def _start(self, job: InferJob) -> None:
        self.member.submit(InferRequest(job.request.inputs), job.respond)

    async def close(self) -> None:
        pass


class JoinBackend(Backend):
    name = "ensemble"

    def __init__(self) -> None:
        self.loads: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        self.loads.append((source.name, source.version))
        step = source.config.ensemble_scheduling.step[0]
        member = context.models.find(step.model_name, step.model_version)
        await self.gate.wait()
        return JoinModel(source, member)


def context_for(models: ModelLookup) -> BackendContext:
    return BackendContext(models)


class Bench:
    """A repository over one or more roots, with the backends above."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self.notes: list[str] = []
        self.stamp = StampBackend()
        self.join = JoinBackend()
        self.registry = BackendRegistry()
        self.registry.register(self.stamp)
        self.registry.register(self.join)

    def repository(self, mode: ControlMode = ControlMode.EXPLICIT, **options: Any) -> ModelRepository:
        return ModelRepository(
            self.roots, mode, context_for, on_note=self.notes.append, registry=self.registry, **options
        )


def write_model(root: Path, name: str, *stamps: str | int, config: str = CONFIG) -> Path:
    """A model with versions 1, 2 … whose files hold `stamps`."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    for version, stamp in enumerate(stamps, start=1):
        write_version(folder, version, stamp)
    return folder


def write_version(folder: Path, version: int, stamp: str | int) -> None:
    (folder / str(version)).mkdir(exist_ok=True)
    (folder / str(version) / "stamp.txt").write_text(str(stamp))


def ensemble_config(*members: str) -> str:
    """A chain of models that each take IN and give OUT."""
    steps = []
    for index, member in enumerate(members):
        source = "IN" if index == 0 else f"t{index}"
        target = "OUT" if index == len(members) - 1 else f"t{index + 1}"
        steps.append(
            f'{{ model_name: "{member}" model_version: -1 input_map {{ key: "IN" value: "{source}" }} '
            f'output_map {{ key: "OUT" value: "{target}" }} }}'
        )
    return f"""
platform: "ensemble"
input [ {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
ensemble_scheduling {{ step [ {", ".join(steps)} ] }}
"""


READY = (ModelState.READY, "")
UNLOADED = (ModelState.UNAVAILABLE, "unloaded")


async def failure(awaitable: Awaitable[object]) -> SluiceError:
    """The error that it ends in."""
    with pytest.raises(SluiceError) as caught:
        await awaitable
    return caught.value


async def ask(repository: ModelRepository, name: str, version: int = -1) -> int:
    """The stamp of the version that answers."""
    tensor = Tensor.of("IN", np.array([1], np.int32))
    response = await infer_one(repository.find(name, version), InferRequest({"IN": tensor}))
    return int(response.outputs[0].array[0])


def rows(repository: ModelRepository) -> dict[tuple[str, int], tuple[str | None, str]]:
    """The index by name and version."""
    return {(row.name, row.version): (row.state, row.reason) for row in repository.index(False)}

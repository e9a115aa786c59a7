"""The time that an ensemble adds to each step: that of a chain of models, less that of calling the models alone."""

import asyncio
from pathlib import Path
from time import perf_counter_ns

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from benchmarks.figures import Figure, Target
from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import BackendContext
from sluice.serving.backends.ensemble.backend import EnsembleBackend
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.tensors.tensor import Tensor

NUM_STEPS = 5
NUM_PIECES = 1000
"""Number of responses of a stream."""
NUM_REQUESTS = 2000
TARGET = Target(300.0)
_TENSOR = "data_type: TYPE_FP32 dims: [ -1 ]"


class Identity(Model):
    """A model that responds within the call, `num_pieces` times."""

    def __init__(self, config: ModelConfig, num_pieces: int = 1) -> None:
        super().__init__(config, build_spec(config, 1))
        self._num_pieces = num_pieces

    def _start(self, job: InferJob) -> None:
        tensor = job.request.inputs["X"]
        for number in range(self._num_pieces):
            job.respond(InferResponse([tensor.renamed("Y")], is_final=number == self._num_pieces - 1))

    async def close(self) -> None:
        """Do nothing: the model holds no resources."""


class _Models:
    """Finds the models of the steps by name."""

    def __init__(self, *models: Model) -> None:
        self._models = {model.name: model for model in models}

    def find(self, name: str, version: int = -1) -> Model:
        if name not in self._models:
            raise SluiceError(ErrorCode.NOT_FOUND, name)
        return self._models[name]


def measure(num_repeats: int, num_requests: int = NUM_REQUESTS) -> list[Figure]:
    """Measure the microseconds added per step of a chain, and per response of a stream through one more step."""
    return asyncio.run(_measure(num_repeats, num_requests))


async def _measure(num_repeats: int, num_requests: int) -> list[Figure]:
    steps = [Identity(_config(f"step{number}")) for number in range(NUM_STEPS)]
    chain = await _ensemble(steps)
    source = Identity(_config("source", is_decoupled=True), NUM_PIECES)
    stream = await _ensemble([source, steps[0]])
    per_step = _per_step(chain, steps, num_repeats, num_requests)
    per_piece = _per_piece(stream, source, steps[0], num_repeats, num_requests)
    name = "added by an ensemble"
    return [
        Figure(name, f"each of {NUM_STEPS} steps", "us", per_step, TARGET),
        Figure(name, "each piece of a stream through 2 steps", "us", per_piece),
    ]


def _per_step(chain: Model, steps: list[Identity], num_repeats: int, num_requests: int) -> tuple[float, ...]:
    alone = min(sum(_us(step, num_requests) for step in steps) for _ in range(num_repeats))
    return tuple((_us(chain, num_requests) - alone) / len(steps) for _ in range(num_repeats))


def _per_piece(stream: Model, source: Model, step: Model, num_repeats: int, num_requests: int) -> tuple[float, ...]:
    num_streams = max(1, num_requests // NUM_PIECES)
    alone = min(_us(source, num_streams) + NUM_PIECES * _us(step, num_requests) for _ in range(num_repeats))
    return tuple((_us(stream, num_streams) - alone) / NUM_PIECES for _ in range(num_repeats))


def _us(model: Model, num_requests: int) -> float:
    """Return the microseconds of one request."""
    tensor = Tensor.of("X", np.zeros(8, np.float32))
    started = perf_counter_ns()
    for _ in range(num_requests):
        model.submit(InferRequest({"X": tensor}), _ignore)
    return (perf_counter_ns() - started) / num_requests / 1000


def _ignore(response: InferResponse) -> None:
    """Do nothing: the response is known."""


def _config(name: str, *, is_decoupled: bool = False) -> ModelConfig:
    policy = f"model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}"
    return _parsed(f'name: "{name}" input {{ name: "X" {_TENSOR} }} output {{ name: "Y" {_TENSOR} }} {policy}')


async def _ensemble(steps: list[Identity]) -> Model:
    """Load an ensemble that calls the steps one after the other."""
    tensors = ["X", *(f"t{number}" for number in range(len(steps) - 1)), "Y"]
    maps = ", ".join(
        f'{{ model_name: "{step.name}" model_version: -1 input_map {{ key: "X" value: "{tensors[number]}" }} '
        f'output_map {{ key: "Y" value: "{tensors[number + 1]}" }} }}'
        for number, step in enumerate(steps)
    )
    ends = f'input {{ name: "X" {_TENSOR} }} output {{ name: "Y" {_TENSOR} }}'
    config = _parsed(f'name: "chain" platform: "ensemble" {ends} ensemble_scheduling {{ step [ {maps} ] }}')
    context = BackendContext(_Models(*steps))
    return await EnsembleBackend().load(ModelSource(Path(), 1, config), context)


def _parsed(text: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(text, ModelConfig())
    return config

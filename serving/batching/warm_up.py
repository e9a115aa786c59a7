"""Warm-up (`model_warmup`): requests that a version runs before it is ready, so that no client waits for first runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelWarmup

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.batching.sequences.inputs import ControlInputs
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse, SequenceFlag
from sluice.serving.request_check import check_request
from sluice.serving.spec import ModelSource, ModelSpec, StateSpec, inner_path, read_data_type
from sluice.serving.tensors.byte_strings import object_array
from sluice.serving.tensors.datatypes import BYTES, DataType
from sluice.serving.tensors.tensor import Array, Tensor

_log = logging.getLogger(__name__)

DATA_FOLDER = "warmup"
"""Folder of each `input_data_file`, in the model's folder."""
LIMIT_S = 600.0
"""Limit on the whole warm-up: a model that hangs in its first request must not keep loading for an hour."""
_LONGEST_STRING = 16
_LENGTH_BYTES = 4
"""Size of the length that stands before each element of a BYTES tensor."""
_ONLY_ONE = SequenceFlag.START | SequenceFlag.END
"""Flags of a sequence of one request, of which the model keeps no state."""


@dataclass(frozen=True, slots=True)
class WarmUpSample:
    """A request that runs `count` times."""

    name: str
    count: int
    inputs: dict[str, Tensor]


async def warm_up(
    model: Model,
    source: ModelSource,
    limit_s: float = LIMIT_S,
    run: Callable[[InferRequest], Awaitable[None]] | None = None,
) -> None:
    """Run every sample of `model_warmup` by `run`, by default `Model.warm_up`.

    Raises INVALID for one that fails, DEADLINE where all exceed `limit_s`.
    """
    if not source.config.model_warmup:
        return
    started = perf_counter()
    samples = await asyncio.to_thread(read_samples, source.config, source.folder)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            for sample in samples:
                await _run(run or model.warm_up, sample)
    except TimeoutError:
        if not limit.expired():
            raise
        raise SluiceError(ErrorCode.DEADLINE, f"its warm-up took longer than {limit_s:g} s") from None
    _log.info("%s: warmed up in %.2f s", model.spec.label, perf_counter() - started)


async def _run(run: Callable[[InferRequest], Awaitable[None]], sample: WarmUpSample) -> None:
    for _ in range(sample.count):
        try:
            await run(InferRequest(dict(sample.inputs)))
        except SluiceError as error:
            raise invalid_argument(f"failed to run warmup sample '{sample.name}': {error.message}") from error


def read_samples(config: ModelConfig, folder: Path) -> list[WarmUpSample]:
    """Return the samples of `model_warmup`. Reads files: for a thread. Raises SluiceError as `warm_up`.

    A sample without rows is left out, and one without a count runs once. All rows of a sample are equal.
    """
    samples = []
    for given in config.model_warmup:
        if given.batch_size == 0:
            _log.debug("model '%s': skipping batch 0 warmup sample '%s'", config.name, given.name)
            continue
        inputs = {
            name: _build_input(name, each, given.batch_size if config.max_batch_size > 0 else 0, folder)
            for name, each in given.inputs.items()
        }
        if config.max_batch_size == 0 and given.batch_size > 1:
            raise invalid_argument(
                f"failed to run warmup sample '{given.name}': batch size {given.batch_size} for '{config.name}', max "
                "allowed is 0"
            )
        samples.append(WarmUpSample(given.name, max(given.count, 1), inputs))
    return samples


def _build_input(name: str, given: ModelWarmup.Input, rows: int, folder: Path) -> Tensor:
    """Return a checked input of equal rows. With `rows` 0 the model has no batch dimension."""
    data_type, dims = read_data_type(given.data_type), list(given.dims)
    assert data_type is not None, "the configuration has been checked"
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            row = np.full(dims, b"" if data_type is BYTES else 0, data_type.dtype)
        case "random_data":
            row = _random_row(data_type, dims)
        case _:
            path = folder / DATA_FOLDER / inner_path(given.input_data_file)
            row = _read_row(path, given.input_data_file, data_type, dims)
    array = np.repeat(row[np.newaxis], rows, axis=0) if rows else row
    return Tensor(name, data_type.name, array.shape, array=array)


def _random_row(data_type: DataType, dims: list[int]) -> Array:
    """Return values that any model accepts: integers 0 and 1 (ids of every vocabulary), or numbers from 0 to 1.

    They are equal at every load, so that a load that succeeds does so again.
    """
    generator = np.random.default_rng(seed=0)
    if data_type is BYTES:
        return _random_strings(generator, dims)
    if data_type.dtype.kind in "iub":
        return generator.integers(0, 2, dims).astype(data_type.dtype)
    return generator.random(dims).astype(data_type.dtype)


def _random_strings(generator: np.random.Generator, dims: list[int]) -> Array:
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", "S1")
    lengths = generator.integers(1, _LONGEST_STRING + 1, prod(dims))
    return object_array([generator.choice(letters, length).tobytes() for length in lengths], dims)


def _read_row(path: Path, name: str, data_type: DataType, dims: list[int]) -> Array:
    """Read one row. The file may be longer than the row, unless it holds BYTES."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SluiceError(ErrorCode.INTERNAL, f"failed to open text file for read {path}: {error.strerror}") from error
    size = (data_type.itemsize or _LENGTH_BYTES) * prod(dims)
    if len(raw) < size:
        raise invalid_argument(
            f"warmup setting expects {size} bytes, but the data provided from {name} only has {len(raw)} bytes"
        )
    tensor = Tensor("", data_type.name, dims, raw if data_type is BYTES else raw[:size])
    try:
        return tensor.array
    except ValueError as error:
        raise invalid_argument(f"warmup data of {name} does not fit the dims {dims}: {error}") from error


def warm_up_requests(request: InferRequest, spec: ModelSpec, config: ModelConfig) -> list[InferRequest]:
    """Return a checked request for each row, with controls and states for sequences. Raises as `check_request`."""
    own = spec.control_inputs | {state.input_name for state in spec.states}
    given = {name: request.inputs.pop(name) for name in own & request.inputs.keys()}
    check_request(request, spec)
    inputs = request.inputs | given
    rows = [inputs] if spec.max_batch_size == 0 else [_row(inputs, row) for row in range(request.batch_size)]
    if not spec.has_sequences:
        return [InferRequest(each) for each in rows]
    controls = ControlInputs(config)
    return [_sequence_of_one(each, number, controls, spec) for number, each in enumerate(rows, start=1)]


def _row(inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {
        name: Tensor(name, each.datatype, (1, *each.shape[1:]), array=each.array[row : row + 1])
        for name, each in inputs.items()
    }


def _sequence_of_one(
    inputs: dict[str, Tensor], correlation_id: int, controls: ControlInputs, spec: ModelSpec
) -> InferRequest:
    added = controls.of(_ONLY_ONE, controls.id_tensor(correlation_id, ()))
    states = {state.input_name: _empty_state(state, spec.max_batch_size > 0) for state in spec.states}
    return InferRequest(added | states | inputs, correlation_id=correlation_id, sequence=_ONLY_ONE)


def _empty_state(state: StateSpec, is_batched: bool) -> Tensor:
    """Return a state of zeros or empty strings. A variable size is 1."""
    shape = [1] * is_batched + [1 if size == -1 else size for size in state.dims]
    return Tensor.zeros(state.input_name, state.data_type, shape)


class WarmUpJob(InferJob):
    """A job that its model does not know of: it is in no queue, statistics, cache or sequence."""

    __slots__ = ("_ended",)

    def __init__(self, model: Model, request: InferRequest) -> None:
        super().__init__(model, request, lambda _: None)
        self._ended = asyncio.Event()
        # An iterative model that asks for the request again has run it once, which is enough.
        self.on_reschedule = self._end

    def respond(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.outcome = self.outcome or response.error
        if response.is_final:
            self._end()

    def _end(self) -> None:
        self.is_finished = True
        self.on_cancel = self.on_reschedule = None
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()


class WarmUpBatch:
    """Requests that an instance runs together, once."""

    def __init__(self, model: Model, requests: Sequence[InferRequest]) -> None:
        self._jobs = [WarmUpJob(model, request) for request in requests]

    async def run_on(self, instance: Instance) -> None:
        """Run on a free instance, and wait until it is free again. Raises the first error among the responses."""
        freed = asyncio.Event()
        now = perf_counter_ns()
        for job in self._jobs:
            job.compute_started_ns = now
            job.executed_batch_size = sum(each.request.batch_size for each in self._jobs)
        try:
            instance.execute([*self._jobs], freed.set)
            for job in self._jobs:
                await job.wait()
            await freed.wait()
        finally:
            for job in self._jobs:
                job.cancel()
        for job in self._jobs:
            if job.outcome is not None:
                raise job.outcome


async def gather_runs(runs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently, and wait for all to end. Raises the first error."""
    results = await asyncio.gather(*runs, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result

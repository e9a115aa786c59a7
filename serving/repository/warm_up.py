"""`model_warmup`: requests that a version answers before it is ready, so that no client waits for its first times."""

import asyncio
import logging
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelWarmup

from serving.model import Model
from serving.request import InferRequest
from serving.spec import ModelSource, inner_path
from serving.tensors import datatypes
from serving.tensors.datatypes import BYTES, DataType
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError

_log = logging.getLogger(__name__)

FOLDER = "warmup"
"""Where in a model's folder `input_data_file` lies."""
LIMIT_S = 600.0
"""A model that hangs in its first request shall not look as if it were loading for an hour."""
_LONGEST_STRING = 16
_LENGTH_BYTES = 4
"""Of the number before each element of a BYTES tensor."""


@dataclass(frozen=True, slots=True)
class WarmUpSample:
    """One request, to be run so many times."""

    name: str
    count: int
    inputs: dict[str, Tensor]


async def warm_up(model: Model, source: ModelSource, limit_s: float = LIMIT_S) -> None:
    """Run every sample. Raises SluiceError INVALID, in Triton's words, for one that cannot be made or that fails.

    DEADLINE where all of them take longer than `limit_s`.
    """
    if not source.config.model_warmup:
        return
    begun = perf_counter()
    samples = await asyncio.to_thread(samples_of, source.config, source.folder)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            for sample in samples:
                await _run(model, sample)
    except TimeoutError:
        if not limit.expired():
            raise
        raise SluiceError(ErrorCode.DEADLINE, f"its warm-up took longer than {limit_s:g} s") from None
    _log.info("%s: warmed up in %.2f s", model.spec.label, perf_counter() - begun)


async def _run(model: Model, sample: WarmUpSample) -> None:
    for _ in range(sample.count):
        try:
            await model.warm_up(InferRequest(dict(sample.inputs)))
        except SluiceError as error:
            raise _invalid(f"failed to run warmup sample '{sample.name}': {error.message}") from error


def samples_of(config: ModelConfig, folder: Path) -> list[WarmUpSample]:
    """What `model_warmup` says. Reads files: for a thread. Raises SluiceError as `warm_up`.

    A sample without rows is left out, and one without a count is run once. Every row of a sample is the same.
    """
    samples = []
    for given in config.model_warmup:
        if given.batch_size == 0:
            _log.debug("model '%s': skipping batch 0 warmup sample '%s'", config.name, given.name)
            continue
        made = {
            name: _input(name, each, given.batch_size if config.max_batch_size > 0 else 0, folder)
            for name, each in given.inputs.items()
        }
        if config.max_batch_size == 0 and given.batch_size > 1:
            raise _invalid(
                f"failed to run warmup sample '{given.name}': batch size {given.batch_size} for '{config.name}', max "
                "allowed is 0"
            )
        samples.append(WarmUpSample(given.name, max(given.count, 1), made))
    return samples


def _input(name: str, given: ModelWarmup.Input, rows: int, folder: Path) -> Tensor:
    """`rows` 0: the model has no batch dimension."""
    data_type = datatypes.of_config(model_config_pb2.DataType.Name(given.data_type))
    if data_type is None:
        raise _invalid(f"warmup setting expects input '{name}' to have data_type set")
    dims = list(given.dims)
    if any(size < 0 for size in dims):
        raise _invalid(f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            row = np.full(dims, b"" if data_type is BYTES else 0, data_type.dtype)
        case "random_data":
            row = _random(data_type, dims)
        case "input_data_file":
            row = _read(folder / FOLDER / inner_path(given.input_data_file), given.input_data_file, data_type, dims)
        case _:
            raise _invalid(f"warmup setting expects input '{name}' to have input_data_type set")
    array = np.repeat(row[np.newaxis], rows, axis=0) if rows else row
    return Tensor(name, data_type.name, array.shape, array=array)


def _random(data_type: DataType, dims: list[int]) -> Array:
    """Values that any model takes: integers of 0 and 1 are ids of every vocabulary, numbers are between 0 and 1.

    The same at every load, so that a load that goes well does so again.
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
    array = np.empty(prod(dims), BYTES.dtype)
    array[:] = [generator.choice(letters, length).tobytes() for length in lengths]
    return array.reshape(dims)


def _read(path: Path, name: str, data_type: DataType, dims: list[int]) -> Array:
    """One row. A file may be longer than that, except one of BYTES, whose elements have their lengths before them."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        reason = f"failed to open text file for read {path}: {error.strerror}"
        raise SluiceError(ErrorCode.INTERNAL, reason) from error
    size = (data_type.itemsize or _LENGTH_BYTES) * prod(dims)
    if len(raw) < size:
        raise _invalid(
            f"warmup setting expects {size} bytes, but the data provided from {name} only has {len(raw)} bytes"
        )
    tensor = Tensor("", data_type.name, dims, raw if data_type is BYTES else raw[:size])
    try:
        return tensor.array
    except ValueError as error:
        raise _invalid(f"warmup data of {name} does not fit the dims {dims}: {error}") from error


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)

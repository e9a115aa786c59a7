"""The graph of an ensemble: its steps, the tensors that join them, its streams, and checks against the steps' models.

Every decoupled step makes a stream: its responses, one after the other, and everything that later steps make of them.
Streams nest as decoupled steps follow each other. A tensor from outside a stream is the same for all its responses, so
it may join tensors inside. Tensors of two streams of which neither contains the other cannot be joined, because their
responses do not correspond.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.serving.backend import ModelLookup
from sluice.serving.job import InferJob, ReceiveResponse
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.tensor import Tensor, format_shape

StreamPath = tuple[int, ...]
"""Indices of the nested decoupled steps that a tensor is a response of, outermost first; () is the request itself."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One use of a model. `inputs` and `outputs` map the model's tensor names to ensemble tensors."""

    index: int
    model_name: str
    version: int
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def reads(self) -> Iterable[str]:
        """Ensemble tensors that the step waits for."""
        return self.inputs.values()

    @property
    def writes(self) -> Iterable[str]:
        return self.outputs.values()


@dataclass(frozen=True, slots=True)
class EnsembleGraph:
    """Steps in the configuration's order, and the step that writes each tensor."""

    steps: tuple[EnsembleStep, ...]
    writers: dict[str, EnsembleStep]

    def needed_for(self, tensors: Iterable[str]) -> frozenset[int]:
        """Return the indices of the steps that produce `tensors`, directly or indirectly."""
        needed: set[int] = set()
        pending = list(tensors)
        while pending:
            step = self.writers.get(pending.pop())
            if step is not None and step.index not in needed:
                needed.add(step.index)
                pending.extend(step.reads)
        return frozenset(needed)


def parse_graph(config: ModelConfig) -> EnsembleGraph:
    """Return the graph of a configuration that has been checked."""
    steps = tuple(
        EnsembleStep(
            index,
            each.model_name,
            each.model_version,
            dict(sorted(each.input_map.items())),
            dict(sorted(each.output_map.items())),
        )
        for index, each in enumerate(config.ensemble_scheduling.step)
    )
    return EnsembleGraph(steps, {name: step for step in steps for name in step.writes})


@dataclass(frozen=True, slots=True)
class StreamPaths:
    """Stream of each step, by the step's index, and of each tensor, by its name."""

    by_step: Mapping[int, StreamPath]
    by_tensor: Mapping[str, StreamPath]


def find_stream_paths(
    ensemble: str, inputs: Iterable[str], graph: EnsembleGraph, decoupled: frozenset[int]
) -> StreamPaths:
    """Return an ensemble's streams. Raises INVALID for a step whose inputs come from unrelated streams."""
    by_step: dict[int, StreamPath] = {}
    by_tensor: dict[str, StreamPath] = dict.fromkeys(inputs, ())
    waiting = list(graph.steps)
    while waiting:
        step = next((each for each in waiting if all(name in by_tensor for name in each.reads)), None)
        if step is None:
            raise invalid_argument(f"in ensemble {ensemble}, steps wait for tensors that nothing writes")
        waiting.remove(step)
        stream = innermost_stream(ensemble, step.model_name, [by_tensor[name] for name in step.reads])
        by_step[step.index] = stream
        after = (*stream, step.index) if step.index in decoupled else stream
        by_tensor.update(dict.fromkeys(step.writes, after))
    return StreamPaths(by_step, by_tensor)


def innermost_stream(ensemble: str, reader: str, streams: Iterable[StreamPath]) -> StreamPath:
    """Return the stream within all others. Raises INVALID where two do not contain each other."""
    found: StreamPath = ()
    for stream in sorted(streams, key=len):
        if not is_within(stream, found):
            raise invalid_argument(
                f"in ensemble {ensemble}, step of model '{reader}' receives inputs originated from different decoupled "
                "models"
            )
        found = stream
    return found


def is_within(stream: StreamPath, outer: StreamPath) -> bool:
    """Return whether `stream` is `outer` or nested in it."""
    return stream[: len(outer)] == outer


def find_step_models(ensemble: str, graph: EnsembleGraph, models: ModelLookup) -> list[Model]:
    """Return the model of each step. Raises INVALID where one is not loaded."""
    return [_find_model(ensemble, step, models) for step in graph.steps]


def check_step_models(spec: ModelSpec, graph: EnsembleGraph, models: Sequence[Model]) -> None:
    """Check that mappings, types, dims and batch sizes of steps and models agree. Raises INVALID, in Triton's words."""
    known: dict[str, _TensorFacts] = {}
    for tensor in (*spec.inputs.values(), *spec.outputs.values()):
        known.setdefault(tensor.name, _tensor_facts(spec, tensor, tensor.model_dims))
    for step, model in zip(graph.steps, models, strict=True):
        _check_batch_size(spec, model.spec)
        _check_inputs(spec.name, step, model.spec, known)
        _check_outputs(spec.name, step, model.spec, known)


def find_decoupled_steps(spec: ModelSpec, graph: EnsembleGraph, models: Sequence[Model]) -> frozenset[int]:
    """Return the indices of the decoupled steps. Raises INVALID where streams meet that do not contain each other."""
    decoupled = frozenset(step.index for step in graph.steps if models[step.index].spec.is_decoupled)
    by_tensor = find_stream_paths(spec.name, spec.inputs, graph, decoupled).by_tensor
    innermost_stream(spec.name, spec.name, [by_tensor[name] for name in spec.outputs])
    return decoupled


@dataclass(frozen=True, slots=True)
class _TensorFacts:
    """Type and dims of an ensemble tensor, and the model that declares them. `full_dims` include the batch."""

    model_name: str
    data_type: str
    dims: Shape
    full_dims: Shape


def _find_model(ensemble: str, step: EnsembleStep, models: ModelLookup) -> Model:
    try:
        return models.find(step.model_name, step.version)
    except SluiceError as error:
        if step.version == -1:
            reason = f"which has no loaded version. Model '{step.model_name}' loading failed with error: "
            raise invalid_argument(
                f"ensemble '{ensemble}' depends on '{step.model_name}' {reason}{error.message}"
            ) from error
        raise invalid_argument(
            f"ensemble '{ensemble}' depends on '{step.model_name}' whose required version {step.version} is not loaded."
        ) from error


def _tensor_facts(spec: ModelSpec, tensor: TensorSpec, dims: Shape) -> _TensorFacts:
    batch = (-1,) if spec.max_batch_size > 0 else ()
    return _TensorFacts(spec.name, tensor.data_type.config_name, dims, batch + dims)


def _check_batch_size(ensemble: ModelSpec, model: ModelSpec) -> None:
    if 0 < model.max_batch_size < ensemble.max_batch_size:
        raise invalid_argument(
            f"ensemble {ensemble.name} allows maximum batch size {ensemble.max_batch_size}, but it contains model "
            f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
        )


def _check_inputs(ensemble: str, step: EnsembleStep, model: ModelSpec, known: dict[str, _TensorFacts]) -> None:
    for name, tensor in step.inputs.items():
        if name not in model.inputs:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model_name}"
            )
    for spec in model.inputs.values():
        if spec.name in step.inputs:
            _check_tensor(ensemble, step.inputs[spec.name], _tensor_facts(model, spec, spec.dims), known)
        elif not spec.is_optional:
            raise invalid_argument(
                f"in ensemble {ensemble}, input {spec.name} in model {step.model_name} is not mapped to any ensemble "
                "tensors"
            )


def _check_outputs(ensemble: str, step: EnsembleStep, model: ModelSpec, known: dict[str, _TensorFacts]) -> None:
    for name, tensor in step.outputs.items():
        spec = model.outputs.get(name)
        if spec is None:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{step.model_name}"
            )
        _check_tensor(ensemble, tensor, _tensor_facts(model, spec, spec.dims), known)


def _check_tensor(ensemble: str, tensor: str, facts: _TensorFacts, known: dict[str, _TensorFacts]) -> None:
    first = known.setdefault(tensor, facts)
    if first.data_type != facts.data_type:
        what, one, other = "data type", first.data_type, facts.data_type
    elif not shapes_agree(first.dims, facts.dims) and not shapes_agree(first.full_dims, facts.full_dims):
        what, one, other = "shape", format_shape(first.full_dims), format_shape(facts.full_dims)
    else:
        return
    raise invalid_argument(
        f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent {what}: {one} is inferred from model "
        f"{first.model_name} while {other} is inferred from model {facts.model_name}"
    )


def shapes_agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes may be equal; -1 stands for any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def fit_shape(tensor: Tensor, dims: Sequence[int], *, is_batching: bool, batch_size: int) -> Tensor:
    """Reshape a tensor for a reader that expects `dims`, after a batch dimension if `is_batching`.

    Nothing is copied. `batch_size` is that of the request that made the tensor, 0 where its model does not batch.
    Between models that batch and models that do not, a batch dimension of one row is added or removed. A tensor that
    fits as it is passes a whole batch as one tensor.
    """
    shape = tensor.shape
    if is_batching == (batch_size > 0):
        return tensor
    if is_batching:
        return tensor.reshaped((1, *shape)) if shapes_agree(dims, shape) else tensor
    return tensor.reshaped(shape[1:]) if batch_size == 1 and not shapes_agree(dims, shape) else tensor


def find_split_inputs(spec: ModelSpec, inputs: Mapping[str, Tensor], num_rows: int) -> frozenset[str]:
    """Return the inputs to be split into `num_rows` rows: the model takes one at a time. None where it batches."""
    if spec.max_batch_size > 0 or num_rows == 1:
        return frozenset()
    return frozenset(
        name
        for name, tensor in inputs.items()
        if name in spec.inputs
        and not shapes_agree(spec.inputs[name].dims, tensor.shape)
        and tensor.shape[:1] == (num_rows,)
    )


class RowJobs:
    """Submits every row as a job, and gives one response for all. The first error, or `cancel`, ends all rows."""

    def __init__(self, model: Model, receive: ReceiveResponse) -> None:
        """`receive` gets one final response, with a batch dimension."""
        self._model = model
        self._receive = receive
        self._jobs: list[InferJob] = []
        self._responses: list[InferResponse | None] = []
        self._is_over = False

    def submit(self, request: InferRequest, split: frozenset[str], num_rows: int) -> None:
        """Submit the rows. Each gets its part of the `split` inputs and all others. Raises the model's refusal."""
        self._responses = [None] * num_rows
        for row in range(num_rows):
            inputs = {name: _select_row(each, row) if name in split else each for name, each in request.inputs.items()}
            try:
                self._submit_row(replace(request, inputs=inputs, parameters=request.parameters.copy()), row)
            except SluiceError:
                self.cancel()
                raise
            if self._is_over:
                break

    def cancel(self, failed_row: int | None = None) -> None:
        """Cancel all rows. Idempotent."""
        self._is_over = True
        for row, job in enumerate(self._jobs):
            if row != failed_row:  # the failed one ends by itself once its error is passed on
                job.cancel()

    def _submit_row(self, request: InferRequest, row: int) -> None:
        self._jobs.append(self._model.submit_held(request, lambda response: self._receive_row(row, response)))

    def _receive_row(self, row: int, response: InferResponse) -> None:
        if self._is_over:
            return
        if response.error is not None:
            self.cancel(row)
            self._receive(InferResponse(error=response.error))
            return
        self._responses[row] = self._responses[row] or response
        responses = [response for response in self._responses if response is not None]
        if len(responses) == len(self._responses):
            self._is_over = True
            self._receive(self._combine(responses))

    def _combine(self, responses: Sequence[InferResponse]) -> InferResponse:
        first = responses[0]
        try:
            outputs = [
                _stack_rows([response.outputs[index] for response in responses]) for index in range(len(first.outputs))
            ]
        except (IndexError, ValueError):
            message = f"model '{self._model.name}' answered the rows of a batch with tensors of different shapes"
            return InferResponse(error=SluiceError(ErrorCode.INTERNAL, message))
        return InferResponse(outputs, first.parameters)


def _select_row(tensor: Tensor, row: int) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.shape[1:], array=tensor.array[row])


def _stack_rows(rows: Sequence[Tensor]) -> Tensor:
    array = np.stack([each.array for each in rows])
    return Tensor(rows[0].name, rows[0].datatype, array.shape, array=array)

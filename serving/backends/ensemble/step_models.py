"""Whether an ensemble's steps fit the models that they name. In Triton's words."""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.backend import ModelLookup
from serving.backends.ensemble.graph import Graph, Step
from serving.backends.ensemble.shapes import Shape, agree
from serving.backends.ensemble.streams import innermost, streams_of
from serving.model import Model
from serving.spec import ModelSpec, TensorSpec
from sluice.errors import ErrorCode, SluiceError


@dataclass(frozen=True, slots=True)
class _Node:
    """What is known of an ensemble tensor, and which model says so. `full_dims` begin with the batch dimension."""

    model_name: str
    data_type: str
    dims: Shape
    full_dims: Shape


def find_step_models(ensemble: str, graph: Graph, models: ModelLookup) -> list[Model]:
    """The model of each step. Raises SluiceError INVALID where one is not loaded."""
    return [_find(ensemble, step, models) for step in graph.steps]


def check_step_models(spec: ModelSpec, graph: Graph, models: Sequence[Model]) -> None:
    """Raises SluiceError INVALID where mappings, types, dims or batch sizes of steps and models contradict."""
    known: dict[str, _Node] = {}
    for tensor in (*spec.inputs.values(), *spec.outputs.values()):
        dims = tensor.dims if tensor.reshape is None else tensor.reshape
        known.setdefault(tensor.name, _node(spec, tensor, dims))
    for step, model in zip(graph.steps, models, strict=True):
        _check_batch_size(spec, model.spec)
        _check_inputs(spec.name, step, model.spec, known)
        _check_outputs(spec.name, step, model.spec, known)


def decoupled_steps(spec: ModelSpec, graph: Graph, models: Sequence[Model]) -> frozenset[int]:
    """The steps, by index, of decoupled models. Raises SluiceError INVALID where streams beside each other meet."""
    decoupled = frozenset(step.index for step in graph.steps if models[step.index].spec.is_decoupled)
    of_tensor = streams_of(spec.name, spec.inputs, graph, decoupled).of_tensor
    innermost(spec.name, spec.name, [of_tensor[name] for name in spec.outputs])
    return decoupled


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)


def _find(ensemble: str, step: Step, models: ModelLookup) -> Model:
    try:
        return models.find(step.model_name, step.version)
    except SluiceError as error:
        if step.version == -1:
            reason = f"which has no loaded version. Model '{step.model_name}' loading failed with error: "
            raise _invalid(f"ensemble '{ensemble}' depends on '{step.model_name}' {reason}{error.message}") from error
        raise _invalid(
            f"ensemble '{ensemble}' depends on '{step.model_name}' whose required version {step.version} is not loaded."
        ) from error


def _node(spec: ModelSpec, tensor: TensorSpec, dims: Shape) -> _Node:
    batch = (-1,) if spec.max_batch_size > 0 else ()
    return _Node(spec.name, tensor.data_type.config_name, dims, batch + dims)


def _check_batch_size(ensemble: ModelSpec, model: ModelSpec) -> None:
    if 0 < model.max_batch_size < ensemble.max_batch_size:
        raise _invalid(
            f"ensemble {ensemble.name} allows maximum batch size {ensemble.max_batch_size}, but it contains model "
            f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
        )


def _check_inputs(ensemble: str, step: Step, model: ModelSpec, known: dict[str, _Node]) -> None:
    for name, tensor in step.inputs.items():
        if name not in model.inputs:
            raise _invalid(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{step.model_name}"
            )
    for spec in model.inputs.values():
        if spec.name in step.inputs:
            _agree_on(ensemble, step.inputs[spec.name], _node(model, spec, spec.dims), known)
        elif not spec.is_optional:
            raise _invalid(
                f"in ensemble {ensemble}, input {spec.name} in model {step.model_name} is not mapped to any ensemble "
                "tensors"
            )


def _check_outputs(ensemble: str, step: Step, model: ModelSpec, known: dict[str, _Node]) -> None:
    for name, tensor in step.outputs.items():
        spec = model.outputs.get(name)
        if spec is None:
            raise _invalid(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{step.model_name}"
            )
        _agree_on(ensemble, tensor, _node(model, spec, spec.dims), known)


def _agree_on(ensemble: str, tensor: str, node: _Node, known: dict[str, _Node]) -> None:
    first = known.setdefault(tensor, node)
    if first.data_type != node.data_type:
        what, one, other = "data type", first.data_type, node.data_type
    elif not agree(first.dims, node.dims) and not agree(first.full_dims, node.full_dims):
        what, one, other = "shape", _shape_text(first.full_dims), _shape_text(node.full_dims)
    else:
        return
    raise _invalid(
        f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent {what}: {one} is inferred from model "
        f"{first.model_name} while {other} is inferred from model {node.model_name}"
    )


def _shape_text(shape: Shape) -> str:
    return f"[{','.join(map(str, shape))}]"

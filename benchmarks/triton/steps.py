"""The time to pass a large tensor from one step of an ensemble to the next."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import uvloop

from benchmarks.figures import Figure, Target
from sluice.serving.backend import BackendContext
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor

SIZE_BYTES = 10_000_000
ROUNDS = 30

_HEAD = '{{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}'
_PYTHON = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]) for tensor in tensors]
"""


def measure(repeats: int, out: Path) -> list[Figure]:
    """Measure the time of an ensemble of two steps, less that of both models alone, for each backend."""
    folder = out.resolve() / "triton" / "steps"
    _write_models(folder)
    samples = uvloop.run(_measure(folder, repeats))
    return [
        Figure("10 MB between two steps", backend, "ms", tuple(values), Target(1.0))
        for backend, values in samples.items()
    ]


async def _measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    repository = ModelRepository([folder], ControlMode.NONE, BackendContext)
    await repository.start()
    try:
        samples: dict[str, list[float]] = {"onnxruntime": [], "python": []}
        for _ in range(repeats):
            for backend, values in samples.items():
                values.append(await _extra_ms(repository, backend))
        return samples
    finally:
        await repository.close()


async def _extra_ms(repository: ModelRepository, backend: str) -> float:
    """Measure by medians over rounds in turns, so that noise affects all three alike."""
    names = (f"{backend}_first", f"{backend}_second", f"{backend}_both")
    models = [repository.find(name) for name in names]
    times: list[list[float]] = [[], [], []]
    for _ in range(ROUNDS):
        for model, values in zip(models, times, strict=True):
            values.append(await _ms(model))
    first, second, both = map(statistics.median, times)
    return both - first - second


async def _ms(model: Model) -> float:
    tensor = Tensor.of("x", np.zeros(SIZE_BYTES // 4, np.float32))
    started = perf_counter()
    response = await infer_one(model, InferRequest({"x": tensor}))
    elapsed = perf_counter() - started
    assert response.outputs[0].num_elements == tensor.num_elements
    return elapsed * 1e3


def _write_models(folder: Path) -> None:
    for backend in ("onnxruntime", "python"):
        for place in ("first", "second"):
            name = f"{backend}_{place}"
            (folder / name / "1").mkdir(parents=True, exist_ok=True)
            _write_config(folder, name, f'backend: "{backend}"')
            if backend == "python":
                (folder / name / "1" / "model.py").write_text(_PYTHON)
            else:
                (folder / name / "1" / "model.onnx").write_bytes(_negation())
        steps = (_step(f"{backend}_first", "x", "between"), _step(f"{backend}_second", "between", "y"))
        (folder / f"{backend}_both" / "1").mkdir(parents=True, exist_ok=True)
        _write_config(
            folder, f"{backend}_both", f'platform: "ensemble"\nensemble_scheduling {{ step [ {", ".join(steps)} ] }}'
        )


def _step(model: str, taken: str, given: str) -> str:
    maps = f'input_map {{ key: "x" value: "{taken}" }} output_map {{ key: "y" value: "{given}" }}'
    return f'{{ model_name: "{model}" model_version: -1 {maps} }}'


def _write_config(folder: Path, name: str, more: str) -> None:
    lines: Sequence[str] = (
        f'name: "{name}"',
        f"input [ {_HEAD.format(name='x')} ]",
        f"output [ {_HEAD.format(name='y')} ]",
        more,
    )
    (folder / name / "config.pbtxt").write_text("\n".join(lines) + "\n")


def _negation() -> bytes:
    from onnx import TensorProto, helper

    shape = ["n"]
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "negation",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())

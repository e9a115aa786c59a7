"""Plans are chosen by compute capability and run through TensorRT's interface; without a GPU, errors are clear."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.tensorrt.backend import TensorRtBackend
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.builders import CONTEXT
from tests.serving.backends.tensorrt.fakes import Machine, install_driver, write_plan
from tests.waiting import PATIENCE_S, until

TENSORS = """
    input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] }
"""
BATCHED = f"max_batch_size: 8 dynamic_batching {{ }} {TENSORS}"
ON_GPU = "instance_group { kind: KIND_GPU }"
TWO_PROFILES: list[dict[str, Any]] = [{"x": [[1, 4], [1, 4], [2, 4]]}, {"x": [[1, 4], [6, 4], [8, 4]]}]
Install = Callable[..., Machine]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Fake a machine with GPUs of these capabilities."""

    def on(*capabilities: tuple[int, int]) -> Machine:
        machine = Machine(list(capabilities))
        machine.install(monkeypatch)
        return machine

    return on


async def load(folder: Path, text: str) -> Model:
    backend = TensorRtBackend()
    config: ModelConfig = text_format.Parse(text, ModelConfig(name="m", backend="tensorrt"))
    config = await backend.complete(ModelSource(folder, 1, config), CONTEXT)
    return await backend.load(ModelSource(folder, 1, config), CONTEXT)


async def refusal(folder: Path, text: str) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await load(folder, text)
    return caught.value


def rows_of(count: int, value: float = 1, columns: int = 4) -> InferRequest:
    return InferRequest({"x": Tensor.of("x", np.full((count, columns), value, np.float32))})


async def infer(model: Model, given: InferRequest) -> Array:
    async with asyncio.timeout(PATIENCE_S):
        response = await infer_one(model, given)
    [output] = response.outputs
    return output.array


async def test_without_a_gpu_the_error_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, [])
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    files = 'cc_model_filenames { key: "75" value: "t4.plan" } cc_model_filenames { key: "8.6" value: "a10.plan" }'
    error = await refusal(tmp_path, TENSORS + files)
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.message == (
        "unable to load model 'm': a TensorRT plan needs an NVIDIA GPU and the Python packages tensorrt and "
        "cuda-python; there is no GPU (plans: compute capability 7.5: t4.plan, compute capability 8.6: a10.plan, any "
        "other: model.plan); the Python package 'tensorrt' is not installed; the Python package 'cuda-python' is not "
        "installed"
    )
    assert (await refusal(tmp_path, "")).message == (await refusal(tmp_path, TENSORS)).message


async def test_without_tensorrt_the_error_says_which_plan_the_gpu_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_driver(monkeypatch, [(7, 5)])
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    error = await refusal(tmp_path, TENSORS + 'cc_model_filenames { key: "75" value: "t4.plan" }')
    assert "GPU 0 is Test 0 with compute capability 7.5 and takes t4.plan; the Python package 'tens" in error.message


async def test_each_gpu_gets_the_plan_for_its_capability(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    """Keys have a point or none; a GPU without a key gets the default."""
    machine = install((7, 5), (12, 0), (9, 0))
    for name, factor in (("t4.plan", 3), ("big.plan", 5), ("model.plan", 7)):
        write_plan(tmp_path / "1" / name, factor=factor)
    files = 'cc_model_filenames { key: "75" value: "t4.plan" } cc_model_filenames { key: "12.0" value: "big.plan" }'
    answers = []
    for gpu in range(3):
        loaded.append(await load(tmp_path, f"{BATCHED} {files} instance_group {{ kind: KIND_GPU gpus: [{gpu}] }}"))
        answers.append((await infer(loaded[-1], rows_of(1)))[0, 0])
    assert answers == [3, 5, 7]
    assert machine.engines == [0, 1, 2]


async def test_a_plan_that_is_not_there_is_named_with_its_gpu(tmp_path: Path, install: Install) -> None:
    install((8, 6))
    error = await refusal(tmp_path, f'{TENSORS} {ON_GPU} cc_model_filenames {{ key: "8.6" value: "a10.plan" }}')
    assert error.code is ErrorCode.UNAVAILABLE
    assert "/1/a10.plan' for model instance 'm', which Test 0 with compute capability 8.6 takes (" in error.message


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (
            "instance_group { kind: KIND_CPU }",
            "runs on GPUs, and an instance_group has another kind; write kind: KIND_GPU",
        ),
        ("instance_group { kind: KIND_GPU gpus: [1] }", "asks for GPU 1, and there are 1, from 0"),
        (
            'instance_group { kind: KIND_GPU profile: ["3"] }',
            "the specified optimization profile 3[3] for m_0. Expected optimization profile index range 0-0",
        ),
        (
            'instance_group { kind: KIND_GPU profile: ["fast"] }',
            "unable to parse 'fast': optimization profiles",
        ),
        (
            ON_GPU + ' parameters { key: "execution_context_allocation_strategy" value: { string_value: "SOME" } }',
            "Invalid value for 'execution_context_allocation_strategy': 'SOME' for model instance 'm'. Supported",
        ),
    ],
)
async def test_instances_that_cannot_be(tmp_path: Path, install: Install, group: str, reason: str) -> None:
    install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    error = await refusal(tmp_path, BATCHED + group)
    assert error.code is ErrorCode.INVALID
    assert reason in error.message


async def test_a_broken_plan_fails_with_tensorrt_s_last_error(tmp_path: Path, install: Install) -> None:
    install((8, 0))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.plan").write_bytes(b"not a plan")
    error = await refusal(tmp_path, BATCHED + ON_GPU)
    assert error.message == "unable to create TensorRT engine: Magic tag does not match"


async def test_a_profile_that_cannot_be_set(tmp_path: Path, install: Install) -> None:
    machine = install((8, 0))
    write_plan(tmp_path / "1" / "model.plan", has_broken_profiles=True)
    error = await refusal(tmp_path, BATCHED + ON_GPU)
    assert error.message == "unable to set optimization profile 0: TensorRT gives no reason"
    assert not machine.memory


async def test_what_the_configuration_leaves_out_is_the_plan_s(
    tmp_path: Path, loaded: list[Model], install: Install
) -> None:
    install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    loaded.append(model := await load(tmp_path, ON_GPU))
    assert model.spec.max_batch_size == 4
    assert (model.spec.inputs["x"].dims, model.spec.outputs["y"].dims) == ((4,), (4,))


async def test_a_configuration_that_contradicts_the_plan(tmp_path: Path, install: Install) -> None:
    install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    error = await refusal(tmp_path, BATCHED.replace("FP32", "FP16") + ON_GPU)
    assert "configuration expects datatype TYPE_FP16 for input 'x', model provides TYPE_FP32" in error.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape_tensors": ["x"]}, "tensor 'x' is a shape tensor, which is not supported"),
        ({"vectorized": ["y"]}, "tensor 'y' has another format than linear, which is not supported"),
        ({"inputs": {"x": ["FP8", [-1, 4]]}}, "unsupported datatype FP8 for tensor 'x'"),
    ],
)
async def test_tensors_that_cannot_be_served(
    tmp_path: Path, install: Install, changes: dict[str, Any], reason: str
) -> None:
    install((8, 0))
    write_plan(tmp_path / "1" / "model.plan", **changes)
    error = await refusal(tmp_path, BATCHED + ON_GPU)
    assert error.code is ErrorCode.UNIMPLEMENTED
    assert error.message.endswith(reason)


async def test_batches_and_what_is_freed(tmp_path: Path, install: Install) -> None:
    machine = install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    model = await load(tmp_path, BATCHED + "instance_group { count: 2 kind: KIND_GPU }")
    values = [1, 2, 3, 4, 5]
    answers = await asyncio.gather(*(infer(model, rows_of(1 + value % 2, value)) for value in values))
    for value, answer in zip(values, answers, strict=True):
        assert answer.tolist() == [[2.0 * value] * 4] * (1 + value % 2)
    assert len(machine.runs) < len(values)
    assert machine.engines == [0]
    assert len(machine.streams) == 2
    await model.close()
    await until(lambda: not machine.memory and not machine.streams)


async def test_answers_outlive_the_memory_that_they_were_copied_from(
    tmp_path: Path, loaded: list[Model], install: Install
) -> None:
    install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    loaded.append(model := await load(tmp_path, BATCHED + ON_GPU))
    answers = [await infer(model, rows_of(2, value)) for value in (1, 2, 3)]
    assert [answer[0, 0] for answer in answers] == [2, 4, 6]


async def test_a_batch_gets_the_nearest_profile(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    machine = install((8, 0))
    write_plan(tmp_path / "1" / "model.plan", profiles=TWO_PROFILES)
    loaded.append(model := await load(tmp_path, BATCHED + 'instance_group { kind: KIND_GPU profile: ["0", "1"] }'))
    for count in (1, 2, 5, 8):
        assert (await infer(model, rows_of(count))).shape == (count, 4)
    assert machine.runs == [0, 0, 1, 1]


async def test_instances_share_their_profiles(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    """A free instance runs batches that fit the profile of another instance."""
    machine = install((8, 0))
    write_plan(tmp_path / "1" / "model.plan", profiles=TWO_PROFILES)
    groups = "".join(f'instance_group {{ name: "{each}" kind: KIND_GPU profile: "{each}" }}' for each in (0, 1))
    loaded.append(model := await load(tmp_path, f"max_batch_size: 8 {TENSORS} {groups}"))
    await asyncio.gather(*(infer(model, rows_of(count)) for count in (8, 1, 7, 2)))
    assert sorted(machine.runs) == [0, 0, 1, 1]


async def test_shapes_that_no_profile_allows(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    install((8, 0))
    shapes = {"inputs": {"x": ["FLOAT", [-1, -1]]}, "outputs": {"y": ["FLOAT", [-1, -1]]}}
    write_plan(tmp_path / "1" / "model.plan", **shapes)
    text = BATCHED.replace("[4]", "[-1]")
    loaded.append(model := await load(tmp_path, text + ON_GPU))
    with pytest.raises(SluiceError) as caught:
        await infer(model, rows_of(1, columns=5))
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.INVALID,
        "request specifies invalid shape for input 'x' for m. Error details: model expected the shape of dimension 1 "
        "to be between 4 and 4 but received 5",
    )
    write_plan(tmp_path / "1" / "model.plan", **shapes, profiles=TWO_PROFILES)
    loaded.append(model := await load(tmp_path, text + 'instance_group { kind: KIND_GPU profile: ["0", "1"] }'))
    with pytest.raises(
        SluiceError, match=r"failed to find any Optimization Profile among \[ 0\[0\] 1\[1\]\] .* x \[1,5\]"
    ):
        await infer(model, rows_of(1, columns=5))


async def test_what_fails_on_the_gpu(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    machine = install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    loaded.append(model := await load(tmp_path, BATCHED + ON_GPU))
    machine.fails_to_execute = True
    with pytest.raises(SluiceError, match="failed to execute the plan: TensorRT gives no reason"):
        await infer(model, rows_of(1))
    machine.fails_to_execute = False
    assert (await infer(model, rows_of(1)))[0, 0] == 2


async def test_memory_that_there_is_not(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    install((8, 0))
    wide = {"inputs": {"x": ["FLOAT", [-1, -1]]}, "outputs": {"y": ["FLOAT", [-1, -1]]}}
    write_plan(tmp_path / "1" / "model.plan", **wide, profiles=[{"x": [[1, 1], [1, 4], [8, 1 << 20]]}])
    loaded.append(model := await load(tmp_path, BATCHED.replace("[4]", "[-1]") + ON_GPU))
    with pytest.raises(SluiceError, match="cudaMalloc on GPU 0 failed: out of memory"):
        await infer(model, rows_of(1, columns=1 << 19))
    assert (await infer(model, rows_of(1)))[0, 0] == 2


async def test_outputs_whose_size_depends_on_the_data(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    install((8, 0))
    write_plan(tmp_path / "1" / "model.plan", is_data_dependent=True)
    loaded.append(model := await load(tmp_path, BATCHED + ON_GPU))
    with pytest.raises(SluiceError, match="output 'y' of model 'm' has a size that depends on the data") as caught:
        await infer(model, rows_of(1))
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


async def test_what_was_cancelled_does_not_run(tmp_path: Path, loaded: list[Model], install: Install) -> None:
    machine = install((8, 0))
    write_plan(tmp_path / "1" / "model.plan")
    loaded.append(model := await load(tmp_path, BATCHED + ON_GPU))
    responses: list[InferResponse] = []
    model.submit(rows_of(1), responses.append).cancel()
    async with asyncio.timeout(PATIENCE_S):
        await model.wait_idle()
    assert (responses, machine.runs) == ([], [])

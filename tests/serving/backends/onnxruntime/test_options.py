"""Options of onnxruntime by Triton's names, execution providers, and 8-bit precision."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.onnxruntime import options
from sluice.serving.backends.onnxruntime.options import (
    build_session_options,
    choose_providers,
    lacks_vnni,
    missing_accelerators,
    parse_gpu_accelerators,
    read_run_entries,
)
from sluice.serving.instance import Placement
from sluice.serving.model import infer_one
from tests.serving.backends.builders import request
from tests.serving.backends.onnxruntime.parts import load, one_op


def config(text: str = "", **parameters: str) -> ModelConfig:
    parsed: ModelConfig = text_format.Parse(text, ModelConfig(name="m"))
    for key, value in parameters.items():
        parsed.parameters[key.replace("__", ".")].string_value = value
    return parsed


def test_parameters_of_a_session() -> None:
    options = build_session_options(
        config(
            intra_op_thread_count="3",
            inter_op_thread_count="2",
            execution_mode="1",
            enable_mem_arena="0",
            enable_mem_pattern="false",
            session__use_device_allocator_for_initializers="1",
        )
    )
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    assert options.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


def test_without_parameters_onnxruntime_decides_and_no_thread_spins() -> None:
    options = build_session_options(config())
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (0, 0)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (True, True)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    spinning = build_session_options(config(session__intra_op__allow_spinning="1"))
    assert spinning.get_session_config_entry("session.intra_op.allow_spinning") == "1"


@pytest.mark.parametrize(
    ("level", "expected"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_levels_are_triton_s(level: int, expected: str) -> None:
    options = build_session_options(config(f"optimization {{ graph {{ level: {level} }} }}"))
    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, expected)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intra_op_thread_count", "many"),
        ("inter_op_thread_count", "-1"),
        ("execution_mode", "2"),
        ("enable_mem_arena", "maybe"),
    ],
)
def test_wrong_values_are_named(key: str, value: str) -> None:
    with pytest.raises(
        SluiceError, match=f"unable to load model 'm', parameter '{key}' is '{value}', expected "
    ) as caught:
        build_session_options(config(**{key: value}))
    assert caught.value.code is ErrorCode.INVALID


async def test_the_arena_shrinks_after_each_run(tmp_path: Path) -> None:
    key = "memory.enable_memory_arena_shrinkage"
    text = f'parameters {{ key: "{key}" value: {{ string_value: "cpu:0" }} }}'
    assert read_run_entries(config(text)) == {key: "cpu:0"}
    model = await load(tmp_path, one_op("Neg"), text)
    assert (await infer_one(model, request(x=np.ones((1, 2), np.float32)))).outputs[0].array.tolist() == [[-1, -1]]
    await model.close()


def test_threads_are_the_configuration_s_before_those_of_a_host_policy() -> None:
    assert build_session_options(config(), num_threads=3).intra_op_num_threads == 3
    assert build_session_options(config(intra_op_thread_count="2"), num_threads=3).intra_op_num_threads == 2


def accelerated(*accelerators: str) -> ModelConfig:
    given = " ".join(f"gpu_execution_accelerator {{ {each} }}" for each in accelerators)
    return config(f"optimization {{ execution_accelerators {{ {given} }} }}")


ON_GPU = Placement("m_0", kind="GPU", gpu=1)


def test_an_accelerator_of_gpus_is_for_instances_on_them() -> None:
    cuda = accelerated('name: "cuda" parameters { key: "gpu_mem_limit" value: "1000" }')
    assert choose_providers(ON_GPU, cuda) == [
        ("CUDAExecutionProvider", {"gpu_mem_limit": "1000", "device_id": "1"}),
        "CPUExecutionProvider",
    ]
    assert choose_providers(ON_GPU, config())[0] == ("CUDAExecutionProvider", {"device_id": "1"})
    assert choose_providers(Placement("m_0", kind="GPU"), accelerated('name: "tensorrt"')) == ["CPUExecutionProvider"]
    without = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert [each[0] if isinstance(each, tuple) else each for each in providers_with("tensorrt")] == without
    with pytest.raises(SluiceError, match="unknown Execution Accelerator 'cudnn' is requested"):
        providers_with("cudnn")


def providers_with(name: str) -> list[options.Provider]:
    return choose_providers(ON_GPU, accelerated(f'name: "{name}"'))


def test_parameters_of_tensorrt() -> None:
    given = """name: "tensorrt" parameters { key: "precision_mode" value: "FP16" }
        parameters { key: "max_workspace_size_bytes" value: "64" }
        parameters { key: "trt_engine_cache_enable" value: "1" }"""
    assert parse_gpu_accelerators(accelerated(given)) == {
        "tensorrt": {"trt_fp16_enable": "1", "trt_max_workspace_size": "64", "trt_engine_cache_enable": "1"}
    }
    with pytest.raises(SluiceError, match="unsupported precision mode 'FP7' is requested"):
        parse_gpu_accelerators(accelerated('name: "tensorrt" parameters { key: "precision_mode" value: "FP7" }'))
    with pytest.raises(SluiceError, match="unknown parameter 'q' is provided for TensorRT Execution Accelerator"):
        parse_gpu_accelerators(accelerated('name: "tensorrt" parameters { key: "q" value: "1" }'))


def on_cpu(name: str) -> str:
    """Ask for an accelerator as Triton's tutorial on it does."""
    return f'optimization {{ execution_accelerators {{ cpu_execution_accelerator: [ {{ name: "{name}" }} ] }} }}'


async def test_the_openvino_accelerator_is_taken_and_a_note_says_that_onnxruntime_lacks_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = await load(tmp_path, one_op("Neg"), on_cpu("openvino"))
    assert (await infer_one(model, request(x=np.ones((1, 2), np.float32)))).outputs[0].array.tolist() == [[-1, -1]]
    await model.close()
    (line,) = [each.getMessage() for each in caplog.records if "accelerator" in each.getMessage()]
    assert line.startswith("model 'm': the installed onnxruntime has no accelerator 'openvino' and runs the model on")
    (found,) = missing_accelerators(config(on_cpu("openvino")))
    assert found.path == "optimization.execution_accelerators.cpu_execution_accelerator[0].name"


def test_an_accelerator_that_triton_does_not_know_is_refused() -> None:
    with pytest.raises(SluiceError, match="unknown Execution Accelerator 'onednn' is requested") as caught:
        choose_providers(Placement("m_0"), config(on_cpu("onednn")))
    assert caught.value.param == "optimization.execution_accelerators.cpu_execution_accelerator[0].name"
    assert choose_providers(Placement("m_0"), config()) == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("cpuinfo", "lacking"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512_vnni\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
    ],
)
def test_which_processors_add_8_bit_products_in_16_bits(cpuinfo: str, lacking: bool) -> None:
    assert lacks_vnni(cpuinfo) is lacking


@pytest.mark.parametrize(("overflows", "value"), [(True, "1"), (False, "0")])
def test_auto_is_what_the_processor_needs(monkeypatch: pytest.MonkeyPatch, overflows: bool, value: str) -> None:
    monkeypatch.setattr(options, "overflows_int8", lambda: overflows)
    config = ModelConfig(name="m")
    config.parameters["session.x64quantprecision"].string_value = "auto"
    assert options.build_session_options(config).get_session_config_entry("session.x64quantprecision") == value

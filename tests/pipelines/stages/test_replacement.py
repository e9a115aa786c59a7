"""Which Python models `--native-text-stages` replaces."""

import pytest
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import read_config
from sluice.pipelines.stages.backend import replace_python_stage
from tests import paths
from tests.pipelines.stages.parts import config_of
from tests.serving.config.parts import parse_config

REPOSITORY = paths.DATA / "tensorrtllm_backend"
STAGES = ("preprocessing", "postprocessing", "tensorrt_llm_bls")


def written(name: str, **parameters: str) -> ModelConfig:
    """One of NVIDIA's configurations, with the places that must hold numbers and types filled in."""
    text = (REPOSITORY / name / "config.pbtxt").read_text()
    for place in ("triton_max_batch_size", "max_queue_delay_microseconds", "max_queue_size"):
        text = text.replace(f"${{{place}}}", "4")
    for stage in ("preprocessing", "postprocessing", "bls"):
        text = text.replace(f"${{{stage}_instance_count}}", "1")
    text = text.replace("${logits_datatype}", "TYPE_FP16").replace("${decoupled_mode}", "true")
    config = parse_config(text, "config.pbtxt")[0]
    config.default_model_filename = "model.py"
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


@pytest.mark.parametrize("name", STAGES)
def test_nvidias_stages_are_known(name: str) -> None:
    native = replace_python_stage(written(name))
    assert (native.backend, native.default_model_filename) == (name, "")
    native.backend, native.default_model_filename = "python", "model.py"
    assert native == written(name)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("preprocessing", "multimodal_model_path"),
        ("tensorrt_llm_bls", "multimodal_encoders_name"),
        ("tensorrt_llm_bls", "tensorrt_llm_draft_model_name"),
    ],
)
def test_what_only_nvidias_can_stays_in_python(name: str, parameter: str, caplog: pytest.LogCaptureFixture) -> None:
    config = written(name, **{parameter: "given"})
    assert replace_python_stage(config) is config
    assert f"model '{name}' stays in Python: its parameter {parameter}" in caplog.text


def test_others_are_left_alone() -> None:
    other = written("preprocessing")
    other.input.add(name="LANGUAGE", data_type="TYPE_STRING", dims=[1])
    own = config_of(
        'name: "llm" backend: "python" input { name: "text_input" data_type: TYPE_STRING dims: 1 } '
        'input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 } '
        'output { name: "text_output" data_type: TYPE_STRING dims: -1 }'
    )
    onnx, wide = written("postprocessing"), written("postprocessing")
    onnx.backend = "onnxruntime"
    wide.input[0].data_type = DataType.TYPE_INT64
    for config in (other, own, onnx, wide, ModelConfig()):
        assert replace_python_stage(config) is config


def test_log_probabilities_are_optional_then() -> None:
    older = written("postprocessing")
    older.input.add(name="CUM_LOG_PROBS", data_type=DataType.TYPE_FP32, dims=[-1])
    older.output.add(name="OUT_CUM_LOG_PROBS", data_type=DataType.TYPE_FP32, dims=[-1])
    native = replace_python_stage(older)
    assert [each.name for each in native.input if each.optional] == ["CUM_LOG_PROBS"]
    assert native.backend == "postprocessing"


def test_flag_and_variable() -> None:
    assert read_config(parse_flags(["--native-text-stages"]), {}).repository.has_native_text_stages
    assert read_config({}, {"SLUICE_NATIVE_TEXT_STAGES": "1"}).repository.has_native_text_stages
    assert not read_config({}, {}).repository.has_native_text_stages

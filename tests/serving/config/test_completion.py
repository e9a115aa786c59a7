from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.completion import complete_kind, complete_name, fill_defaults, has_gpu
from sluice.serving.repository.loader import load_order
from tests.serving.config.parts import parse_config


def config_of(text: str) -> ModelConfig:
    return parse_config(text, "config.pbtxt")[0]


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("", ["model.onnx"], ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        ("", ["model.py"], ("", "python", "model.py")),
        ("", ["model.plan"], ("tensorrt_plan", "tensorrt", "model.plan")),
        ("", ["model.pt"], ("pytorch_libtorch", "pytorch", "model.pt")),
        ("", ["model.graphdef"], ("tensorflow_graphdef", "tensorflow", "model.graphdef")),
        ("", ["model.savedmodel"], ("tensorflow_savedmodel", "tensorflow", "model.savedmodel")),
        ("", ["model.xml", "model.bin"], ("", "openvino", "model.xml")),
        ("", ["config.json", "model.safetensors"], ("", "llm", "")),
        ("", ["config.json", "openvino_model.xml"], ("", "llm", "")),
        ("", ["rank0.engine"], ("", "llm", "")),
        ("", ["model.tokenizer"], ("", "tokenizer", "")),
        ("platform: 'onnxruntime_onnx'", [], ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        ("backend: 'onnxruntime'", [], ("onnxruntime_onnx", "onnxruntime", "model.onnx")),
        ("backend: 'tensorflow'", ["model.graphdef"], ("tensorflow_graphdef", "tensorflow", "model.graphdef")),
        ("backend: 'python' default_model_filename: 'm.py'", [], ("", "python", "m.py")),
        ("backend: 'tensorrtllm'", [], ("", "tensorrtllm", "")),
        ("backend: 'mine' platform: 'whatever'", ["model.py"], ("whatever", "mine", "")),
        ("platform: 'ensemble'", ["model.py"], ("ensemble", "", "")),
    ],
)
def test_what_tells_a_models_kind(tmp_path: Path, text: str, files: list[str], expected: tuple[str, str, str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    config = config_of(text)
    complete_kind(config, [tmp_path], BackendRegistry())
    assert (config.platform, config.backend, config.default_model_filename) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 'other'", "unexpected directory name 'm' for model 'other', directory name must equal model name"),
        ("platform: 'foo'", "unexpected platform type 'foo' for m"),
        ("", "Invalid model name: Could not determine backend for model 'm' with no backend in model configuration. "
             "Expected model name of the form 'model.<backend_name>'."),
    ],
)  # fmt: skip
def test_models_of_no_kind(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SluiceError) as caught:
        config = config_of(text)
        complete_name(config, "m")
        complete_kind(config, [tmp_path], BackendRegistry())
    assert caught.value.message == message


def test_the_highest_version_decides(tmp_path: Path) -> None:
    for version, file in ((2, "model.onnx"), (1, "model.custom")):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / file).touch()
    config = ModelConfig()
    complete_kind(config, [tmp_path / "2", tmp_path / "1"], BackendRegistry())
    assert config.backend == "onnxruntime"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "version_policy { latest { num_versions: 1 } } optimization { input_pinned_memory { enable: true } "
             "output_pinned_memory { enable: true } } instance_group { name: 'm' count: 1 kind: KIND_CPU }"),
        ("optimization { input_pinned_memory { } } version_policy { all {} } instance_group { }",
         "version_policy { all {} } optimization { input_pinned_memory { } output_pinned_memory { enable: true } } "
         "instance_group { name: 'm_0' count: 1 kind: KIND_CPU }"),
        ("instance_group { name: 'a' kind: KIND_GPU count: 3 gpus: 1 } instance_group { kind: KIND_MODEL }",
         "version_policy { latest { num_versions: 1 } } optimization { input_pinned_memory { enable: true } "
         "output_pinned_memory { enable: true } } instance_group { name: 'a' kind: KIND_GPU count: 3 gpus: 1 } "
         "instance_group { name: 'm_1' count: 1 kind: KIND_MODEL }"),
        ("platform: 'ensemble' version_policy { specific { versions: 4 } }",
         "platform: 'ensemble' version_policy { specific { versions: 4 } }"),
    ],
)  # fmt: skip
def test_defaults(text: str, expected: str) -> None:
    config = config_of(f"name: 'm' {text}")
    fill_defaults(config)
    assert config == config_of(f"name: 'm' {expected}")
    fill_defaults(config)
    assert config == config_of(f"name: 'm' {expected}")


def test_a_tensor_declared_twice_in_the_same_words_is_one() -> None:
    output = "output { name: 'Y' data_type: TYPE_INT32 dims: 1 }"
    config = config_of(f"name: 'm' {output} output {{ name: 'Z' }} {output}")
    fill_defaults(config)
    assert [each.name for each in config.output] == ["Y", "Z"]


def test_batchers_prefer_the_largest_batch() -> None:
    config = config_of("max_batch_size: 8 dynamic_batching {}")
    fill_defaults(config)
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    config = config_of("max_batch_size: 8 sequence_batching { oldest {} }")
    fill_defaults(config)
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [8]
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    config = config_of("dynamic_batching {}")
    fill_defaults(config)
    assert not config.dynamic_batching.preferred_batch_size


def test_with_a_gpu_auto_is_left_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.serving.config.completion.num_gpus", lambda: 1)
    assert has_gpu()
    config = config_of("instance_group { kind: KIND_AUTO }")
    fill_defaults(config)
    assert config.instance_group[0].kind == config.instance_group[0].KIND_AUTO


def test_load_order() -> None:
    members = {"e": ["d", "a", "outside"], "d": ["a", "b"], "a": [], "b": [], "x": ["y"], "y": ["z"], "z": ["y"]}
    order, circular = load_order(members)
    assert sorted(order) == ["a", "b", "d", "e", "x"]
    assert order.index("d") > max(order.index("a"), order.index("b"))
    assert order.index("e") > order.index("d")
    assert circular == {
        "y": "circular dependency between ensembles: y -> z -> y",
        "z": "circular dependency between ensembles: z -> y -> z",
    }

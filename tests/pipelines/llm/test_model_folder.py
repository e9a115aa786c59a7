"""Files of arguments for TensorRT-LLM's LLM class."""

from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.configuration import complete_config
from sluice.pipelines.llm.model_folder import ModelYaml, read_argument_file, read_model_yaml
from sluice.pipelines.llm.parameters import merge_arguments


def write(folder: Path, text: str) -> Path:
    path = folder / "model.yaml"
    path.write_text(text)
    return path


def test_reads_what_json_has_too(tmp_path: Path) -> None:
    text = (
        "kv_cache_config:\n  max_attention_window: [4096, 256]\nspeculative_config: {decoding_type: MTP}\ndtype: null"
    )
    assert read_argument_file(write(tmp_path, text)) == {
        "kv_cache_config": {"max_attention_window": [4096, 256]},
        "speculative_config": {"decoding_type": "MTP"},
        "dtype": None,
    }
    assert read_argument_file(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: [1, 2\nc: 3", "line 3, column 2: expected ',' or ']'"),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("a: !!python/name:os.system x", "line 1, column 4: could not determine a constructor"),
        ("- a\n- b", "it must be a mapping of arguments"),
        ("text", "it must be a mapping of arguments"),
        ("a: \x00", "it cannot be read"),
    ],
)
def test_says_where_it_is_no_such_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_argument_file(write(tmp_path, text))
    assert str(caught.value).startswith(words)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it cannot be read: .*No such file"):
        read_argument_file(tmp_path / "none.yaml")
    assert read_model_yaml(tmp_path) == ModelYaml()


def test_a_models_file_has_three_parts(tmp_path: Path) -> None:
    write(
        tmp_path,
        "model: acme/tiny\nbackend: pytorch\ntensor_parallel_size: 2\nmax_num_tokens: 4096\n"
        "triton_config:\n  max_batch_size: 8\n  decoupled: false\n",
    )
    texts = {"model": "acme/tiny", "tensor_parallel_size": "2"}
    assert read_model_yaml(tmp_path) == ModelYaml({"backend": "pytorch", "max_num_tokens": 4096}, texts, False, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("triton_config: 3", "triton_config must be a mapping of max_batch_size, decoupled"),
        ("triton_config: {max_batch: 3}", "triton_config has no 'max_batch'"),
        ("triton_config: {decoupled: 1}", "triton_config.decoupled must be true or false, got 1"),
        (
            "triton_config: {max_batch_size: -1}",
            "triton_config.max_batch_size must be an integer of at least 0, got -1",
        ),
        (
            "triton_config: {multimodal: {model_type: qwen2_vl}}",
            "triton_config.multimodal must be true or false, got {'model_type': 'qwen2_vl'}",
        ),
        ("pytorch_backend_config: {use_cuda_graph: true}", "pytorch_backend_config is no argument: TensorRT-LLM 1.0"),
        ("backend: vllm", "backend must be pytorch or tensorrt, got 'vllm'"),
        ("a: [", "line 1, column 5: "),
    ],
)
def test_says_what_is_wrong_with_a_models_file(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SluiceError) as caught:
        read_model_yaml(tmp_path)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.message.startswith(f"cannot take {path}: {words}")


def test_empty_sections_of_nvidias_file_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "logits_post_processors:\ntriton_config: {multimodal: null, decoupled: true}\n")
    assert read_model_yaml(tmp_path) == ModelYaml(decoupled=True)


def test_what_is_nested_is_merged() -> None:
    under = {"a": 1, "kv": {"x": 1, "y": {"z": 1}}, "n": {"m": 1}}
    over = {"b": 2, "kv": {"y": {"w": 2}}, "n": None}
    assert merge_arguments(under, over) == {"a": 1, "b": 2, "kv": {"x": 1, "y": {"z": 1, "w": 2}}, "n": None}


def test_triton_config_completes_a_configuration() -> None:
    yaml = ModelYaml(decoupled=False, max_batch_size=8)
    config = complete_config(ModelConfig(name="m"), yaml)
    assert (config.max_batch_size, config.model_transaction_policy.decoupled) == (8, False)
    given = ModelConfig(name="m", max_batch_size=2)
    given.model_transaction_policy.decoupled = True
    kept = complete_config(given, yaml)
    assert (kept.max_batch_size, kept.model_transaction_policy.decoupled) == (2, True)

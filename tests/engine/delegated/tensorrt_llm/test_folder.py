"""The facts of model folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.delegated.tensorrt_llm.folder import read_folder
from sluice.engine.model_folder import ModelFormat
from sluice.errors import ErrorCode, SluiceError
from tests.stand_ins.model_folders import BUILT, EOS, MAX_POSITIONS, VOCAB_SIZE, make_checkpoint, make_compiled_engine

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, name: str, value: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def huggingface(folder: Path, **more: Any) -> Path:
    write(folder, "config.json", {**LLAMA, **more})
    return folder


def test_a_huggingface_checkpoint(checkpoint: Path) -> None:
    folder = read_folder(checkpoint)
    assert (folder.format, folder.model_type, folder.vocab_size) == (ModelFormat.HUGGINGFACE, "llama", VOCAB_SIZE)
    assert (folder.eos_token_ids, folder.max_model_len, folder.quantization) == ((EOS,), MAX_POSITIONS, "none")
    assert folder.build_config is None and folder.parallel_sizes == {}


def test_a_converted_checkpoint(converted_checkpoint: Path) -> None:
    folder = read_folder(converted_checkpoint)
    assert folder.format is ModelFormat.TENSORRT_LLM_CHECKPOINT
    assert (folder.model_type, folder.dtype) == ("LlamaForCausalLM", "bfloat16")
    assert folder.parallel_sizes == {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def test_a_compiled_engine_tells_its_limits(compiled_engine: Path) -> None:
    folder = read_folder(compiled_engine)
    assert (folder.format, folder.max_model_len) == (ModelFormat.TENSORRT_LLM_ENGINE, BUILT["max_seq_len"])
    assert folder.build_config == BUILT


def test_the_text_part_of_a_larger_model_counts(tmp_path: Path) -> None:
    text = {"vocab_size": 300, "max_position_embeddings": 4096, "model_type": "gemma3_text", "dtype": "float16"}
    config = {"architectures": ["Gemma3"], "model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}
    write(tmp_path, "config.json", config)
    folder = read_folder(tmp_path)
    assert (folder.vocab_size, folder.max_model_len, folder.model_type) == (300, 4096, "gemma3_text")
    assert (folder.eos_token_ids, folder.dtype) == ((1, 106), "float16")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, (8, 9)),
        ({"eos_token_id": [7, 8]}, {"temperature": 1}, (7, 8)),
        ({}, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_ends_are_generation_config_s_first(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    huggingface(tmp_path, **config)
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert read_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "lstrip": False}])
def test_an_engine_s_ends_are_found_with_its_tokenizer(tmp_path: Path, token: Any) -> None:
    engine, tokenizer = make_compiled_engine(tmp_path / "engine"), tmp_path / "tokenizer"
    write(tokenizer, "tokenizer_config.json", {"eos_token": token})
    write(tokenizer, "tokenizer.json", {"added_tokens": [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]})
    assert read_folder(engine).eos_token_ids == ()
    assert read_folder(engine, tokenizer).eos_token_ids == (2,)
    write(tokenizer, "generation_config.json", {"eos_token_id": [4, 5]})
    assert read_folder(engine, tokenizer).eos_token_ids == (4, 5)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
def test_quantisation_is_read_from_the_config(tmp_path: Path, told: dict[str, Any], expected: str) -> None:
    assert read_folder(huggingface(tmp_path, quantization_config=told)).quantization == expected


def test_quantisation_by_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    huggingface(tmp_path, quantization_config={"quant_method": "other"})
    write(tmp_path, "hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}})
    assert read_folder(tmp_path).quantization == "fp8"


def test_quantisation_of_an_engine(tmp_path: Path) -> None:
    engine = make_compiled_engine(tmp_path / "engine")
    config = json.loads((engine / "config.json").read_text())
    config["pretrained_config"]["quantization"]["quant_algo"] = "W4A16_AWQ"
    write(engine, "config.json", config)
    assert read_folder(engine).quantization == "w4a16_awq"


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"type": "dynamic", "factor": 2}, 128),
        ({"rope_type": "llama3", "factor": 8.0}, 64),
        (None, 64),
    ],
)
def test_rope_scaling_may_make_the_context_longer(tmp_path: Path, rope: dict[str, Any] | None, expected: int) -> None:
    assert read_folder(huggingface(tmp_path, rope_scaling=rope)).max_model_len == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "is not a JSON object"),
        ({"model_type": "llama", "vocab_size": 5}, "must have max_position_embeddings"),
        ({"max_position_embeddings": 5, "vocab_size": 0}, "vocab_size must be a whole number of 1 or more, got 0"),
        ({"max_position_embeddings": 5, "vocab_size": True}, "vocab_size must be a whole number"),
    ],
)
def test_a_config_that_says_too_little_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    write(tmp_path, "config.json", config)
    with pytest.raises(SluiceError, match=message) as refused:
        read_folder(tmp_path)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, "model_path")


def test_a_folder_without_a_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SluiceError) as refused:
        read_folder(tmp_path / "absent")
    assert refused.value.code is ErrorCode.NOT_FOUND


def test_an_engine_without_its_limits_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"architecture": "LlamaForCausalLM"})
    (tmp_path / "rank0.engine").touch()
    with pytest.raises(SluiceError, match="pretrained_config and build_config"):
        read_folder(tmp_path)


def test_an_ir_is_not_its_business(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "openvino_model.xml").touch()
    with pytest.raises(SluiceError, match="holds no model that TensorRT-LLM runs: openvino_ir"):
        read_folder(tmp_path / "model")


@pytest.mark.parametrize("more", [{"max_position_embeddings": -5}, {"rope_scaling": {"type": "linear", "factor": 0}}])
def test_a_context_of_no_token_is_refused(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(SluiceError, match="the longest context must be of 1 token or more, got") as refused:
        read_folder(huggingface(tmp_path, **more))
    assert refused.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("added", [["</s>"], {"</s>": 2}, None])
def test_a_list_of_added_tokens_that_nobody_can_read_tells_no_end(tmp_path: Path, added: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"eos_token": "</s>"})
    write(tmp_path, "tokenizer.json", {"added_tokens": added})
    assert read_folder(huggingface(tmp_path)).eos_token_ids == ()

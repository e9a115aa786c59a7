"""`load_runner` for valid configurations, and its errors for others."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino
import openvino.op
import pytest
from safetensors.numpy import load_file, save_file

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.conftest import EditableCheckpoint
from tests.engine.runners.drive import Driver, Prompt
from tests.engine.runners.goldens import read_goldens
from tests.errors import error_of
from tests.under_test import load_runner, runtime

BLOCK_BYTES = 3 * 2 * 2 * 32 * 16 * 4
"""llama_tiny in f32: layers, K and V, key heads, tokens, head size, element."""


def load(path: Path, **limits: Any) -> Any:
    return load_runner(EngineConfig(model_path=str(path), **{"dtype": "f32", "num_blocks": 4, **limits}))


def refusal(path: Path, **limits: Any) -> SluiceError:
    return error_of(load, path, **limits)


def test_info(checkpoint: EditableCheckpoint) -> None:
    info = load(checkpoint.path).info
    assert (info.runtime, info.model_type, info.dtype) == (runtime(), "llama", "f32")
    assert (info.vocab_size, info.max_model_len, info.block_size, info.num_blocks) == (256, 512, 32, 4)
    assert info.eos_token_ids == (2, 7)


@pytest.mark.parametrize(("config", "generation", "expected"), [(9, None, (9,)), ([9, 4], None, (9, 4)), (9, 3, (3,))])
def test_eos_token_ids(
    checkpoint: EditableCheckpoint, config: int | list[int], generation: int | None, expected: tuple[int, ...]
) -> None:
    checkpoint.edit(eos_token_id=config)
    checkpoint.edit("generation_config.json", eos_token_id=generation)
    assert load(checkpoint.path).info.eos_token_ids == expected


def test_generation_config_may_be_absent(checkpoint: EditableCheckpoint) -> None:
    (checkpoint.path / "generation_config.json").unlink()
    assert load(checkpoint.path).info.eos_token_ids == (2,)


@pytest.mark.openvino
def test_auto_dtype_follows_the_cpu(checkpoint: EditableCheckpoint) -> None:
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert load(checkpoint.path, dtype="auto").info.dtype == ("bf16" if has_bf16 else "f32")


def test_cache_fills_the_memory_given(checkpoint: EditableCheckpoint) -> None:
    info = load(checkpoint.path, num_blocks=None, kv_cache_memory_bytes=10 * BLOCK_BYTES + 1).info
    assert info.num_blocks == 10


def split(directory: Path) -> tuple[Path, Path]:
    """Split the weights into two files with an index, as transformers does for large ones."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = directory / "model-00001-of-00002.safetensors", directory / "model-00002-of-00002.safetensors"
    weight_map: dict[str, str] = {}
    for part, chosen in zip(parts, (names[:9], names[9:]), strict=True):
        save_file({name: tensors[name] for name in chosen}, part)
        weight_map |= dict.fromkeys(chosen, part.name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    return parts


def answer(directory: Path, **limits: Any) -> list[list[int]]:
    return Driver(load(directory, **limits)).generate([Prompt(read_goldens("qwen3_tiny")[1].prompt_token_ids, 8)])


def generates_its_golden(directory: Path) -> bool:
    golden = read_goldens("qwen3_tiny")[1]
    prompt = Prompt(golden.prompt_token_ids, golden.max_tokens, golden.repetition_penalty)
    return Driver(load(directory)).generate([prompt]) == [golden.token_ids]


def test_weights_in_several_files(float_checkpoint: EditableCheckpoint) -> None:
    split(float_checkpoint.path)
    assert generates_its_golden(float_checkpoint.path)
    (float_checkpoint.path / "model.safetensors.index.json").unlink()
    assert generates_its_golden(float_checkpoint.path)


def test_a_tensor_in_two_files_is_refused_with_the_names_of_both(float_checkpoint: EditableCheckpoint) -> None:
    directory = float_checkpoint.path
    split(directory)
    (directory / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": np.ones(64, np.float32)}, directory / "pytorch_model.safetensors")
    error = refusal(directory)
    assert error.code is ErrorCode.INVALID
    assert error.message == (
        "tensor 'model.norm.weight' is in model-00002-of-00002.safetensors and in pytorch_model.safetensors; remove "
        "the file that is not the model's"
    )


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.openvino)])
def test_an_lm_head_that_differs_from_the_embedding_is_used_though_config_json_ties_them(
    float_checkpoint: EditableCheckpoint, caplog: pytest.LogCaptureFixture, tmp_path: Path, quantization: str
) -> None:
    """As transformers does. An equal one is the embedding, stored again."""
    limits = {"quantization": quantization, "cache_path": str(tmp_path / "cache")}
    float_checkpoint.edit(tie_word_embeddings=False)
    expected = answer(float_checkpoint.path, **limits)
    float_checkpoint.edit(tie_word_embeddings=True)
    assert answer(float_checkpoint.path, **limits) == expected
    assert "has an LM head of its own" in caplog.text
    caplog.clear()
    path = float_checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, path)
    tied = answer(float_checkpoint.path, **limits)
    assert tied != expected
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, path)
    assert answer(float_checkpoint.path, **limits) == tied
    assert caplog.text == ""


@pytest.mark.parametrize("is_split", [False, True])
def test_other_files_beside_the_weights_are_left_alone(float_checkpoint: EditableCheckpoint, is_split: bool) -> None:
    directory = float_checkpoint.path
    if is_split:
        split(directory)
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        (directory / name).write_bytes(b"not even a safetensors file")
    if not is_split:
        (directory / "model-old.safetensors").write_bytes(b"nor this")
    assert generates_its_golden(directory)


def test_a_missing_part(float_checkpoint: EditableCheckpoint) -> None:
    _, second = split(float_checkpoint.path)
    second.unlink()
    error = refusal(float_checkpoint.path)
    assert error.code is ErrorCode.NOT_FOUND
    assert error.message == (
        f"{float_checkpoint.path} lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names; "
        "is the download complete?"
    )


@pytest.mark.parametrize(
    ("file", "becomes", "code", "expected"),
    [
        pytest.param("config.json", None, ErrorCode.NOT_FOUND, "config.json does not exist", id="no config"),
        pytest.param("config.json", b"{", ErrorCode.INVALID, "config.json is not a JSON object", id="no JSON"),
        pytest.param("model.safetensors", None, ErrorCode.NOT_FOUND, "no *.safetensors", id="no weights"),
        pytest.param("model.safetensors", b"half", ErrorCode.INVALID, "model.safetensors is damaged", id="half a file"),
        *(
            pytest.param(
                "model.safetensors.index.json", text, ErrorCode.INVALID, "is no index of weights", id=str(text)
            )
            for text in (b"{", b"{}", b'{"weight_map": 3}')
        ),
    ],
)
def test_a_missing_or_damaged_file(
    checkpoint: EditableCheckpoint, file: str, becomes: bytes | None, code: ErrorCode, expected: str
) -> None:
    """Half of a file of weights, an index without them."""
    weights = checkpoint.path / "model.safetensors"
    if becomes is None:
        (checkpoint.path / file).unlink()
    else:
        (checkpoint.path / file).write_bytes(weights.read_bytes()[:-1000] if becomes == b"half" else becomes)
    if "index" in file:
        weights.unlink()
    error = refusal(checkpoint.path)
    assert error.code is code
    assert expected in error.message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": None}, "config.json: Object missing required field `hidden_size`"),
        ({"hidden_size": "64"}, "config.json: Expected `int`, got `str` - at `$.hidden_size`"),
        ({"num_hidden_layers": 0}, "config.json: Expected `int` >= 1 - at `$.num_hidden_layers`"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        (
            {"intermediate_size": 100},
            "tensor 'model.layers.0.mlp.gate_proj.weight' has shape (128, 64); by config.json it must be (100, 64)",
        ),
        (
            {"vocab_size": 300},
            "tensor 'model.embed_tokens.weight' has shape (256, 64); by config.json it must be (300, 64)",
        ),
        (
            {"hidden_size": 128},
            "tensor 'model.embed_tokens.weight' has shape (256, 64); by config.json it must be (256, 128)",
        ),
        (
            {"num_attention_heads": 8, "head_dim": 16},
            "tensor 'model.layers.0.self_attn.q_proj.weight' has shape (64, 64); by config.json it must be (128, 64)",
        ),
        (
            {"num_key_value_heads": 4},
            "tensor 'model.layers.0.self_attn.k_proj.weight' has shape (32, 64); by config.json it must be (64, 64)",
        ),
        (
            {"num_hidden_layers": 4},
            "config.json: num_hidden_layers is 4, but the checkpoint has tensors of 3 layers; correct it, or complete "
            "the download",
        ),
        (
            {"num_hidden_layers": 1},
            "config.json: num_hidden_layers is 1, but the checkpoint has tensors of 3 layers, and 18 tensors "
            "(model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, …) would not be used",
        ),
        (
            {"tie_word_embeddings": False},
            "the checkpoint has no tensor 'lm_head.weight'; by config.json it must be (256, 64)",
        ),
        ({"attention_bias": True}, "the checkpoint has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4}}, "missing required field `low_freq_factor`"),
    ],
)
def test_invalid_config(checkpoint: EditableCheckpoint, fields: dict[str, Any], expected: str) -> None:
    checkpoint.edit(**fields)
    error = refusal(checkpoint.path)
    assert error.code is ErrorCode.INVALID
    assert expected in error.message


def add_tensors(directory: Path, *names: str) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **dict.fromkeys(names, np.ones(3, np.float32))}, path)


def test_tensors_of_layers_that_the_graph_does_not_use_are_refused(float_checkpoint: EditableCheckpoint) -> None:
    add_tensors(float_checkpoint.path, "model.layers.1.self_attn.q_proj.bias")
    error = refusal(float_checkpoint.path)
    assert error.code is ErrorCode.INVALID
    assert error.message == (
        "a model of type qwen3 by this config.json has no use for 1 tensor (model.layers.1.self_attn.q_proj.bias) of "
        "its layers; model_type, or a field such as attention_bias, is of another model"
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_proj.k_scale",
        "mtp.layers.0.input_layernorm.weight",
        "vision_tower.encoder.layers.0.weight",
    ],
)
def test_leftover_tensors_known_to_be_harmless_are_ignored(
    float_checkpoint: EditableCheckpoint, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    add_tensors(float_checkpoint.path, name)
    assert generates_its_golden(float_checkpoint.path)
    assert "does not use" not in caplog.text


def test_layers_that_draft_are_ignored_if_config_json_counts_them(float_checkpoint: EditableCheckpoint) -> None:
    num_layers = msgspec.json.decode((float_checkpoint.path / "config.json").read_bytes())["num_hidden_layers"]
    add_tensors(float_checkpoint.path, f"model.layers.{num_layers}.eh_proj.weight")
    assert f"num_hidden_layers is {num_layers}, but" in refusal(float_checkpoint.path).message
    float_checkpoint.edit(num_nextn_predict_layers=1)
    assert generates_its_golden(float_checkpoint.path)


def test_other_leftover_tensors_are_named_in_a_warning(
    float_checkpoint: EditableCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    add_tensors(float_checkpoint.path, "score.weight", "v_head.bias", "v_head.weight")
    assert generates_its_golden(float_checkpoint.path)
    assert "has 3 tensors (score.weight, v_head.bias, …) that the model does not use" in caplog.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not supported by Sluice's own executor: its layers keep"),
        ({"model_type": "opt"}, "model_type 'opt' is not among those built from a checkpoint: apertus, arcee,"),
        ({"rope_parameters": {"rope_type": "axial"}}, "rope type 'axial' is not supported; supported: default, linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        pytest.param(
            {"quantization_config": {"quant_method": "gptq"}},
            "quantized checkpoints are not supported (this one: gptq)",
            marks=pytest.mark.openvino,
        ),
        ({"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported; supported: silu"),
    ],
)
def test_unsupported_model(checkpoint: EditableCheckpoint, fields: dict[str, Any], expected: str) -> None:
    checkpoint.edit(**fields)
    error = refusal(checkpoint.path)
    assert error.code is ErrorCode.UNIMPLEMENTED
    assert expected in error.message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"model_type": "bloom", "n_embed": 768}', "is installed: pip install 'sluice[convert]'"),
        ('{"hidden_size": 64}', "config.json has no model_type"),
    ],
)
def test_the_family_is_looked_at_first(tmp_path: Path, config: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert expected in refusal(tmp_path).message


@pytest.mark.openvino
def test_unsupported_tensor_type(float_checkpoint: EditableCheckpoint) -> None:
    path = float_checkpoint.path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float64)
    save_file(tensors, path)
    error = refusal(float_checkpoint.path)
    assert error.code is ErrorCode.UNIMPLEMENTED
    assert error.message == "tensor 'lm_head.weight' is stored as F64; supported: BF16, F16, F32"


@pytest.mark.parametrize(
    ("limits", "param", "expected"),
    [
        (
            {"max_model_len": 513},
            "max_model_len",
            "max_model_len must be 1 to 512, what the model was made for; got 513",
        ),
        ({"max_model_len": 0}, "max_model_len", "got 0"),
        ({"num_blocks": 0}, "num_blocks", "num_blocks must be at least 1, got 0"),
        (
            {"num_blocks": None, "kv_cache_memory_bytes": BLOCK_BYTES - 1},
            "kv_cache_memory_bytes",
            f"the KV cache would have {BLOCK_BYTES - 1} bytes (kv_cache_memory_bytes), "
            f"less than one block of 32 tokens of this model takes ({BLOCK_BYTES} bytes)",
        ),
        ({"num_blocks": 1 << 60}, "num_blocks", "cannot be allocated"),
        pytest.param(
            {"dtype": "int8"}, "dtype", "dtype must be auto, bf16 or f32, got 'int8'", marks=pytest.mark.openvino
        ),
        ({"num_threads": 0}, "num_threads", "num_threads must be at least 1, got 0"),
    ],
)
def test_invalid_limits(checkpoint: EditableCheckpoint, limits: dict[str, Any], param: str, expected: str) -> None:
    error = refusal(checkpoint.path, **limits)
    assert (error.code, error.param) == (ErrorCode.INVALID, param)
    assert expected in error.message


@pytest.mark.openvino
def test_another_openvino(checkpoint: EditableCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paged-attention node with other inputs, simulated by the real one with one input too few."""
    node = openvino.op._PagedAttentionExtension
    monkeypatch.setattr(openvino.op, "_PagedAttentionExtension", lambda inputs: node(inputs[:-1]))
    error = refusal(checkpoint.path)
    assert error.code is ErrorCode.UNAVAILABLE
    assert f"openvino {openvino.__version__} is not the one Sluice knows (28 inputs)" in error.message

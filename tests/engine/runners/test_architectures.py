"""Each family has, in float32, the tokens of transformers, and its logits up to rounding."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from engine.config import EngineConfig
from engine.runners.base import FloatArray, Runner
from engine.runners.openvino.architectures import read_decoder_config
from engine.runners.openvino.runner import load_runner
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.drive import Driver, Prompt, prefill
from tests.engine.runners.family_goldens import NAMES, FamilyGolden, read_family
from tests.goldens.checkpoints import write_checkpoint

TOLERANCE = 3e-5
"""Largest allowed difference of a logit, as a share of the largest logit."""


def load(golden: FamilyGolden, directory: Path) -> Runner:
    write_checkpoint(golden.blueprint, directory)
    return load_runner(
        EngineConfig(model_path=str(directory), dtype="f32", num_blocks=40, max_model_len=golden.max_model_len)
    )


def difference(runner: Runner, golden: FamilyGolden) -> float:
    """Return the largest difference from the recorded logits, as a share of the largest of those."""
    prompt = golden.cases[-1].prompt_token_ids
    actual = prefill(runner, prompt, sampled_rows=[len(prompt) // 2, len(prompt) - 1])
    expected: FloatArray = np.array(golden.logits, np.float32)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_same_logits_and_tokens(name: str, tmp_path: Path) -> None:
    """Tokens come from prefill chunks and decodes mixed in one step."""
    golden = read_family(name)
    runner = load(golden, tmp_path)
    assert difference(runner, golden) < TOLERANCE
    prompts = [
        Prompt(case.prompt_token_ids, case.max_tokens, first_step=2 * index) for index, case in enumerate(golden.cases)
    ]
    generated = Driver(runner, chunk_sizes=(7, 30, 50), seed=4).generate(prompts)
    assert generated == [case.token_ids for case in golden.cases]
    runner.close()


MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("exaone4", {"sliding_window": 20}),
    ("exaone4", {"layer_types": ["sliding_attention"] * 4}),
    ("gemma2", {"final_logit_softcapping": 3.1}),
    ("gemma2", {"query_pre_attn_scalar": 25}),
    ("gemma2_softcap", {"attn_logit_softcapping": 2.1}),
    ("gemma2_softcap", {"sliding_window": 18}),
    ("gemma2_softcap", {"sliding_window": 20}),
    ("gemma3_old_spelling", {"rope_local_base_freq": 550.0}),
    ("gemma3_old_spelling", {"rope_theta": 60_000.0}),
    ("gemma3_old_spelling", {"sliding_window_pattern": 2}),
    ("granite", {"embedding_multiplier": 6.1}),
    ("granite", {"attention_multiplier": 0.11}),
    ("granite", {"residual_multiplier": 0.41}),
    ("granite", {"logits_scaling": 0.51}),
    ("mistral", {"sliding_window": 31}),
    ("mistral", {"sliding_window": 33}),
    ("phi3_default", {"partial_rotary_factor": 0.75}),
    ("qwen2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
    ("qwen2", {"rms_norm_eps": 1e-2}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
]
"""Configurations with one error each."""


@pytest.mark.parametrize(("name", "fields"), MUTATIONS)
def test_every_field_matters(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """The goldens detect errors: the logits of a wrong configuration differ from the recorded ones."""
    golden = read_family(name)
    wrong = replace(golden, blueprint=replace(golden.blueprint, config={**golden.blueprint.config, **fields}))
    runner = load(wrong, tmp_path)
    assert difference(runner, golden) > 50 * TOLERANCE
    runner.close()


def test_softcapped_attention_needs_a_cache_of_floats(tmp_path: Path) -> None:
    write_checkpoint(read_family("gemma2_softcap").blueprint, tmp_path)
    with pytest.raises(SluiceError, match="kv_cache_dtype must be auto for this model, got u8") as caught:
        load_runner(EngineConfig(model_path=str(tmp_path), dtype="f32", kv_cache_dtype="u8", num_blocks=40))
    assert caught.value.param == "kv_cache_dtype"


@pytest.mark.parametrize(("name", "factors"), [("phi3_short", "short_factor"), ("phi3_long", "long_factor")])
def test_the_log_says_which_longrope_factors_max_model_len_chose(
    name: str, factors: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = load(read_family(name), tmp_path)
    expected = f"longrope: {factors} for every sequence, because max_model_len is {runner.info.max_model_len} and "
    assert expected in caplog.text
    runner.close()


@pytest.mark.parametrize(("name", "outer"), [("gemma3", "gemma3"), ("ministral3", "mistral3")])
@pytest.mark.parametrize(
    ("body", "head"), [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
def test_the_text_part_of_a_model_with_images(name: str, outer: str, body: str, head: str, tmp_path: Path) -> None:
    """Its fields are in a section of config.json, its tensors have longer names; the rest is ignored."""
    golden = read_family(name)
    write_checkpoint(golden.blueprint, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {key.replace("model.", body, 1).replace("lm_head.", head): value for key, value in weights.items()}
    save_file({**renamed, "vision_tower.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    config = {"model_type": outer, "text_config": golden.blueprint.config, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    runner = load_runner(EngineConfig(model_path=str(tmp_path), dtype="f32", num_blocks=40))
    assert runner.info.model_type == golden.blueprint.config["model_type"]
    assert difference(runner, golden) < TOLERANCE
    runner.close()


@pytest.mark.parametrize(
    ("name", "fields", "code", "expected"),
    [
        ("gemma", {"use_bidirectional_attention": True}, ErrorCode.UNIMPLEMENTED, "from left to right"),
        ("gemma2", {"hidden_activation": "xielu"}, ErrorCode.UNIMPLEMENTED, "hidden_act 'xielu' is not supported"),
        ("llama_sharded", {"mlp_bias": "yes"}, ErrorCode.INVALID, "mlp_bias must be true or false, got 'yes'"),
        ("ministral", {"layer_types": ["full_attention"]}, ErrorCode.INVALID, "layer_types names 1 layers of 3"),
        ("ministral", {"layer_types": ["chunked_attention"] * 3}, ErrorCode.UNIMPLEMENTED, "'chunked_attention'"),
        ("ministral", {"sliding_window": None}, ErrorCode.INVALID, "but there is no sliding_window"),
        ("stablelm", {"qk_layernorm": True}, ErrorCode.UNIMPLEMENTED, "qk_layernorm"),
    ],
)
def test_what_a_family_refuses(
    name: str, fields: dict[str, Any], code: ErrorCode, expected: str, tmp_path: Path
) -> None:
    config = {**read_family(name).blueprint.config, **fields}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(SluiceError) as caught:
        read_decoder_config(tmp_path)
    assert caught.value.code is code
    assert expected in caught.value.message

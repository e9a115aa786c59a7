"""Each family has, in float32, the tokens of transformers, and its logits up to rounding."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from sluice.engine.arrays import FloatArray
from sluice.engine.config import EngineConfig
from sluice.engine.models.architectures import read_decoder_config
from sluice.engine.runners.base import Runner
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.drive import continuations, in_a_batch, poison, prefill
from tests.engine.runners.family_goldens import NAMES, FamilyGolden, read_family
from tests.engine.scripted_executor import ScriptedExecutor
from tests.goldens.checkpoints import write_checkpoint
from tests.under_test import load_runner

TOLERANCE = 3e-5
"""Largest allowed difference of a logit, as a share of the largest logit."""


def load(golden: FamilyGolden, directory: Path) -> Runner:
    """One thread: several cost more than these small models give them to do."""
    write_checkpoint(golden.blueprint, directory)
    limit = golden.max_model_len
    return load_runner(
        EngineConfig(model_path=str(directory), dtype="f32", num_blocks=90, num_threads=1, max_model_len=limit)
    )


def difference(runner: Runner, golden: FamilyGolden) -> float:
    """Return the largest difference from the recorded logits, as a share of the largest of those."""
    prompt = golden.cases[-1].prompt_token_ids
    actual = prefill(runner, prompt, sampled_rows=[len(prompt) // 2, len(prompt) - 1])
    expected: FloatArray = np.array(golden.logits, np.float32)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_those_of_transformers_alone_and_in_any_company(name: str, tmp_path: Path) -> None:
    """Tokens come from prefill chunks and decodes mixed in one step, from clean blocks and from such of NaN: the memory
    of a block still holds what its last sequence wrote."""
    golden = read_family(name)
    runner = load(golden, tmp_path)
    assert difference(runner, golden) < TOLERANCE
    expected: FloatArray = np.array(golden.logits, np.float32)
    together = runner.run(in_a_batch(golden.cases[-1].prompt_token_ids, runner.info.vocab_size)).read()
    assert np.abs(together - expected).max() < TOLERANCE * np.abs(expected).max()
    for _ in range(2):
        assert continuations(runner, golden) == [case.token_ids for case in golden.cases]
        poison(runner)
    runner.close()


DEEPSEEK_ROPE = read_family("deepseek_v2_groups").blueprint.config["rope_parameters"]
PHIMOE_ROPE = read_family("phimoe_short").blueprint.config["rope_parameters"]
MUTATIONS: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"logit_scale": 0.51}),
    ("cohere2", {"sliding_window": 22}),
    ("deepseek_v2", {"routed_scaling_factor": 1.1}),
    ("deepseek_v2_groups", {"topk_group": 1}),
    ("deepseek_v2_groups", {"rope_parameters": {**DEEPSEEK_ROPE, "mscale_all_dim": 0.8}}),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"rope_interleave": False}),
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
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"layer_norm_epsilon": 1e-2}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox_serial", {"rotary_emb_base": 6000}),
    ("gpt_oss", {"sliding_window": 20}),
    ("gpt_oss", {"swiglu_alpha": 1.6}),
    ("gpt_oss", {"swiglu_limit": 1.4}),
    ("granite", {"embedding_multiplier": 6.1}),
    ("granite", {"attention_multiplier": 0.11}),
    ("granite", {"residual_multiplier": 0.41}),
    ("granite", {"logits_scaling": 0.51}),
    ("hunyuan_stretched", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("mistral", {"sliding_window": 31}),
    ("mistral", {"sliding_window": 33}),
    ("mixtral", {"num_experts_per_tok": 3}),
    ("olmoe", {"clip_qkv": 1.2}),
    ("olmoe", {"norm_topk_prob": True}),
    ("phimoe", {"router_jitter_noise": 0.25}),
    ("phimoe_short", {"rope_parameters": {**PHIMOE_ROPE, "short_mscale": 1.21}}),
    ("phi3_default", {"partial_rotary_factor": 0.75}),
    ("qwen2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
    ("qwen2", {"rms_norm_eps": 1e-2}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
]
"""Configurations with one error each."""


@pytest.mark.long
@pytest.mark.parametrize(("name", "fields"), MUTATIONS)
def test_every_field_matters(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """The goldens detect errors: the logits of a wrong configuration differ from the recorded ones."""
    golden = read_family(name)
    wrong = replace(golden, blueprint=replace(golden.blueprint, config={**golden.blueprint.config, **fields}))
    runner = load(wrong, tmp_path)
    assert difference(runner, golden) > 50 * TOLERANCE
    runner.close()


@pytest.mark.openvino
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma2_softcap", "kv_cache_dtype must be auto for this model, got u8"),
        ("lfm2", "got u8: its convolutions need a cache of floats"),
    ],
)
def test_softcapped_attention_and_convolutions_need_a_cache_of_floats(name: str, words: str, tmp_path: Path) -> None:
    write_checkpoint(read_family(name).blueprint, tmp_path)
    with pytest.raises(SluiceError, match=words) as caught:
        load_runner(EngineConfig(model_path=str(tmp_path), dtype="f32", kv_cache_dtype="u8", num_blocks=40))
    assert caught.value.param == "kv_cache_dtype"


@pytest.mark.parametrize("name", ["deepseek_v3", "lfm2", "qwen3_moe"])
def test_blocks_of_a_shared_prefix_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    """What else than keys and values of heads is in the blocks is shared with them."""
    golden = read_family(name)
    engine = ScriptedExecutor(load(golden, tmp_path), max_num_seqs=16, max_num_batched_tokens=64)  # type: ignore[arg-type]
    case = golden.cases[-1]
    for stream_id in range(3):
        engine.submit(stream_id, case.prompt_token_ids, max_tokens=case.max_tokens)
        engine.finish()
    assert [engine.tokens[stream_id] for stream_id in range(3)] == [case.token_ids] * 3
    assert engine.details[2].num_cached_tokens


@pytest.mark.parametrize(("name", "factors"), [("phi3_short", "short_factor"), ("phi3_long", "long_factor")])
def test_the_log_says_which_longrope_factors_max_model_len_chose(
    name: str, factors: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = load(read_family(name), tmp_path)
    expected = f"longrope: {factors} for every sequence, because max_model_len is {runner.info.max_model_len} and "
    assert expected in caplog.text
    runner.close()


@pytest.mark.parametrize(
    ("name", "outer", "body", "head"),
    [
        ("gemma3", "gemma3", "language_model.model.", "language_model.lm_head."),
        ("ministral3", "mistral3", "model.language_model.", "lm_head."),
    ],
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
        ("lfm2", {"layer_types": ["conv"]}, ErrorCode.INVALID, "layer_types names 1 layers of 4"),
        ("lfm2", {"layer_types": ["mamba"] * 4}, ErrorCode.UNIMPLEMENTED, "'mamba' is not supported"),
        ("ministral", {"layer_types": ["full_attention"]}, ErrorCode.INVALID, "layer_types names 1 layers of 3"),
        ("ministral", {"layer_types": ["chunked_attention"] * 3}, ErrorCode.UNIMPLEMENTED, "'chunked_attention'"),
        ("ministral", {"sliding_window": None}, ErrorCode.INVALID, "but there is no sliding_window"),
        ("apertus", {"hidden_act": "snake"}, ErrorCode.UNIMPLEMENTED, "hidden_act 'snake' is not supported"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            ErrorCode.UNIMPLEMENTED,
            "supported: greedy, group_limited_greedy",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, ErrorCode.UNIMPLEMENTED, "supported: sigmoid"),
        ("deepseek_v3", {"n_group": 3}, ErrorCode.INVALID, "n_routed_experts (8) must be a multiple of n_group (3)"),
        ("deepseek_v3", {"moe_layer_freq": 2}, ErrorCode.UNIMPLEMENTED, "moe_layer_freq 2 is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ErrorCode.UNIMPLEMENTED, "idx true is not supported"),
        (
            "mixtral",
            {"hidden_act": "gelu"},
            ErrorCode.UNIMPLEMENTED,
            "'gelu' is not supported in experts; supported: silu",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, ErrorCode.INVALID, "is 5, but there are 4 experts"),
        ("phimoe", {"num_experts_per_tok": 3}, ErrorCode.UNIMPLEMENTED, "num_experts_per_tok 3 is not supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ErrorCode.UNIMPLEMENTED, "(this one: mxfp4)"),
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

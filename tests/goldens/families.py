"""A small model of every family, with the family's own features: windows, ropes, biases, multipliers.

The recording script and the live comparison use it. It needs torch and transformers.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.goldens.checkpoints import Blueprint

SHAPE: dict[str, Any] = {
    "vocab_size": 144,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SHORT_FACTORS, LONG_FACTORS = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.0, 1.4, 2.1, 3.5, 6.0, 9.0]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One checkpoint to record. `edits` change the saved config.json; None removes a field.

    `lengths` are those of the prompts. `max_model_len` is passed to the runner where it is not the default.
    """

    model_type: str
    fields: dict[str, Any]
    edits: dict[str, Any] = field(default_factory=dict)
    dtype: str = "f32"
    num_shards: int = 1
    embedding_scale: float = 1.0
    lengths: tuple[int, ...] = (1, 33, 60, 90)
    max_tokens: int = 12
    max_model_len: int | None = None

    def blueprint(self, seed: int) -> Blueprint:
        """Return the checkpoint of this recipe and a seed, with the shapes of transformers' own model."""
        config = AutoConfig.for_model(self.model_type, **{**SHAPE, **self.fields})
        model = AutoModelForCausalLM.from_config(config)
        fields = {**json.loads(config.to_json_string()), **self.edits}
        left_out = {name for name, value in self.edits.items() if value is None}
        return Blueprint(
            config={name: value for name, value in fields.items() if name not in left_out},
            tensors=saved_shapes(model),
            seed=seed,
            dtype=self.dtype,
            num_shards=self.num_shards,
            embedding_scale=self.embedding_scale,
        )


def saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors under the names that a checkpoint has, which may not be the modules'."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        with safe_open(Path(directory) / "model.safetensors", framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_hidden_layers": 2}

GPT2_SHAPE: dict[str, Any] = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}

LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
}

RECIPES: dict[str, Recipe] = {
    "apertus": Recipe("apertus", {"head_dim": 12}),
    "arcee": Recipe("arcee", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, "mlp_bias": True}),
    "cohere": Recipe("cohere", {"head_dim": 12, "logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": Recipe(
        "cohere2", {"head_dim": 12, "num_hidden_layers": 4, "logit_scale": 0.5, "sliding_window": 23}, dtype="bf16"
    ),
    "deepseek_v2": Recipe("deepseek_v2", {**LATENT, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek_v2_groups": Recipe(
        "deepseek_v2",
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
        dtype="bf16",
    ),
    "deepseek_v3": Recipe(
        "deepseek_v3",
        {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ernie4_5": Recipe("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}, dtype="bf16"),
    "exaone4": Recipe(
        "exaone4", {"num_hidden_layers": 4, "sliding_window": 21, "sliding_window_pattern": 2, "layer_types": None}
    ),
    "gemma": Recipe("gemma", {"num_key_value_heads": 1, "head_dim": 32}, dtype="bf16", embedding_scale=0.1),
    "gemma2": Recipe(
        "gemma2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 19,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 3.0,
        },
        embedding_scale=0.1,
    ),
    "gemma2_softcap": Recipe(
        "gemma2",
        {"sliding_window": 19, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0},
        embedding_scale=0.1,
    ),
    "gemma3": Recipe(
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 33,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        embedding_scale=0.1,
    ),
    "gemma3_old_spelling": Recipe(
        "gemma3_text",
        {"num_hidden_layers": 3, "sliding_window": 20},
        edits={
            "rope_parameters": None,
            "layer_types": None,
            "sliding_window_pattern": 3,
            "rope_theta": 50_000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        embedding_scale=0.1,
        dtype="f16",
    ),
    "glm": Recipe("glm", {"attention_bias": False}),
    "glm4": Recipe("glm4", {}, dtype="bf16"),
    "glm4_moe": Recipe(
        "glm4_moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "attention_bias": True,
            "use_qk_norm": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gpt2": Recipe("gpt2", {**GPT2_SHAPE, "n_inner": 80}),
    "gpt2_unscaled": Recipe("gpt2", {**GPT2_SHAPE, "scale_attn_weights": False}, dtype="bf16"),
    "gpt_neox": Recipe(
        "gpt_neox", {"head_dim": 12, "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
    ),
    "gpt_neox_serial": Recipe(
        "gpt_neox",
        {"head_dim": 12, "use_parallel_residual": False},
        edits={"rope_parameters": None, "rotary_pct": 0.34, "rotary_emb_base": 5000},
    ),
    "gpt_oss": Recipe(
        "gpt_oss",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "sliding_window": 21,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
        dtype="bf16",
    ),
    "granite": Recipe(
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        dtype="f16",
        embedding_scale=0.05,
    ),
    "granitemoe": Recipe(
        "granitemoe",
        {
            **EXPERTS,
            "head_dim": 12,
            "num_local_experts": 5,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
        dtype="bf16",
        embedding_scale=0.05,
    ),
    "helium": Recipe("helium", {"head_dim": 12}),
    "hunyuan": Recipe("hunyuan_v1_dense", {"head_dim": 12}),
    "hunyuan_stretched": Recipe(
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 40.0}},
        dtype="bf16",
    ),
    "lfm2": Recipe(
        "lfm2",
        {
            "head_dim": 12,
            "num_hidden_layers": 4,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        },
    ),
    "lfm2_biased": Recipe(
        "lfm2",
        {
            "hidden_size": 96,
            "num_attention_heads": 8,
            "head_dim": 12,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 16,
            "tie_word_embeddings": False,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        dtype="bf16",
    ),
    "lfm2_moe": Recipe(
        "lfm2_moe",
        {
            "head_dim": 12,
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.3,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "llama_dynamic": Recipe(
        "llama",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        lengths=(150,),
        max_tokens=1,
        max_model_len=150,
    ),
    "llama_sharded": Recipe("llama", {"mlp_bias": True, "hidden_act": "gelu"}, dtype="bf16", num_shards=3),
    "ministral": Recipe(
        "ministral",
        {"sliding_window": 33, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": Recipe(
        "ministral3",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.7}},
    ),
    "mistral": Recipe("mistral", {"sliding_window": 32}, dtype="bf16", lengths=(1, 40, 75, 120)),
    "mixtral": Recipe("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": 40}),
    "olmo2": Recipe("olmo2", {"head_dim": 12, "attention_bias": True}),
    "olmo3": Recipe(
        "olmo3",
        {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 17},
        edits={"rope_parameters": None, "rope_theta": 500_000.0, "rope_scaling": {**YARN, "attention_factor": 1.3}},
    ),
    "olmoe": Recipe("olmoe", {**EXPERTS, "head_dim": 12, "num_experts": 5, "clip_qkv": 1.1}),
    "phi": Recipe("phi", {"head_dim": 12, "num_key_value_heads": 4, "hidden_act": "gelu_new"}),
    "phi_normed": Recipe("phi", {"head_dim": 12, "qk_layernorm": True}),
    "phi3_default": Recipe(
        "phi3",
        {"head_dim": 12, "sliding_window": 40},
        edits={"rope_parameters": None, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        dtype="f16",
    ),
    "phi3_long": Recipe(
        "phi3",
        {"head_dim": 12, "original_max_position_embeddings": 32},
        edits={
            "rope_parameters": None,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
            "rope_theta": 10_000.0,
        },
        lengths=(33, 64, 90, 120),
    ),
    "phi3_short": Recipe(
        "phi3",
        {"head_dim": 12, "original_max_position_embeddings": 128},
        edits={
            "rope_parameters": None,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
            "rope_theta": 10_000.0,
        },
        max_model_len=128,
    ),
    "phimoe": Recipe(
        "phimoe",
        {
            **EXPERTS,
            "head_dim": 12,
            "num_local_experts": 5,
            "lm_head_bias": True,
            "attention_bias": True,
            "router_jitter_noise": 0.2,
        },
    ),
    "phimoe_short": Recipe(
        "phimoe",
        {
            **EXPERTS,
            "head_dim": 12,
            "num_local_experts": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": SHORT_FACTORS,
                "long_factor": LONG_FACTORS,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 128,
            },
        },
        max_model_len=128,
    ),
    "qwen2": Recipe(
        "qwen2",
        {
            "head_dim": 12,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 25,
            "max_window_layers": 2,
            "layer_types": None,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen2_moe": Recipe(
        "qwen2_moe",
        {
            **EXPERTS,
            "head_dim": 12,
            "num_experts": 5,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": Recipe(
        "qwen3_moe",
        {**EXPERTS, "num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts_per_tok": 3},
        dtype="bf16",
    ),
    "qwen3_moe_some_layers": Recipe(
        "qwen3_moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen3_windowed": Recipe(
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 31,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
        },
    ),
    "seed_oss": Recipe("seed_oss", {"attention_bias": True, "attention_out_bias": True}),
    "smollm3": Recipe(
        "smollm3", {"head_dim": 12, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "no_rope_layers": None}
    ),
    "stablelm": Recipe("stablelm", {"hidden_size": 64, "use_qkv_bias": True}),
    "starcoder2": Recipe("starcoder2", {"head_dim": 12, "sliding_window": 29, "use_bias": True}),
}

"""A small model of every family, with the family's own features: windows, ropes, biases, multipliers.

The recording script and the live comparison use it. It needs torch and transformers.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

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
            tensors={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
            seed=seed,
            dtype=self.dtype,
            num_shards=self.num_shards,
            embedding_scale=self.embedding_scale,
        )


RECIPES: dict[str, Recipe] = {
    "arcee": Recipe("arcee", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, "mlp_bias": True}),
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
    "helium": Recipe("helium", {"head_dim": 12}),
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
    "olmo2": Recipe("olmo2", {"head_dim": 12, "attention_bias": True}),
    "olmo3": Recipe(
        "olmo3",
        {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 17},
        edits={"rope_parameters": None, "rope_theta": 500_000.0, "rope_scaling": {**YARN, "attention_factor": 1.3}},
    ),
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

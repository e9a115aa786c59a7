"""The configuration of a decoder with all defaults resolved, from which its graph is built."""

import msgspec

from engine.runners.openvino.config.rope import Rope


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """The attention options that may differ between layers."""

    rope: Rope | None
    """The rotary embedding; None without one."""
    window: int | None = None
    """How many tokens attention sees, including the token itself; None for all."""


class QueryGrowth(msgspec.Struct, frozen=True):
    """Queries are scaled by their position: by `1 + rate * log(1 + floor(position / period))`."""

    rate: float
    period: int


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and the constants of a decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    num_draft_layers: int = 0
    """Layers stored after the others that draft tokens (MTP); they are not built."""
    max_position_embeddings: int
    norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    tie_word_embeddings: bool
    attention_scale: float
    """Factor of the products of queries and keys."""
    attention_softcap: float | None = None
    """Bound of the attention scores, which a tanh squeezes into ± this; None without one."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    query_growth: QueryGrowth | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence: more than `max_position_embeddings` if the rope can stretch."""
        longest = [layer.rope.longest(self.max_position_embeddings) for layer in self.layers if layer.rope]
        return min(longest, default=self.max_position_embeddings)

"""The configuration of a decoder with all defaults resolved, from which it is built."""

import math

import msgspec

from sluice.engine.models.config.rope import Rope

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
"""Activation functions of MLPs, by their names in `config.json`. `relu2` is the square of relu; `gelu_new` and
`gelu_pytorch_tanh` are the approximation by a tanh."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """The attention options that may differ between layers."""

    rope: Rope | None
    """The rotary embedding; None without one."""
    window: int | None = None
    """How many tokens attention sees, including the token itself; None for all."""
    has_experts: bool = False
    """Whether the layer's MLP is one of experts."""
    is_convolution: bool = False
    """Whether the layer has a short convolution in the place of attention."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of the layers that have them: MLPs, of which each token passes through a few."""

    num_experts: int
    num_chosen: int
    """How many a token passes through."""
    size: int
    """Features between the matrices of an expert."""
    is_normalized: bool
    """Whether the weights of a token's experts sum to 1."""
    shared_size: int = 0
    """Features between the matrices of the expert that every token passes through; 0 without one."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    has_bias: bool = True
    """Whether the choice has a bias, in families where that is an option."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Number of groups of experts, and of those that a token's experts are chosen from."""
    activation_limit: float = math.inf
    """Bound of the features that gpt-oss's experts activate."""
    activation_slope: float = 1.0
    """Factor within the sigmoid of gpt-oss's activation."""
    jitter: float = 0.0
    """How far from the largest, relative to it, Phi-MoE's router still counts an expert, divided by 2."""


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of attention whose keys and values, and perhaps queries, come from short vectors (MLA). Rotated are
    `head_dim` components of each key, which all heads share, and as many of each query head."""

    query_rank: int | None
    """Features of the vector that queries come from; None if they come from the hidden state."""
    kv_rank: int
    plain_dim: int
    """Components of queries and keys that are not rotated."""
    value_dim: int
    pairs_neighbours: bool = True
    """Whether a component rotates with its neighbour, or with the one half of the rotated ones away."""


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
    head_bias: bool = False
    """Whether the LM head has a bias."""
    attention_scale: float
    """Factor of the products of queries and keys."""
    attention_softcap: float | None = None
    """Bound of the attention scores, which a tanh squeezes into ± this; None without one."""
    is_parallel: bool = False
    """Whether attention and MLP read the same stream, in families where that is an option."""
    has_head_norms: bool = False
    """Whether each query and key head is normalized, in families where that is an option."""
    has_position_embeddings: bool = False
    """Whether each position has an embedding, which is added to the token's."""
    has_sinks: bool = False
    """Whether each head has a score that takes its share of the attention and gives nothing."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP before they are added to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    query_growth: QueryGrowth | None = None
    qkv_clip: float | None = None
    """Bound of queries, keys and values; None without one."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    convolution_size: int = 0
    """How many tokens a convolution sees, including the token itself; 0 in models without convolutions."""
    convolution_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence: more than `max_position_embeddings` if the rope can stretch."""
        longest = [layer.rope.longest(self.max_position_embeddings) for layer in self.layers if layer.rope]
        return min(longest, default=self.max_position_embeddings)

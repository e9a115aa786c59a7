"""What a decoder is made of, with every default resolved: the value that graphs are built from."""

import msgspec

from engine.runners.openvino.config.rope import Rope


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer's attention has of its own."""

    rope: Rope | None
    """None: the layer's heads carry no position."""
    window: int | None = None
    """How many tokens attention reaches back, the token itself among them. None: all of them."""


class QueryGrowth(msgspec.Struct, frozen=True):
    """Queries grow with their position: by `1 + rate * log(1 + floor(position / period))`."""

    rate: float
    period: int


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape and numbers. The families read them from `config.json`, each in its own file."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    max_position_embeddings: int
    norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    """Of attention's last projection."""
    mlp_bias: bool
    tie_word_embeddings: bool
    attention_scale: float
    """What products of queries and keys are multiplied by."""
    attention_softcap: float | None = None
    """Scores are squeezed into ± this by a tanh."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """What the output of attention and MLP is multiplied by before it is added to the stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    query_growth: QueryGrowth | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_context(self) -> int:
        """The longest sequence it can be asked for: beyond `max_position_embeddings` where its rope stretches."""
        longest = [layer.rope.longest(self.max_position_embeddings) for layer in self.layers if layer.rope]
        return min(longest, default=self.max_position_embeddings)

"""Names and cases of the checks, for processes that import neither torch nor Triton."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A variant of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    latent_dim: int | None = None
    """Elements at the start of each key that are its value, if there are no other values."""
    lengths: tuple[int, ...] = (1, 70, 33)
    new: tuple[int, ...] = (1, 40, 33)
    """Of the lengths, the tokens of this step's prefill."""


CASES = {
    "4 heads a key head": Case(8, 2, 16),
    "7 heads a key head, a window": Case(7, 1, 16, window=40),
    "a softcap and sinks": Case(4, 2, 16, softcap=2.0, has_sinks=True),
    "a window, a softcap and sinks": Case(8, 2, 16, window=20, softcap=2.0, has_sinks=True),
    "heads of 12, values of 10": Case(2, 2, 12, value_dim=10),
    "heads of 48": Case(2, 1, 48, lengths=(70, 33), new=(40, 1)),
    "20 heads a latent key": Case(20, 1, 28, latent_dim=20, lengths=(1, 70), new=(1, 40)),
}
SPLITS = (1, 4)
LARGE_CASES = {
    "Llama 3 8B": Case(32, 8, 128, lengths=(1, 2500, 700, 33), new=(1, 1500, 700, 2)),
    "Gemma 2 2B": Case(8, 4, 256, window=1000, softcap=50.0, lengths=(2300, 31), new=(1100, 31)),
    "gpt-oss": Case(64, 8, 64, window=128, has_sinks=True, lengths=(1500, 200), new=(700, 1)),
    "DeepSeek V2 Lite": Case(16, 16, 192, value_dim=128, lengths=(1200, 64), new=(1200, 1)),
    "DeepSeek V3, latent": Case(128, 1, 576, latent_dim=512, lengths=(600, 64), new=(300, 1)),
    "DeepSeek V2 Lite, latent": Case(16, 1, 576, latent_dim=512, lengths=(1200, 64), new=(1200, 1)),
}
"""The shapes of models, for a GPU: the tiles are others than those of small shapes."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
NAMES = (
    *(f"decode: {name}, {splits} splits" for name in CASES for splits in SPLITS),
    *(f"prefill: {name}" for name in CASES),
    "store",
    "store: latent keys",
    "norm: of the stream, with an update",
    "norm: of heads",
    *(f"gate: {activation}" for activation in ACTIVATIONS),
    "quantize: 1,100 elements",
    "rotate: whole heads",
    "rotate: a part of each head",
    "rotate and store: with norms",
    "draw: 1,000 tokens",
    "draw: 5,000 tokens",
)
"""The checks for any device."""
LARGE_NAMES = (
    *(f"decode: {name}" for name in LARGE_CASES),
    *(f"prefill: {name}" for name in LARGE_CASES),
    "draw: 128,256 tokens",
)
"""The checks for a GPU alone."""

"""The interface between a model family and the library that computes it.

A family's decoder is a function of a `Context`. It calls `context.kernels`, which OpenVINO's runner implements by
adding nodes to a graph, and torch's by computing at once. Tensors have one row for each token of a step:

- features, [num_tokens, features];
- heads, which `split_heads` makes of features: the last axis has a head's components. How many axes are before it is up
  to the implementation.

Operations go by the last axis. Weights are named as a plain text model has them, `model.layers.0.self_attn.q_proj`,
whatever a family's checkpoint calls them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.engine.arrays import FloatArray
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.rope import Rope

Tensor = Any
"""A tensor of the library: `Tensor`, `torch.Tensor`. Families only pass it on."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Number and size of the heads of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Size of the heads of values, if it is another than that of queries and keys."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Number of the heads of a layer's latent attention, and what each and the short vector consist of."""

    num_heads: int
    rank: int
    """Features of the short vector that the keys and values of all heads are made of."""
    plain_dim: int
    """Components of a query and a key that are not rotated, which come first."""
    turned_dim: int
    """Rotated components, behind those. All heads have those of keys in common."""
    value_dim: int

    @property
    def whole(self) -> Heads:
        """The heads of queries, keys and values in full."""
        return Heads(self.num_heads, self.num_heads, self.plain_dim + self.turned_dim, self.value_dim)

    def is_shorter_in_full(self, num_new: int, num_seen: int) -> bool:
        """Return whether `num_new` tokens that see `num_seen` take less arithmetic with the keys and values of all
        heads, which are to be made of short vectors, than with the short vectors themselves."""
        projection = self.rank * (self.plain_dim + self.value_dim)
        full = num_seen * (projection + num_new * (self.plain_dim + self.turned_dim + self.value_dim))
        return full < num_new * (projection + num_seen * (2 * self.rank + self.turned_dim))


@dataclass(frozen=True, slots=True)
class Scores:
    """Options of attention's scores."""

    scale: float
    """Factor of the products of queries and keys."""
    softcap: float | None = None
    """Bound of the scores, which a tanh squeezes into ± this; None without one."""
    window: int | None = None
    """How many tokens a token sees, itself and those just before it; None for all."""
    sinks: str | None = None
    """Name of the scores, [num_heads], that take their share of each head's attention and give nothing."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The `rms_norm` of each query head, and of each key head."""

    query: str
    """Name of the weight for queries, [head_dim]."""
    key: str
    eps: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """How queries and keys are told their positions."""

    rope: Rope
    norm: HeadNorm | None = None
    """The norm of each head before it is rotated; None for none."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of each token, [num_tokens, num_chosen] integers, and their weights, of the same shape."""

    experts: Tensor
    weights: Tensor


ExpertLinear = Callable[[Tensor, str, int, bool], Tensor]
"""(x, name of a projection, features out, whether it has a bias) -> the product of rows and the matrix of their expert.
Rows may be those of one expert, or of all."""
ExpertBody = Callable[[Tensor, ExpertLinear], Tensor]
"""(x, the projections) -> the output of the rows' experts."""


class Kernels(Protocol):
    """The operations of a step. A weight that is missing, or has another shape than the call implies, raises
    SluiceError."""

    # -- elementary operations: `y` broadcasts against `x`; where it may be a float, it is a constant

    def add(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def subtract(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def multiply(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def divide(self, x: Tensor | float, y: Tensor | float) -> Tensor: ...

    def minimum(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def maximum(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor: ...

    def absolute(self, x: Tensor) -> Tensor: ...

    def exp(self, x: Tensor) -> Tensor: ...

    def log(self, x: Tensor) -> Tensor: ...

    def floor(self, x: Tensor) -> Tensor: ...

    def sigmoid(self, x: Tensor) -> Tensor: ...

    def swish(self, x: Tensor, slope: float) -> Tensor:
        """Return x * sigmoid(slope * x)."""
        ...

    def softcapped(self, x: Tensor, cap: float | None) -> Tensor:
        """Return x squeezed into ± `cap` by a tanh; x itself without a cap."""
        ...

    def softmax(self, x: Tensor) -> Tensor: ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the last axis, which stays with a size of 1."""
        ...

    def greater(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def less_equal(self, x: Tensor, y: Tensor | float) -> Tensor: ...

    def select(self, condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor: ...

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return x[..., start:stop]."""
        ...

    def every_second(self, x: Tensor, first: int) -> Tensor:
        """Return x[..., first::2]."""
        ...

    def concat(self, tensors: Sequence[Tensor]) -> Tensor: ...

    def largest(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` largest values of each row, largest first, and their columns."""
        ...

    def take(self, x: Tensor, columns: Tensor) -> Tensor:
        """Return the values of x [num_tokens, n] in `columns` [num_tokens, count]."""
        ...

    def is_column(self, column: Tensor, count: int) -> Tensor:
        """Return [num_tokens, count] Booleans, true where the column has the number in `column` [num_tokens, 1]."""
        ...

    # -- operations that take most of a step's time, and those that read weights, positions or the KV cache

    @property
    def positions(self) -> Tensor:
        """The position of each token, float32, in a shape that broadcasts against heads."""
        ...

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a stored tensor as float32, or in the type of the computation."""
        ...

    def values(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """Return a stored tensor's values, for computations when the model is built."""
        ...

    def embed_tokens(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Return the rows of weight `name` for this step's tokens."""
        ...

    def embed_positions(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Return the rows of weight `name` for this step's positions."""
        ...

    def sampled(self, x: Tensor) -> Tensor:
        """Return the rows of x whose logits are needed, [num_sampled, features]."""
        ...

    def project(self, x: Tensor, name: str, num_out: int, bias: str | None = None) -> Tensor:
        """Return x @ weight.T (+ bias), by whole names and without LoRA adapters: the LM head."""
        ...

    # -- projections

    def linear(self, x: Tensor, name: str, num_out: int, *, bias: bool = False) -> Tensor:
        """Return x @ weight.T (+ bias), with the LoRA adapters of each token added. `name` is without `.weight`."""
        ...

    def linears(self, x: Tensor, names: Sequence[str], nums_out: Sequence[int], *, bias: bool = False) -> list[Tensor]:
        """Return several projections of the same x, as `linear`: an implementation may compute them as one."""
        ...

    # -- norms, over the last axis

    def rms_norm(self, x: Tensor, name: str, eps: float, *, offset: float = 0.0) -> Tensor:
        """Scale to a root mean square of 1, then by weight + `offset`."""
        ...

    def add_and_norm(
        self, x: Tensor, update: Tensor, name: str, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return x + update, and its `rms_norm`. The sum may be written into x, which must not be read any more."""
        ...

    def layer_norm(self, x: Tensor, name: str, eps: float, *, bias: bool = True) -> Tensor:
        """Normalize to mean 0 and variance 1, then scale, and shift if there is a bias."""
        ...

    def layer_norm_by_head(self, heads: Tensor, name: str, eps: float, num_heads: int) -> Tensor:
        """Normalize heads to mean 0 and variance 1, then scale each by a weight of its own, [num_heads, head_dim]."""
        ...

    # -- activations

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Apply one of `decoder_config.ACTIVATIONS`."""
        ...

    def gate(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up."""
        ...

    # -- attention

    def split_heads(self, x: Tensor, size: int) -> Tensor:
        """Return features as heads of `size` components."""
        ...

    def join_heads(self, heads: Tensor) -> Tensor:
        """Return heads as features."""
        ...

    def repeat_heads(self, heads: Tensor, count: int) -> Tensor:
        """Return one head as `count` equal ones."""
        ...

    def uninterleave(self, heads: Tensor, num_components: int) -> Tensor:
        """Reorder the first components of each head, even ones first, and keep the others."""
        ...

    def rotate(self, heads: Tensor, rope: Rope) -> Tensor:
        """Rotate the first components of each head by its token's position, as many as the rope has. Component i is
        paired with i + rotary_dim / 2. The others stay as they are."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, heads: Heads, scores: Scores) -> Tensor:
        """Write this step's keys and values into the layer's KV cache, then attend causally over each sequence's
        blocks. query [num_tokens, num_heads * head_dim], key [num_tokens, num_kv_heads * head_dim], value
        [num_tokens, num_kv_heads * (value_dim or head_dim)]. Returns [num_tokens, num_heads * (value_dim or
        head_dim)]."""
        ...

    def attend_rotated(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        heads: Heads,
        scores: Scores,
        rotation: HeadRotation,
    ) -> Tensor:
        """Normalize query and key, which are heads as those of `split_heads`, if the rotation has a norm, `rotate`
        them, and `attend`."""
        ...

    def attend_latent(
        self, query: Tensor, short: Tensor, turned: Tensor, name: str, layer: int, heads: LatentHeads, scores: Scores
    ) -> Tensor:
        """Attend as `attend`, with keys and values that projection `name` makes of each token's `short` vector
        [num_tokens, rank]: for each head plain_dim components of the key and value_dim of the value. `turned`, one head
        of turned_dim components, ends the keys of all heads. `query` has heads of plain_dim + turned_dim. Returns
        [num_tokens, num_heads * value_dim]. It is up to the implementation whether the KV cache has the keys and values
        of all heads, as `latent_attention.attend_with_all_heads` does it, or `short` and `turned` alone."""
        ...

    def convolve(self, x: Tensor, layer: int, name: str) -> Tensor:
        """Convolve a sequence's x [num_tokens, hidden_size] with weight `name`, [hidden_size, 1, convolution_size]: the
        last tap is for the token itself, those before it for earlier tokens, 0 where there are none. Earlier tokens' x
        are kept in the layer's KV cache."""
        ...

    # -- experts

    def experts(self, x: Tensor, choice: Chosen, name: str, num_experts: int, body: ExpertBody) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts. `body` computes what an expert does with its
        rows; the matrices of all experts are one weight, `{name}.{projection}.weight` [num_experts, out, in], and their
        biases `{name}.{projection}_bias` [num_experts, out]."""
        ...

    def keep_best_groups(
        self, scores: Tensor, num_groups: int, num_kept: int, num_counted: int, other: float
    ) -> Tensor:
        """Replace scores [num_tokens, num_experts] by `other`, except those of the `num_kept` best of the groups of
        equal size: the ones with the largest sums of their `num_counted` largest scores."""
        ...


@dataclass(frozen=True, slots=True)
class Context:
    """The values that all layers of one model read."""

    config: DecoderConfig
    kernels: Kernels

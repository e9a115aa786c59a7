"""The layers of decoders: norms and MLPs, by the names of their weights."""

from collections.abc import Callable
from dataclasses import dataclass

from sluice.engine.models.kernels import Context, Tensor

Norm = Callable[[Context, Tensor, str], Tensor]
"""(context, x, name of the weight without its suffix) -> x normalized over its last axis."""
Mlp = Callable[[Context, Tensor, int], Tensor]
"""(context, x, layer) -> output of the layer's MLP."""


# -- norms


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Scales the last axis to a root mean square of 1, then by the weight + `offset`."""

    offset: float = 0.0

    def __call__(self, context: Context, x: Tensor, name: str) -> Tensor:
        return context.kernels.rms_norm(x, name, context.config.norm_eps, offset=self.offset)


rms_norm = RmsNorm()
rms_norm_plus_one = RmsNorm(offset=1.0)
"""An RMS norm whose weight is stored minus 1 (Gemma)."""


def add_and_norm(context: Context, x: Tensor, update: Tensor, norm: Norm, name: str) -> tuple[Tensor, Tensor]:
    """Return x + update, and that normalized. x must not be read any more: see `Kernels.add_and_norm`."""
    if isinstance(norm, RmsNorm):
        return context.kernels.add_and_norm(x, update, name, context.config.norm_eps, offset=norm.offset)
    total = context.kernels.add(x, update)
    return total, norm(context, total, name)


def layer_norm(context: Context, x: Tensor, name: str) -> Tensor:
    """Normalize the last axis to mean 0 and variance 1, then scale and shift it."""
    return context.kernels.layer_norm(x, name, context.config.norm_eps)


def layer_norm_unbiased(context: Context, x: Tensor, name: str) -> Tensor:
    """Normalize the last axis to mean 0 and variance 1, then scale it."""
    return context.kernels.layer_norm(x, name, context.config.norm_eps, bias=False)


def layer_norm_by_head(context: Context, heads: Tensor, name: str) -> Tensor:
    """Normalize each query or key head, with a weight of its own."""
    config = context.config
    num_heads = config.num_heads if name.endswith(".q_norm") else config.num_kv_heads
    return context.kernels.layer_norm_by_head(heads, name, config.norm_eps, num_heads)


# -- MLPs


def gated_mlp(context: Context, x: Tensor, layer: int) -> Tensor:
    """Return down(activation(gate(x)) * up(x))."""
    return named_gated_mlp(context, x, f"model.layers.{layer}.mlp", context.config.intermediate_size)


def named_gated_mlp(context: Context, x: Tensor, name: str, size: int) -> Tensor:
    """Return the output of the gated MLP called `name`, which has `size` features between its matrices."""
    config, kernels = context.config, context.kernels
    gate, up = kernels.linears(x, (f"{name}.gate_proj", f"{name}.up_proj"), (size, size), bias=config.mlp_bias)
    wide = kernels.gate(gate, up, config.activation)
    return kernels.linear(wide, f"{name}.down_proj", config.hidden_size, bias=config.mlp_bias)


def fused_gated_mlp(context: Context, x: Tensor, layer: int) -> Tensor:
    """Return down(activation(gate(x)) * up(x)), with gate and up stored as one matrix."""
    config, kernels, name = context.config, context.kernels, f"model.layers.{layer}.mlp"
    size = config.intermediate_size
    both = kernels.linear(x, f"{name}.gate_up_proj", 2 * size, bias=config.mlp_bias)
    wide = kernels.gate(kernels.part(both, 0, size), kernels.part(both, size, 2 * size), config.activation)
    return kernels.linear(wide, f"{name}.down_proj", config.hidden_size, bias=config.mlp_bias)


def plain_mlp(context: Context, x: Tensor, layer: int, names: tuple[str, str] = ("up_proj", "down_proj")) -> Tensor:
    """Return second(activation(first(x)))."""
    config, kernels, name = context.config, context.kernels, f"model.layers.{layer}.mlp"
    wide = kernels.linear(x, f"{name}.{names[0]}", config.intermediate_size, bias=config.mlp_bias)
    activated = kernels.activate(wide, config.activation)
    return kernels.linear(activated, f"{name}.{names[1]}", config.hidden_size, bias=config.mlp_bias)

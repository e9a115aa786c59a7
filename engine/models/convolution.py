"""Short convolutions over a sequence's tokens, in the place of attention (LFM2).

A token needs the inputs of the few before it. Those are kept in the KV cache, half of each as a key and half as a
value: so they are shared, freed and computed again with the blocks of their tokens, as any other layer's, at the price
of more memory than the last few inputs of each sequence would take.
"""

from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.kernels import Context, Heads, Tensor
from sluice.errors import ErrorCode, SluiceError


def short_convolution(context: Context, x: Tensor, layer: int) -> Tensor:
    """Return out(c * convolution(b * v)), where b, c and v are projections of x."""
    config, kernels, name = context.config, context.kernels, f"model.layers.{layer}.conv"
    size, bias = config.hidden_size, config.convolution_bias
    both = kernels.linear(x, f"{name}.in_proj", 3 * size, bias=bias)
    before, after, values = (kernels.part(both, each * size, (each + 1) * size) for each in range(3))
    total = kernels.convolve(kernels.multiply(before, values), layer, f"{name}.conv.weight")
    if bias:
        total = kernels.add(total, kernels.weight(f"{name}.conv.bias", (size,)))
    return kernels.linear(kernels.multiply(after, total), f"{name}.out_proj", size, bias=bias)


def cache_heads(config: DecoderConfig) -> Heads:
    """Return the heads that hold half of an input. The number of query heads and the size are those of the layers with
    attention, because the nodes of a graph share buffers that are made for the first: with other numbers OpenVINO
    2026.4 writes beyond them. Raises UNIMPLEMENTED if half an input does not fit."""
    count, rest = divmod(config.hidden_size // 2, config.head_dim)
    if rest or config.num_heads % count:
        message = (
            f"hidden_size {config.hidden_size} with {config.num_heads} heads of {config.head_dim} is not supported"
        )
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"{message} in this family; half of it must be heads, whose number divides that of the attention",
            param="model_path",
        )
    return Heads(config.num_heads, count, config.head_dim)

"""Mixtures of experts: each token passes through a few MLPs of many, which a router chooses."""

import math
from collections.abc import Callable

from sluice.engine.models.config.decoder_config import Experts
from sluice.engine.models.decoder import scaled
from sluice.engine.models.kernels import Chosen, Context, ExpertLinear, Tensor
from sluice.engine.models.layers import Mlp, gated_mlp, named_gated_mlp

Router = Callable[[Context, Tensor, str], Chosen]
"""(context, x [num_tokens, hidden_size], name of the layer's block of experts) -> the choice of each token."""
Body = Callable[[Context, Tensor, ExpertLinear], Tensor]
"""(context, x, the projections) -> the output of the rows' experts."""


def experts_mlp(
    context: Context,
    x: Tensor,
    layer: int,
    *,
    router: Router,
    body: Body,
    block: str = "mlp",
    dense: Mlp = gated_mlp,
    shared: str | None = None,
    has_shared_gate: bool = False,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, plus that of the expert called `shared`, if any,
    which every token passes through, times a gate if it has one. Layers without experts have a `dense` MLP."""
    if not context.config.layers[layer].has_experts:
        return dense(context, x, layer)
    kernels, name, experts = context.kernels, f"model.layers.{layer}.{block}", experts_of(context)

    def compute(rows: Tensor, linear: ExpertLinear) -> Tensor:
        return body(context, rows, linear)

    chosen = kernels.experts(x, router(context, x, name), f"{name}.experts", experts.num_experts, compute)
    if shared is None:
        return chosen
    output = named_gated_mlp(context, x, f"{name}.{shared}", experts.shared_size)
    if has_shared_gate:
        output = kernels.multiply(output, kernels.sigmoid(kernels.linear(x, f"{name}.{shared}_gate", 1)))
    return kernels.add(chosen, output)


def experts_of(context: Context) -> Experts:
    experts = context.config.experts
    assert experts is not None, "a layer has experts, but the configuration has none"
    return experts


# -- routers


def softmax_router(context: Context, x: Tensor, name: str, *, weight: str = "gate", bias: bool = False) -> Chosen:
    """Choose the experts of the largest logits. Their weights are a softmax over all experts, or if they are normalized
    over the chosen ones."""
    kernels, experts = context.kernels, experts_of(context)
    logits = kernels.linear(x, f"{name}.{weight}", experts.num_experts, bias=bias)
    if experts.is_normalized:
        values, chosen = kernels.largest(logits, experts.num_chosen)
        return Chosen(chosen, kernels.softmax(values))
    values, chosen = kernels.largest(kernels.softmax(logits), experts.num_chosen)
    return Chosen(chosen, values)


def grouped_softmax_router(context: Context, x: Tensor, name: str) -> Chosen:
    """Choose the experts of the largest shares among those of the groups that have the largest ones (DeepSeek V2)."""
    kernels, experts = context.kernels, experts_of(context)
    scores = kernels.softmax(kernels.linear(x, f"{name}.gate", experts.num_experts))
    values, chosen = kernels.largest(_of_best_groups(context, scores, 1, 0.0), experts.num_chosen)
    return Chosen(chosen, scaled(context, values, experts.weight_scale))


def sigmoid_router(
    context: Context, x: Tensor, name: str, *, bias: str = "gate.e_score_correction_bias", eps: float = 1e-20
) -> Chosen:
    """Choose the experts of the largest sigmoids plus a bias, among those of the groups whose two best have the largest
    sum. The bias does not weight them (DeepSeek V3). `eps` is added to the sum by which weights are normalized."""
    kernels, experts = context.kernels, experts_of(context)
    scores = rated = kernels.sigmoid(kernels.linear(x, f"{name}.gate", experts.num_experts))
    if experts.has_bias:
        rated = kernels.add(scores, kernels.weight(f"{name}.{bias}", (experts.num_experts,)))
    _, chosen = kernels.largest(_of_best_groups(context, rated, 2, -math.inf), experts.num_chosen)
    weights = kernels.take(scores, chosen)
    if experts.is_normalized:
        weights = kernels.divide(weights, kernels.add(kernels.total(weights), eps))
    return Chosen(chosen, scaled(context, weights, experts.weight_scale))


def _of_best_groups(context: Context, scores: Tensor, num_counted: int, other: float) -> Tensor:
    """Replace the scores of experts by `other`, except those of the best groups: by the sum of their `num_counted` best
    scores."""
    experts = experts_of(context)
    if experts.num_chosen_groups >= experts.num_groups:
        return scores
    num_groups, num_kept = experts.num_groups, experts.num_chosen_groups
    return context.kernels.keep_best_groups(scores, num_groups, num_kept, num_counted, other)


def sparse_mixer(context: Context, x: Tensor, name: str) -> Chosen:
    """Choose two experts, as Phi-MoE does. The weight of each is its share among those whose logit is near to its own,
    the first not counted for the second."""
    kernels, experts = context.kernels, experts_of(context)
    logits = kernels.linear(x, f"{name}.gate", experts.num_experts)
    values, chosen = kernels.largest(logits, 2)
    first, second = (kernels.part(values, each, each + 1) for each in (0, 1))
    is_first = kernels.is_column(kernels.part(chosen, 0, 1), experts.num_experts)
    first_weight = _share(context, logits, first)
    second_weight = _share(context, kernels.select(is_first, -math.inf, logits), second)
    return Chosen(chosen, kernels.concat((first_weight, second_weight)))


def _share(context: Context, logits: Tensor, top: Tensor) -> Tensor:
    """Return the softmax of `top`, [num_tokens, 1], among the logits that are not far below it."""
    kernels = context.kernels
    distance = kernels.divide(kernels.subtract(top, logits), kernels.maximum(kernels.absolute(logits), top))
    near = kernels.less_equal(distance, 2 * experts_of(context).jitter)
    terms = kernels.select(near, kernels.exp(kernels.subtract(logits, top)), 0.0)
    return kernels.divide(1.0, kernels.total(terms))


# -- bodies


def gated_experts(context: Context, x: Tensor, linear: ExpertLinear) -> Tensor:
    """Return down(silu(gate(x)) * up(x))."""
    kernels, size = context.kernels, experts_of(context).size
    gate, up = linear(x, "gate_proj", size, False), linear(x, "up_proj", size, False)
    # OpenVINO recognizes experts whose silu is spelled out.
    wide = kernels.multiply(kernels.multiply(gate, kernels.sigmoid(gate)), up)
    return linear(wide, "down_proj", context.config.hidden_size, False)


def clamped_experts(context: Context, x: Tensor, linear: ExpertLinear) -> Tensor:
    """Return down(swish(min(gate, limit)) * (clamp(up) + 1)), where the rows of gate and up alternate in one matrix,
    and all have biases (gpt-oss)."""
    kernels, experts = context.kernels, experts_of(context)
    both = linear(x, "gate_up_proj", 2 * experts.size, True)
    gate, up = (kernels.every_second(both, first) for first in (0, 1))
    limit = experts.activation_limit
    activated = kernels.swish(kernels.minimum(gate, limit), experts.activation_slope)
    wide = kernels.multiply(kernels.add(kernels.clamp(up, -limit, limit), 1.0), activated)
    return linear(wide, "down_proj", context.config.hidden_size, True)

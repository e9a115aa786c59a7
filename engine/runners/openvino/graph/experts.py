"""Mixtures of experts: each token passes through a few MLPs of many, which a router chooses.

Few experts are computed one after the other, each for the tokens that chose it: a product each for its matrices, which
is fast for any number of tokens. For many experts that would be tens of thousands of nodes, most of them with nothing
to do. Their graph computes every expert for every token, and adds what the router weighted. That is the form that
OpenVINO's CPU plugin recognizes (`ConvertTiledMoeBlockToGatherMatmuls`): it computes the chosen experts alone, in
products that gather their matrices (`GatherMatmul`). A form that it does not recognize would give the same numbers,
slowly. `python -m benchmarks experts` compares the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.opset15 import scatter_nd_update

from engine.runners.base import FloatArray
from engine.runners.openvino.config.decoder_config import Experts
from engine.runners.openvino.graph.layers import Context, Mlp, gated_mlp, linear, named_gated_mlp, values_of
from engine.runners.openvino.graph.nodes import TO_THE_END, floating, ints32, ints64, num_features, part, scaled


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of each token, [num_tokens, num_chosen] i32, and their weights, of the same shape."""

    experts: ov.Node
    weights: ov.Node


Router = Callable[[Context, ov.Node, str], Choice]
"""(context, x [num_tokens, hidden_size], name of the layer's block of experts) -> the choice of each token."""
ExpertLinear = Callable[[ov.Node, str, int, bool], ov.Node]
"""(x, name of a projection, features out, whether it has a bias) -> the product with an expert's matrix. x is
[num_tokens, features] for one expert, [num_experts, num_tokens, features] for all."""
Body = Callable[[Context, ov.Node, ExpertLinear], ov.Node]
"""(context, x, the projections) -> the output of one expert, or of all."""
FEW_EXPERTS = 16
"""Up to this many experts are computed one after the other."""


def experts_mlp(
    context: Context,
    x: ov.Node,
    layer: int,
    *,
    router: Router,
    body: Body,
    block: str = "mlp",
    dense: Mlp = gated_mlp,
    shared: str | None = None,
    has_shared_gate: bool = False,
) -> ov.Node:
    """Return the weighted sum of the outputs of each token's experts, plus that of the expert called `shared`, if any,
    which every token passes through, times a gate if it has one. Layers without experts have a `dense` MLP."""
    if not context.config.layers[layer].has_experts:
        return dense(context, x, layer)
    name = f"model.layers.{layer}.{block}"
    is_few = experts_of(context).num_experts <= FEW_EXPERTS
    compute = _one_after_the_other if is_few else _all_at_once
    chosen = compute(context, x, router(context, x, name), body, f"{name}.experts")
    if shared is None:
        return chosen
    output = named_gated_mlp(context, x, f"{name}.{shared}", experts_of(context).shared_size)
    if has_shared_gate:
        output = ops.multiply(output, ops.sigmoid(linear(context, x, f"{name}.{shared}_gate", 1)))
    return ops.add(chosen, output)


def _one_after_the_other(context: Context, x: ov.Node, choice: Choice, body: Body, name: str) -> ov.Node:
    count = experts_of(context).num_experts
    total = ops.broadcast(floating(0), ops.shape_of(x))
    for expert, projections in enumerate(_expert_linears(context, name, count)):
        is_chosen = ops.equal(choice.experts, ints32([expert]))
        weights = ops.reduce_sum(ops.select(is_chosen, choice.weights, floating(0)), ints64([1]), False)
        rows = ops.squeeze(ops.non_zero(weights, "i32"), ints64([0]))
        output = body(context, ops.gather(x, rows, ints64([0])), projections)
        weighted = ops.multiply(output, ops.unsqueeze(ops.gather(weights, rows, ints64([0])), ints64([1])))
        total = scatter_nd_update(total, ops.unsqueeze(rows, ints64([1])), weighted, "sum")
    return total


def _expert_linears(context: Context, name: str, count: int) -> list[ExpertLinear]:
    """Return the projections of each expert; `name` is that of all."""
    matrices: dict[str, list[ov.Node]] = {}
    biases: dict[str, FloatArray] = {}

    def multiply(x: ov.Node, part: str, num_out: int, bias: bool, expert: int) -> ov.Node:
        if part not in matrices:
            matrices[part] = context.weights.matrices(f"{name}.{part}.weight", (count, num_out, num_features(x)))
            if bias:
                biases[part] = values_of(context.weights.constant(f"{name}.{part}_bias", (count, num_out)))
        product = ops.matmul(x, matrices[part][expert], False, True)
        return ops.add(product, ops.constant(biases[part][expert])) if bias else product

    return [partial(multiply, expert=expert) for expert in range(count)]


def _all_at_once(context: Context, x: ov.Node, choice: Choice, body: Body, name: str) -> ov.Node:
    count, size = experts_of(context).num_experts, context.config.hidden_size
    rows = ops.reshape(_in_a_batch(x), ints64([-1, size]), False)
    tiled = ops.reshape(ops.tile(rows, ints64([count, 1])), ints64([count, -1, size]), False)

    def multiply(x: ov.Node, part: str, num_out: int, bias: bool) -> ov.Node:
        weight = context.weights.constant(f"{name}.{part}.weight", (count, num_out, num_features(x)))
        product = ops.matmul(x, weight, False, True)
        if not bias:
            return product
        stored = values_of(context.weights.constant(f"{name}.{part}_bias", (count, num_out)))
        return ops.add(product, ops.constant(stored.reshape(count, 1, num_out)))

    outputs = ops.reshape(body(context, tiled, multiply), ints64([count, 1, -1, size]), False)
    num_tokens = ops.gather(ops.shape_of(choice.experts), ints64([0]), ints64([0]))
    none = ops.broadcast(floating(0), ops.concat([num_tokens, ints64([count])], 0))
    weights = ops.scatter_elements_update(none, choice.experts, choice.weights, ints64([1]))
    by_expert = ops.reshape(ops.transpose(weights, ints64([1, 0])), ints64([count, 1, -1]), False)
    weighted = ops.multiply(outputs, ops.unsqueeze(by_expert, ints64([3])))
    return ops.reshape(ops.reduce_sum(weighted, ints64([0]), False), ints64([-1, size]), False)


def _in_a_batch(x: ov.Node) -> ov.Node:
    """Return x as [1, num_tokens, hidden_size]. The compiler must not see that the reshape after it undoes that: the
    recognized form begins with one."""
    return ops.unsqueeze(x, ints64([0]))


def experts_of(context: Context) -> Experts:
    experts = context.config.experts
    assert experts is not None, "a layer has experts, but the configuration has none"
    return experts


# -- routers


def softmax_router(context: Context, x: ov.Node, name: str, *, weight: str = "gate", bias: bool = False) -> Choice:
    """Choose the experts of the largest logits. Their weights are a softmax over all experts, or if they are normalized
    over the chosen ones."""
    experts = experts_of(context)
    logits = linear(context, x, f"{name}.{weight}", experts.num_experts, bias=bias)
    if experts.is_normalized:
        values, chosen = largest(logits, experts.num_chosen)
        return Choice(chosen, ops.softmax(values, -1))
    values, chosen = largest(ops.softmax(logits, -1), experts.num_chosen)
    return Choice(chosen, values)


def grouped_softmax_router(context: Context, x: ov.Node, name: str) -> Choice:
    """Choose the experts of the largest shares among those of the groups that have the largest ones (DeepSeek V2)."""
    experts = experts_of(context)
    scores = ops.softmax(linear(context, x, f"{name}.gate", experts.num_experts), -1)
    values, chosen = largest(_of_best_groups(scores, experts, 1, 0), experts.num_chosen)
    return Choice(chosen, scaled(values, experts.weight_scale))


def sigmoid_router(
    context: Context, x: ov.Node, name: str, *, bias: str = "gate.e_score_correction_bias", eps: float = 1e-20
) -> Choice:
    """Choose the experts of the largest sigmoids plus a bias, among those of the groups whose two best have the largest
    sum. The bias does not weight them (DeepSeek V3). `eps` is added to the sum by which weights are normalized."""
    experts = experts_of(context)
    scores = rated = ops.sigmoid(linear(context, x, f"{name}.gate", experts.num_experts))
    if experts.has_bias:
        rated = ops.add(scores, context.weights.constant(f"{name}.{bias}", (experts.num_experts,)))
    _, chosen = largest(_of_best_groups(rated, experts, 2, -np.inf), experts.num_chosen)
    weights = ops.gather_elements(scores, chosen, 1)
    if experts.is_normalized:
        weights = ops.divide(weights, ops.add(ops.reduce_sum(weights, ints64([1]), True), floating(eps)))
    return Choice(chosen, scaled(weights, experts.weight_scale))


def _of_best_groups(scores: ov.Node, experts: Experts, num_counted: int, other: float) -> ov.Node:
    """Replace the scores of experts by `other`, except those of the best groups: by the sum of their `num_counted` best
    scores."""
    count = experts.num_groups
    if experts.num_chosen_groups >= count:
        return scores
    by_group = ops.reshape(scores, ints64([0, count, -1]), True)
    best, _ = largest(by_group, num_counted)
    _, groups = largest(ops.reduce_sum(best, ints64([2]), False), experts.num_chosen_groups)
    columns = ops.constant(np.arange(count, dtype=np.int32).reshape(1, 1, count))
    is_chosen = ops.reduce_logical_or(ops.equal(ops.unsqueeze(groups, ints64([2])), columns), ints64([1]), False)
    kept = ops.select(ops.unsqueeze(is_chosen, ints64([2])), by_group, floating(other))
    return ops.reshape(kept, ints64([0, -1]), True)


def sparse_mixer(context: Context, x: ov.Node, name: str) -> Choice:
    """Choose two experts, as Phi-MoE does. The weight of each is its share among those whose logit is near to its own,
    the first not counted for the second."""
    experts = experts_of(context)
    logits = linear(context, x, f"{name}.gate", experts.num_experts)
    values, chosen = largest(logits, 2)
    first, second = (part(values, each, each + 1, 1) for each in (0, 1))
    columns = ops.constant(np.arange(experts.num_experts, dtype=np.int32)[None])
    is_first = ops.equal(columns, part(chosen, 0, 1, 1))
    first_weight = _share(logits, first, experts.jitter)
    second_weight = _share(ops.select(is_first, floating(-np.inf), logits), second, experts.jitter)
    return Choice(chosen, ops.concat([first_weight, second_weight], 1))


def _share(logits: ov.Node, top: ov.Node, jitter: float) -> ov.Node:
    """Return the softmax of `top`, [num_tokens, 1], among the logits that are not far below it."""
    distance = ops.divide(ops.subtract(top, logits), ops.maximum(ops.abs(logits), top))
    near = ops.less_equal(distance, floating(2 * jitter))
    terms = ops.select(near, ops.exp(ops.subtract(logits, top)), floating(0))
    return ops.divide(floating(1), ops.reduce_sum(terms, ints64([1]), True))


def largest(x: ov.Node, count: int) -> tuple[ov.Node, ov.Node]:
    """Return the `count` largest values of each row, and their columns."""
    found = ops.topk(x, ops.constant(np.int32(count)), -1, "max", "value", index_element_type="i32")
    values, columns = found.outputs()
    return values, columns


# -- bodies


def gated_experts(context: Context, x: ov.Node, linear: ExpertLinear) -> ov.Node:
    """Return down(silu(gate(x)) * up(x))."""
    size = experts_of(context).size
    gate, up = linear(x, "gate_proj", size, False), linear(x, "up_proj", size, False)
    # `ops.swish` has an input more than the recognized form.
    wide = ops.multiply(ops.multiply(gate, ops.sigmoid(gate)), up)
    return linear(wide, "down_proj", context.config.hidden_size, False)


def clamped_experts(context: Context, x: ov.Node, linear: ExpertLinear) -> ov.Node:
    """Return down(swish(min(gate, limit)) * (clamp(up) + 1)), where the rows of gate and up alternate in one matrix,
    and all have biases (gpt-oss)."""
    experts = experts_of(context)
    both = linear(x, "gate_up_proj", 2 * experts.size, True)
    last = both.output(0).partial_shape.rank.get_length() - 1
    gate, up = (_every_second(both, first, last) for first in (0, 1))
    limit, slope = experts.activation_limit, floating(experts.activation_slope)
    activated = ops.swish(ops.minimum(gate, floating(limit)), slope)
    wide = ops.multiply(ops.add(ops.clamp(up, -limit, limit), floating(1)), activated)
    return linear(wide, "down_proj", context.config.hidden_size, True)


def _every_second(x: ov.Node, first: int, axis: int) -> ov.Node:
    return ops.slice(x, ints64([first]), ints64([TO_THE_END]), ints64([2]), ints64([axis]))

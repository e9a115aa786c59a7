"""Mixtures of experts as nodes of a graph.

Few experts are computed one after the other, each for the tokens that chose it: a product each for its matrices, which
is fast for any number of tokens. For many experts that would be tens of thousands of nodes, most of them with nothing
to do. Their graph computes every expert for every token, and adds what the router weighted. That is the form that
OpenVINO's CPU plugin recognizes (`ConvertTiledMoeBlockToGatherMatmuls`): it computes the chosen experts alone, in
products that gather their matrices (`GatherMatmul`). A form that it does not recognize would give the same numbers,
slowly. `python -m benchmarks experts` compares the two.
"""

from functools import partial

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.opset15 import scatter_nd_update

from sluice.engine.arrays import FloatArray
from sluice.engine.models.kernels import Chosen, ExpertBody, ExpertLinear
from sluice.engine.runners.openvino.graph.nodes import floating, ints32, ints64, largest, num_features, values_of
from sluice.engine.runners.openvino.weights.checkpoint import NamedWeights

FEW_EXPERTS = 16
"""Up to this many experts are computed one after the other."""


def compute_experts(
    weights: NamedWeights, x: ov.Node, choice: Chosen, name: str, num_experts: int, body: ExpertBody
) -> ov.Node:
    """See `Kernels.experts`."""
    compute = _one_after_the_other if num_experts <= FEW_EXPERTS else _all_at_once
    return compute(weights, x, choice, name, num_experts, body)


def _one_after_the_other(
    weights: NamedWeights, x: ov.Node, choice: Chosen, name: str, count: int, body: ExpertBody
) -> ov.Node:
    total = ops.broadcast(floating(0), ops.shape_of(x))
    for expert, projections in enumerate(_expert_linears(weights, name, count)):
        is_chosen = ops.equal(choice.experts, ints32([expert]))
        shares = ops.reduce_sum(ops.select(is_chosen, choice.weights, floating(0)), ints64([1]), False)
        rows = ops.squeeze(ops.non_zero(shares, "i32"), ints64([0]))
        output = body(ops.gather(x, rows, ints64([0])), projections)
        weighted = ops.multiply(output, ops.unsqueeze(ops.gather(shares, rows, ints64([0])), ints64([1])))
        total = scatter_nd_update(total, ops.unsqueeze(rows, ints64([1])), weighted, "sum")
    return total


def _expert_linears(weights: NamedWeights, name: str, count: int) -> list[ExpertLinear]:
    """Return the projections of each expert; `name` is that of all."""
    matrices: dict[str, list[ov.Node]] = {}
    biases: dict[str, FloatArray] = {}

    def multiply(x: ov.Node, part: str, num_out: int, bias: bool, expert: int) -> ov.Node:
        if part not in matrices:
            matrices[part] = weights.matrices(f"{name}.{part}.weight", (count, num_out, num_features(x)))
            if bias:
                biases[part] = values_of(weights.constant(f"{name}.{part}_bias", (count, num_out)))
        product = ops.matmul(x, matrices[part][expert], False, True)
        return ops.add(product, ops.constant(biases[part][expert])) if bias else product

    return [partial(multiply, expert=expert) for expert in range(count)]


def _all_at_once(weights: NamedWeights, x: ov.Node, choice: Chosen, name: str, count: int, body: ExpertBody) -> ov.Node:
    size = num_features(x)
    rows = ops.reshape(_in_a_batch(x), ints64([-1, size]), False)
    tiled = ops.reshape(ops.tile(rows, ints64([count, 1])), ints64([count, -1, size]), False)

    def multiply(x: ov.Node, part: str, num_out: int, bias: bool) -> ov.Node:
        weight = weights.constant(f"{name}.{part}.weight", (count, num_out, num_features(x)))
        product = ops.matmul(x, weight, False, True)
        if not bias:
            return product
        stored = values_of(weights.constant(f"{name}.{part}_bias", (count, num_out)))
        return ops.add(product, ops.constant(stored.reshape(count, 1, num_out)))

    outputs = ops.reshape(body(tiled, multiply), ints64([count, 1, -1, size]), False)
    num_tokens = ops.gather(ops.shape_of(choice.experts), ints64([0]), ints64([0]))
    none = ops.broadcast(floating(0), ops.concat([num_tokens, ints64([count])], 0))
    shares = ops.scatter_elements_update(none, choice.experts, choice.weights, ints64([1]))
    by_expert = ops.reshape(ops.transpose(shares, ints64([1, 0])), ints64([count, 1, -1]), False)
    weighted = ops.multiply(outputs, ops.unsqueeze(by_expert, ints64([3])))
    return ops.reshape(ops.reduce_sum(weighted, ints64([0]), False), ints64([-1, size]), False)


def _in_a_batch(x: ov.Node) -> ov.Node:
    """Return x as [1, num_tokens, hidden_size]. The compiler must not see that the reshape after it undoes that: the
    recognized form begins with one."""
    return ops.unsqueeze(x, ints64([0]))


def keep_best_groups(scores: ov.Node, count: int, num_kept: int, num_counted: int, other: float) -> ov.Node:
    """See `Kernels.keep_best_groups`."""
    by_group = ops.reshape(scores, ints64([0, count, -1]), True)
    best, _ = largest(by_group, num_counted)
    _, groups = largest(ops.reduce_sum(best, ints64([2]), False), num_kept)
    columns = ops.constant(np.arange(count, dtype=np.int32).reshape(1, 1, count))
    is_chosen = ops.reduce_logical_or(ops.equal(ops.unsqueeze(groups, ints64([2])), columns), ints64([1]), False)
    kept = ops.select(ops.unsqueeze(is_chosen, ints64([2])), by_group, floating(other))
    return ops.reshape(kept, ints64([0, -1]), True)

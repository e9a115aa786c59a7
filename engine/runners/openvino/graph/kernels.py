"""`sluice.engine.models.kernels` as nodes of a graph. Features are f32 nodes. They are written in the forms that
OpenVINO's CPU plugin recognizes and fuses: RMS norm, rotation, matmul with bias and paged attention each become one
kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from sluice.engine.arrays import FloatArray
from sluice.engine.models.architectures.deepseek import attend_with_all_heads
from sluice.engine.models.architectures.lfm2 import cache_heads
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.rope import Rope, inverse_frequencies
from sluice.engine.models.decoder import attend_rotated
from sluice.engine.models.kernels import Chosen, ExpertBody, HeadRotation, Heads, LatentHeads, Scores
from sluice.engine.runners.openvino.graph.adapters import AdapterInputs
from sluice.engine.runners.openvino.graph.convolution import EarlierToken, convolve, earlier_tokens
from sluice.engine.runners.openvino.graph.experts import compute_experts, keep_best_groups
from sluice.engine.runners.openvino.graph.nodes import (
    ACTIVATIONS,
    TO_THE_END,
    floating,
    ints32,
    ints64,
    num_features,
    part,
    scaled,
    values_of,
)
from sluice.engine.runners.openvino.graph.operations import GraphOperations
from sluice.engine.runners.openvino.graph.paged_attention import Caches, PagedInputs, capped_attention, paged_attention
from sluice.engine.runners.openvino.weights.checkpoint import NamedWeights

_HEAD_AXIS = 3


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of this step's positions, [num_tokens, 1, 1, rotary_dim]."""

    cos: ov.Node
    sin: ov.Node


def rotation(rope: Rope, head_dim: int, max_model_len: int, positions: ov.Node) -> Rotation:
    """Compute the rotation of positions [num_tokens, 1, 1, 1] f32. Component i is paired with i + rotary_dim / 2."""
    frequencies = inverse_frequencies(rope, head_dim, max_model_len).reshape(1, 1, 1, -1)
    half = ops.multiply(positions, ops.constant(frequencies))
    angles = ops.concat([half, half], -1)
    amplitude = rope.amplitude(max_model_len)
    return Rotation(scaled(ops.cos(angles), amplitude), scaled(ops.sin(angles), amplitude))


def rotate(x: ov.Node, rotation: Rotation) -> ov.Node:
    """Rotate the first components of each head, as many as the rotation has, and keep the others."""
    rotary_dim = num_features(rotation.cos)
    if rotary_dim == num_features(x):
        return _rotate_components(x, rotation, rotary_dim)
    rotated = _rotate_components(part(x, 0, rotary_dim, _HEAD_AXIS), rotation, rotary_dim)
    return ops.concat([rotated, part(x, rotary_dim, TO_THE_END, _HEAD_AXIS)], -1)


def uninterleaved(x: ov.Node, rotary_dim: int) -> ov.Node:
    """Reorder the first `rotary_dim` components of each head, even ones first."""
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, num_features(x))]
    return ops.gather(x, ints64(order), ints64([_HEAD_AXIS]))


def _rotate_components(x: ov.Node, rotation: Rotation, rotary_dim: int) -> ov.Node:
    middle = rotary_dim // 2
    first, second = part(x, 0, middle, _HEAD_AXIS), part(x, middle, TO_THE_END, _HEAD_AXIS)
    turned = ops.concat([ops.multiply(second, floating(-1)), first], -1)
    return ops.add(ops.multiply(x, rotation.cos), ops.multiply(turned, rotation.sin))


_COMPONENTS = 3
"""The axis of a head's components: heads are [num_tokens, num_heads, 1, head_dim]."""


class GraphKernels(GraphOperations):
    """See `Kernels`. `step` has the graph's inputs by the names of a `StepBatch`, `caches` those of each layer.
    `max_model_len` is the length of the longest sequence (see `rope`). With `pads_values`, values are stored as long as
    keys: OpenVINO 2026.4 computes other answers from a cache in u8 with two lengths when several sequences are in a
    step."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: NamedWeights,
        step: Mapping[str, ov.Node],
        paged: PagedInputs,
        caches: Sequence[Caches],
        max_model_len: int,
        *,
        adapters: AdapterInputs | None = None,
        pads_values: bool = False,
    ) -> None:
        self._config = config
        self._weights = weights
        self._step = step
        self._paged = paged
        self._caches = caches
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._pads_values = pads_values
        self._embeddings: dict[str, ov.Node] = {}
        self._rotations: dict[Rope, Rotation] = {}

    @cached_property
    def positions(self) -> ov.Node:
        return ops.convert(ops.unsqueeze(self._step["position_ids"], ints64([1, 2, 3])), "f32")

    def weight(self, name: str, shape: tuple[int, ...]) -> ov.Node:
        return self._weights.constant(name, shape)

    def values(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        return values_of(self._weights.constant(name, shape))

    def embed_tokens(self, name: str, shape: tuple[int, int]) -> ov.Node:
        return self._embed(name, shape, "token_ids")

    def embed_positions(self, name: str, shape: tuple[int, int]) -> ov.Node:
        return self._embed(name, shape, "position_ids")

    def _embed(self, name: str, shape: tuple[int, int], rows: str) -> ov.Node:
        self._embeddings[name] = self._weights.constant(name, shape)
        return ops.gather(self._embeddings[name], self._step[rows], ops.constant(np.int32(0)))

    def sampled(self, x: ov.Node) -> ov.Node:
        return ops.gather(x, self._step["sampled_rows"], ops.constant(np.int32(0)))

    def project(self, x: ov.Node, name: str, num_out: int, bias: str | None = None) -> ov.Node:
        weight = self._embeddings.get(name)
        if weight is None:
            weight = self._weights.constant(name, (num_out, num_features(x)))
        product = ops.matmul(x, weight, False, True)
        return product if bias is None else ops.add(product, self._weights.constant(bias, (num_out,)))

    # -- projections

    def linear(self, x: ov.Node, name: str, num_out: int, *, bias: bool = False) -> ov.Node:
        product = ops.matmul(x, self._weights.constant(f"{name}.weight", (num_out, num_features(x))), False, True)
        if self._adapters is not None:
            product = self._adapters.add_to(product, x, self._weights.names.module(name))
        return ops.add(product, self._weights.constant(f"{name}.bias", (num_out,))) if bias else product

    def linears(
        self, x: ov.Node, names: Sequence[str], nums_out: Sequence[int], *, bias: bool = False
    ) -> list[ov.Node]:
        return [self.linear(x, name, num_out, bias=bias) for name, num_out in zip(names, nums_out, strict=True)]

    # -- norms

    def rms_norm(self, x: ov.Node, name: str, eps: float, *, offset: float = 0.0) -> ov.Node:
        weight = self._weights.constant(f"{name}.weight", (num_features(x),))
        if offset:
            weight = ops.constant(values_of(weight) + np.float32(offset))
        mean_square = ops.reduce_mean(ops.power(x, floating(2)), ints32([-1]), keep_dims=True)
        inverse = ops.divide(floating(1), ops.sqrt(ops.add(mean_square, floating(eps))))
        return ops.multiply(ops.multiply(x, inverse), weight)

    def add_and_norm(
        self, x: ov.Node, update: ov.Node, name: str, eps: float, *, offset: float = 0.0
    ) -> tuple[ov.Node, ov.Node]:
        total = self.add(x, update)
        return total, self.rms_norm(total, name, eps, offset=offset)

    def layer_norm(self, x: ov.Node, name: str, eps: float, *, bias: bool = True) -> ov.Node:
        shape = (num_features(x),)
        scaled = ops.multiply(_centred(x, eps), self._weights.constant(f"{name}.weight", shape))
        return ops.add(scaled, self._weights.constant(f"{name}.bias", shape)) if bias else scaled

    def layer_norm_by_head(self, heads: ov.Node, name: str, eps: float, num_heads: int) -> ov.Node:
        weight = self._weights.constant(f"{name}.weight", (num_heads, num_features(heads)))
        return ops.multiply(_centred(heads, eps), ops.unsqueeze(weight, ints64([1])))

    # -- activations

    def activate(self, x: ov.Node, activation: str) -> ov.Node:
        return ACTIVATIONS[activation](x)

    def gate(self, gate: ov.Node, up: ov.Node, activation: str) -> ov.Node:
        return ops.multiply(ACTIVATIONS[activation](gate), up)

    # -- attention

    def split_heads(self, x: ov.Node, size: int) -> ov.Node:
        return ops.reshape(x, ints64([0, -1, 1, size]), True)

    def join_heads(self, heads: ov.Node) -> ov.Node:
        return ops.reshape(heads, ints64([0, -1]), True)

    def repeat_heads(self, heads: ov.Node, count: int) -> ov.Node:
        return ops.tile(heads, ints64([1, count, 1, 1]))

    def uninterleave(self, heads: ov.Node, num_components: int) -> ov.Node:
        return uninterleaved(heads, num_components)

    def rotate(self, heads: ov.Node, rope: Rope) -> ov.Node:
        if rope not in self._rotations:
            self._rotations[rope] = rotation(rope, self._config.head_dim, self._max_model_len, self.positions)
        return rotate(heads, self._rotations[rope])

    def attend(self, query: ov.Node, key: ov.Node, value: ov.Node, layer: int, heads: Heads, scores: Scores) -> ov.Node:
        value_dim = heads.value_dim
        if not self._pads_values or value_dim is None or value_dim == heads.head_dim:
            return self._attend(query, key, value, layer, heads, scores)
        wide = self.split_heads(value, value_dim)
        added = ints64([0, 0, 0, heads.head_dim - value_dim])
        wide = self.join_heads(ops.pad(wide, ints64([0, 0, 0, 0]), added, "constant", floating(0)))
        equal = Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim)
        attended = self.split_heads(self._attend(query, key, wide, layer, equal, scores), heads.head_dim)
        return self.join_heads(part(attended, 0, value_dim, _COMPONENTS))

    def _attend(
        self, query: ov.Node, key: ov.Node, value: ov.Node, layer: int, heads: Heads, scores: Scores
    ) -> ov.Node:
        caches, paged = self._caches[layer], self._paged
        if scores.softcap is not None:
            return capped_attention(query, key, value, caches, paged, heads, scores)
        sinks = None
        if scores.sinks is not None:
            sinks = ops.reshape(self._weights.constant(scores.sinks, (heads.num_heads,)), ints64([1, -1, 1, 1]), False)
        scale, window = scores.scale, scores.window
        return paged_attention(query, key, value, caches, paged, heads, scale=scale, window=window, sinks=sinks)

    def attend_rotated(
        self,
        query: ov.Node,
        key: ov.Node,
        value: ov.Node,
        layer: int,
        heads: Heads,
        scores: Scores,
        rotation: HeadRotation,
    ) -> ov.Node:
        attended: ov.Node = attend_rotated(self, query, key, value, layer, heads, scores, rotation)
        return attended

    def attend_latent(
        self,
        query: ov.Node,
        short: ov.Node,
        turned: ov.Node,
        name: str,
        layer: int,
        heads: LatentHeads,
        scores: Scores,
    ) -> ov.Node:
        """See `Kernels.attend_latent`. The plugin's kernel takes no keys that are values too."""
        attended: ov.Node = attend_with_all_heads(self, query, short, turned, name, layer, heads, scores)
        return attended

    def convolve(self, x: ov.Node, layer: int, name: str) -> ov.Node:
        config = self._config
        taps = self._weights.constant(name, (config.hidden_size, 1, config.convolution_size))
        return convolve(x, taps, self._caches[layer], self._paged, cache_heads(config), self._earlier_tokens)

    @cached_property
    def _earlier_tokens(self) -> list[EarlierToken]:
        return earlier_tokens(self._paged, self._step["position_ids"], self._config.convolution_size)

    # -- experts

    def experts(self, x: ov.Node, choice: Chosen, name: str, num_experts: int, body: ExpertBody) -> ov.Node:
        return compute_experts(self._weights, x, choice, name, num_experts, body)

    def keep_best_groups(
        self, scores: ov.Node, num_groups: int, num_kept: int, num_counted: int, other: float
    ) -> ov.Node:
        return keep_best_groups(scores, num_groups, num_kept, num_counted, other)


def _centred(x: ov.Node, eps: float) -> ov.Node:
    return ops.mvn(x, ints32([-1]), True, eps, "inside_sqrt")

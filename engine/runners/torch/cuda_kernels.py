"""The kernels of `engine.runners.torch.kernels` that our own Triton kernels compute on a GPU."""

from typing import Any

import torch

from engine.models.config.rope import Rope
from engine.models.kernels import Heads, Scores
from engine.runners.torch.kernels import TorchKernels
from engine.runners.torch.rank_kernels import RankKernels
from engine.runners.torch.triton import attention, elementwise
from engine.runners.torch.triton.quantize import quantize_rows


class CudaKernels(TorchKernels):
    """Its launches depend on shapes alone, so that a CUDA graph can hold them."""

    quantize = staticmethod(quantize_rows)

    def rms_norm(self, x: torch.Tensor, name: str, eps: float, *, offset: float = 0.0) -> torch.Tensor:
        return elementwise.rms_norm(x, self.weight(f"{name}.weight", x.shape[-1:]), eps, offset=offset)

    def gate(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return elementwise.gate(gate, up, activation)

    def rotate(self, heads: torch.Tensor, rope: Rope) -> torch.Tensor:
        if rope not in self.step.rotations:
            cosines, sines = self.rotation(rope)
            self.step.rotations[rope] = cosines[:, 0], sines[:, 0]
        is_whole = heads.stride(1) == heads.shape[2] or heads.shape[1] == 1
        return elementwise.rotate(heads if is_whole else heads.contiguous(), *self.step.rotations[rope])

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, heads: Heads, scores: Scores
    ) -> torch.Tensor:
        step, pages, count = self.step, self.cache.layers[layer], len(query)
        keys, values = (each.reshape(count, heads.num_kv_heads, -1) for each in (key, value))
        attention.store(keys, values, pages.keys, pages.values, step.places)
        sinks = None if scores.sinks is None else self.weight(scores.sinks, (heads.num_heads,))
        options: dict[str, Any] = {"scale": scores.scale, "window": scores.window}
        options |= {"softcap": scores.softcap, "sinks": sinks}
        queries = query.reshape(count, heads.num_heads, heads.head_dim)
        attended = query.new_empty(count, heads.num_heads, heads.value_dim or heads.head_dim)
        first = step.num_decodes
        if first:
            decodes = queries[:first], pages.keys, pages.values, step.tables[:first], step.past_lens[:first]
            attention.decode(*decodes, **options, out=attended[:first])
        if step.begins is not None:
            prefills = queries[first:], pages.keys, pages.values, step.tables[first:], step.begins
            attention.prefill(*prefills, step.past_lens[first:], **options, out=attended[first:])
        return attended.view(count, -1)


class RankCudaKernels(RankKernels, CudaKernels):
    """The kernels of one rank of a model, on a GPU."""

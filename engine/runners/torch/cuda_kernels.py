"""The kernels of `sluice.engine.runners.torch.kernels` that our own Triton kernels compute on a GPU."""

from typing import Any

import torch

from sluice.engine.models.config.rope import Rope
from sluice.engine.models.kernels import HeadRotation, Heads, Scores
from sluice.engine.runners.torch.kernels import TorchKernels
from sluice.engine.runners.torch.latent import LatentProjection
from sluice.engine.runners.torch.rank_kernels import RankKernels
from sluice.engine.runners.torch.triton import attention, elementwise
from sluice.engine.runners.torch.triton.elementwise import quantize_rows


class CudaKernels(TorchKernels):
    """Its launches depend on shapes alone, so that a CUDA graph can hold them."""

    quantize = staticmethod(quantize_rows)

    def rms_norm(self, x: torch.Tensor, name: str, eps: float, *, offset: float = 0.0) -> torch.Tensor:
        return elementwise.rms_norm(x, self.weight(f"{name}.weight", x.shape[-1:]), eps, offset=offset)

    def add_and_norm(
        self, x: torch.Tensor, update: torch.Tensor, name: str, eps: float, *, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.weight(f"{name}.weight", x.shape[-1:])
        return x, elementwise.rms_norm(x, weight, eps, offset=offset, update=update.contiguous())

    def gate(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        return elementwise.gate(gate, up, activation)

    def rotate(self, heads: torch.Tensor, rope: Rope) -> torch.Tensor:
        return elementwise.rotate(_with_whole_rows(heads), *self._tables(rope))

    def _tables(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and the sines of this step's positions, [num_tokens, rotary_dim / 2]."""
        if rope not in self.step.rotations:
            cosines, sines = self.rotation(rope)
            self.step.rotations[rope] = cosines[:, 0], sines[:, 0]
        return self.step.rotations[rope]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, heads: Heads, scores: Scores
    ) -> torch.Tensor:
        pages, count = self.cache.layers[layer], len(query)
        keys, values = (each.reshape(count, heads.num_kv_heads, -1) for each in (key, value))
        attention.store(keys, values, pages.keys, pages.values, self.step.places)
        return self._attend(query.reshape(count, heads.num_heads, heads.head_dim), layer, heads, scores).view(count, -1)

    def attend_rotated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        heads: Heads,
        scores: Scores,
        rotation: HeadRotation,
    ) -> torch.Tensor:
        pages, norm, size = self.cache.layers[layer], rotation.norm, (heads.head_dim,)
        values = value.reshape(len(value), heads.num_kv_heads, -1)
        cosines, sines = self._tables(rotation.rope)
        norms = None
        if norm is not None:
            norms = self.weight(f"{norm.query}.weight", size), self.weight(f"{norm.key}.weight", size)
        queries = elementwise.rotate_and_store(
            _with_whole_rows(query),
            _with_whole_rows(key),
            _with_whole_rows(values),
            pages.keys,
            pages.values,
            self.step.places,
            cosines,
            sines,
            norms=norms,
            eps=0.0 if norm is None else norm.eps,
            norm_offset=0.0 if norm is None else norm.offset,
        )
        return self._attend(queries, layer, heads, scores).view(len(queries), -1)

    def attend_short(
        self, query: torch.Tensor, keys: torch.Tensor, projection: LatentProjection, layer: int, scores: Scores
    ) -> torch.Tensor:
        pages, heads = self.cache.layers[layer], projection.heads
        attention.store(keys, None, pages.keys, pages.values, self.step.places)
        shared = Heads(heads.num_heads, 1, heads.rank + heads.turned_dim, heads.rank)
        attended = self._attend(projection.absorb(query), layer, shared, scores, latent_dim=heads.rank)
        return projection.values(attended)

    def _attend(
        self, queries: torch.Tensor, layer: int, heads: Heads, scores: Scores, latent_dim: int | None = None
    ) -> torch.Tensor:
        """Attend from [num_tokens, num_heads, head_dim] to what is stored. The first `latent_dim` elements of a latent
        key are its value. Returns [num_tokens, num_heads, value_dim]."""
        step, pages = self.step, self.cache.layers[layer]
        options: dict[str, Any] = {"scale": scores.scale, "window": scores.window, "softcap": scores.softcap}
        options |= {"sinks": self._sinks(scores, heads.num_heads), "latent_dim": latent_dim}
        attended = queries.new_empty(*queries.shape[:2], heads.value_dim or heads.head_dim)
        first = step.num_decodes
        if first:
            decodes = queries[:first], pages.keys, pages.values, step.tables[:first], step.past_lens[:first]
            attention.decode(*decodes, **options, out=attended[:first])
        if step.begins is not None:
            prefills = queries[first:], pages.keys, pages.values, step.tables[first:], step.begins
            attention.prefill(*prefills, step.past_lens[first:], **options, out=attended[first:])
        return attended


def _with_whole_rows(heads: torch.Tensor) -> torch.Tensor:
    """Return heads of which a token's are one piece of memory, as those of a part of each head are not."""
    is_whole = heads.stride(2) == 1 and (heads.stride(1) == heads.shape[2] or heads.shape[1] == 1)
    return heads if is_whole else heads.contiguous()


class RankCudaKernels(RankKernels, CudaKernels):
    """The kernels of one rank of a model, on a GPU."""

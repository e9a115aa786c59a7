"""`sluice.engine.models.kernels.Kernels` in torch: each call computes at once, for the step that is set."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sluice.engine.arrays import FloatArray
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.rope import Rope, inverse_frequencies
from sluice.engine.models.decoder import attend_rotated
from sluice.engine.models.kernels import Chosen, ExpertBody, HeadRotation, Heads, LatentHeads, Scores
from sluice.engine.models.weights.names import is_router
from sluice.engine.runners.torch import attention
from sluice.engine.runners.torch.adapters import DeviceAdapters
from sluice.engine.runners.torch.cache import PagedKvCache
from sluice.engine.runners.torch.experts import compute_experts
from sluice.engine.runners.torch.fp8 import Quantize, quantize_rows
from sluice.engine.runners.torch.latent import LatentProjection, find_projection
from sluice.engine.runners.torch.operations import TorchOperations, linear
from sluice.engine.runners.torch.step import BLOCK_SIZE, DeviceStep
from sluice.engine.runners.torch.weights import DeviceWeights


class TorchKernels(TorchOperations):
    """The kernels of one model. `cache` and `step` are set before each pass."""

    cache: PagedKvCache
    step: DeviceStep
    quantize: Quantize = staticmethod(quantize_rows)

    def __init__(
        self,
        config: DecoderConfig,
        weights: DeviceWeights,
        max_model_len: int,
        adapters: DeviceAdapters | None,
        *,
        groups_experts: bool = False,
    ) -> None:
        self._config = config
        self._weights = weights
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._groups_experts = groups_experts
        self._attention = attention.GatheredAttention()
        self._ropes: dict[Rope, torch.Tensor] = {}
        self._scales: dict[tuple[str, float], torch.Tensor] = {}

    # -- weights and the step's inputs

    @property
    def positions(self) -> torch.Tensor:
        return self.step.positions.float()[:, None, None]

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.tensor(name, shape, torch.float32)

    def values(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        return self._weights.values(name, shape)

    def embed_tokens(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return F.embedding(self.step.token_ids, self._weights.tensor(name, shape))

    def embed_positions(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return F.embedding(self.step.positions, self._weights.tensor(name, shape))

    def sampled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.step.sampled is None else x.index_select(0, self.step.sampled)

    # -- projections

    def project(self, x: torch.Tensor, name: str, num_out: int, bias: str | None = None) -> torch.Tensor:
        weight = self._weights.tensor(name, (num_out, x.shape[-1]))
        return linear(x, weight, None if bias is None else self._weights.tensor(bias, (num_out,)))

    def linear(self, x: torch.Tensor, name: str, num_out: int, *, bias: bool = False) -> torch.Tensor:
        # The choice of experts is in float32: one that changes costs more than a rounded sum.
        is_exact = is_router(name)
        dtype = torch.float32 if is_exact else x.dtype
        biases = self._weights.tensor(f"{name}.bias", (num_out,), dtype) if bias else None
        scaled = None if is_exact else self._weights.scaled((f"{name}.weight",), (num_out,), x.shape[-1])
        if scaled is None:
            weight = self._weights.tensor(f"{name}.weight", (num_out, x.shape[-1]), dtype)
            product = linear(x.to(dtype), weight, biases)
        else:
            product = scaled.linear(x, biases, self.quantize)
        return product if self._adapters is None else self._adapters.add_to(product, x, name, self.step.adapters)

    def linears(
        self, x: torch.Tensor, names: Sequence[str], nums_out: Sequence[int], *, bias: bool = False
    ) -> list[torch.Tensor]:
        num_in, weights, sizes = x.shape[-1], tuple(f"{name}.weight" for name in names), tuple(nums_out)
        biases = None
        if bias:
            biases = self._weights.joined(tuple(f"{name}.bias" for name in names), tuple((each,) for each in nums_out))
        scaled = self._weights.scaled(weights, sizes, num_in)
        if scaled is None:
            weight = self._weights.joined(weights, tuple((num_out, num_in) for num_out in nums_out))
            joined = linear(x, weight, biases)
        else:
            joined = scaled.linear(x, biases, self.quantize)
        products = list(joined.split(sizes, -1))
        if self._adapters is None:
            return products
        adapters = self._adapters
        return [adapters.add_to(each, x, name, self.step.adapters) for name, each in zip(names, products, strict=True)]

    # -- norms

    def rms_norm(self, x: torch.Tensor, name: str, eps: float, *, offset: float = 0.0) -> torch.Tensor:
        size = x.shape[-1:]
        scale = self._scales.get((name, offset))
        if scale is None:
            scale = self._scales[name, offset] = self.weight(f"{name}.weight", size) + offset
        return F.rms_norm(x.float(), size, scale, eps).to(x.dtype)

    def add_and_norm(
        self, x: torch.Tensor, update: torch.Tensor, name: str, eps: float, *, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add(x, update)
        return total, self.rms_norm(total, name, eps, offset=offset)

    def layer_norm(self, x: torch.Tensor, name: str, eps: float, *, bias: bool = True) -> torch.Tensor:
        size = x.shape[-1:]
        shift = self.weight(f"{name}.bias", size) if bias else None
        return F.layer_norm(x.float(), size, self.weight(f"{name}.weight", size), shift, eps).to(x.dtype)

    def layer_norm_by_head(self, heads: torch.Tensor, name: str, eps: float, num_heads: int) -> torch.Tensor:
        size = heads.shape[-1:]
        scale = self.weight(f"{name}.weight", (num_heads, *size))
        return (F.layer_norm(heads.float(), size, None, None, eps) * scale).to(heads.dtype)

    # -- attention

    def rotate(self, heads: torch.Tensor, rope: Rope) -> torch.Tensor:
        if rope not in self.step.rotations:
            cosines, sines = self.rotation(rope)
            self.step.rotations[rope] = torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)
        cosines, sines = self.step.rotations[rope]
        count = cosines.shape[-1]
        turned = heads[..., :count].float()
        rotated = torch.addcmul(turned * cosines, turned.roll(count // 2, -1), sines).to(heads.dtype)
        return rotated if count == heads.shape[-1] else torch.cat((rotated, heads[..., count:]), -1)

    def rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and the sines of this step's positions, [num_tokens, 1, rotary_dim / 2]."""
        angles = self.step.positions.float()[:, None, None] * self._frequencies(rope)
        amplitude = rope.amplitude(self._max_model_len)
        return angles.cos() * amplitude, angles.sin() * amplitude

    def _frequencies(self, rope: Rope) -> torch.Tensor:
        if rope not in self._ropes:
            frequencies = inverse_frequencies(rope, self._config.head_dim, self._max_model_len)
            self._ropes[rope] = torch.from_numpy(frequencies).to(self.step.positions.device)
        return self._ropes[rope]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, heads: Heads, scores: Scores
    ) -> torch.Tensor:
        count, kv, pages = len(query), heads.num_kv_heads, self.cache.layers[layer]
        attention.store(pages, key.reshape(count, kv, -1), value.reshape(count, kv, -1), self.step)
        sinks = self._sinks(scores, heads.num_heads)
        by_head = query.reshape(count, heads.num_heads, heads.head_dim)
        return self._attention.attend(by_head, pages, self.step, heads, scores, sinks).view(count, -1)

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
        attended: torch.Tensor = attend_rotated(self, query, key, value, layer, heads, scores, rotation)
        return attended

    def attend_latent(
        self,
        query: torch.Tensor,
        short: torch.Tensor,
        turned: torch.Tensor,
        name: str,
        layer: int,
        heads: LatentHeads,
        scores: Scores,
    ) -> torch.Tensor:
        """See `Kernels.attend_latent`. The cache has `short` and `turned` of each token, as a key of one head whose
        first part is its value."""
        projection = find_projection(name, heads, self._weights, self._adapters, self.step.adapters)
        keys = torch.cat((short[:, None], turned), -1)
        return self.attend_short(query, keys, projection, layer, scores).reshape(len(query), -1)

    def attend_short(
        self, query: torch.Tensor, keys: torch.Tensor, projection: LatentProjection, layer: int, scores: Scores
    ) -> torch.Tensor:
        """Store the keys [num_tokens, 1, rank + turned_dim] of latent pages, then attend to those: query [num_tokens,
        num_heads, plain_dim + turned_dim] -> [num_tokens, num_heads, value_dim]."""
        pages, sinks = self.cache.layers[layer], self._sinks(scores, projection.heads.num_heads)
        attention.store(pages, keys, None, self.step)
        return self._attention.attend_latent(query, pages, self.step, projection, scores, sinks)

    def _sinks(self, scores: Scores, num_heads: int) -> torch.Tensor | None:
        return None if scores.sinks is None else self.weight(scores.sinks, (num_heads,))

    def convolve(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        pages, size, hidden = self.cache.layers[layer], self._config.convolution_size, x.shape[-1]
        taps = self.weight(name, (hidden, 1, size))[:, 0].to(x.dtype)
        assert pages.values is not None, "a convolution keeps half of each input as a value"
        half = pages.keys.shape[-1]
        attention.store(pages, x[:, None, :half], x[:, None, half:], self.step)
        total = x * taps[:, -1]
        if size == 1:
            return total
        blocks, slots, exists = self._earlier(size - 1)
        stored = torch.cat((pages.keys[blocks, 0, slots], pages.values[blocks, 0, slots]), -1)
        # What is not written may hold NaN of another sequence, and a weight of 0 times NaN is NaN.
        stored = torch.where(exists[..., None], stored, 0)
        return total + (stored * taps[:, :-1].T).sum(1)

    def _earlier(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the places of the `count` tokens before each, oldest first, [num_tokens, count]: block, slot, and
        whether there is such a token."""
        step = self.step
        if count not in step.earlier:
            places = step.positions[:, None] - torch.arange(count, 0, -1, device=step.positions.device)
            exists = places >= 0
            places = places.clamp(min=0)
            blocks = step.tables[step.sequences[:, None], places // BLOCK_SIZE]
            step.earlier[count] = blocks, places % BLOCK_SIZE, exists
        return step.earlier[count]

    # -- experts

    def experts(self, x: torch.Tensor, choice: Chosen, name: str, num_experts: int, body: ExpertBody) -> torch.Tensor:
        is_grouped = self._groups_experts
        return compute_experts(self._weights, x, choice, name, num_experts, body, is_grouped=is_grouped)

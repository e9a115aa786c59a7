"""The kernels of a rank: those of a whole model, and what ranks exchange between them. In each layer they add up the
outputs of attention and of MLP; a norm over all heads takes a sum more."""

import torch
import torch.nn.functional as F

from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.kernels import Chosen, ExpertBody
from sluice.engine.models.weights.names import EMBEDDING
from sluice.engine.runners.torch.kernels import TorchKernels
from sluice.engine.runners.torch.operations import linear
from sluice.engine.runners.torch.parallel import Ranks, Shares, is_divided_by_input
from sluice.engine.runners.torch.weights import DeviceWeights


class RankKernels(TorchKernels):
    """The kernels of one rank of a model."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DeviceWeights,
        max_model_len: int,
        shares: Shares,
        ranks: Ranks,
        *,
        groups_experts: bool = False,
    ) -> None:
        super().__init__(config, weights, max_model_len, None, groups_experts=groups_experts)
        self._shares = shares
        self._ranks = ranks

    def linear(self, x: torch.Tensor, name: str, num_out: int, *, bias: bool = False) -> torch.Tensor:
        product = super().linear(x, name, num_out, bias=bias)
        return self._ranks.add_up(product) if is_divided_by_input(name) else product

    def experts(self, x: torch.Tensor, choice: Chosen, name: str, num_experts: int, body: ExpertBody) -> torch.Tensor:
        """See `Kernels.experts`. Each rank has a part of every expert, so that all have the same work."""
        return self._ranks.add_up(super().experts(x, choice, name, num_experts, body))

    def project(self, x: torch.Tensor, name: str, num_out: int, bias: str | None = None) -> torch.Tensor:
        """See `Kernels.project`. Each rank computes the logits of its part of the vocabulary: the LM head takes a
        large part of the weights that a step reads."""
        tokens = self._shares.vocabulary
        if name == EMBEDDING:  # all of it is here, for the tokens
            weight = self._weights.tensor(name, (num_out, x.shape[-1]))[tokens.start : tokens.stop]
            product = linear(x, weight, None if bias is None else self._weights.tensor(bias, (len(tokens),)))
        else:
            product = super().project(x, name, len(tokens), bias)
        filled = F.pad(product, (0, self._shares.vocabulary_share - len(tokens)))
        return self._ranks.gather(filled)[:, :num_out].contiguous()

    def rms_norm(self, x: torch.Tensor, name: str, eps: float, *, offset: float = 0.0) -> torch.Tensor:
        if x.dim() != 2 or not name.endswith((".q_norm", ".k_norm")):
            return super().rms_norm(x, name, eps, offset=offset)
        # All heads are one vector. Where ranks have the same KV head, the sum and the count have it as often.
        wide, num_own = x.float(), x.shape[-1]
        squares = self._ranks.add_up(wide.square().sum(-1, keepdim=True))
        begin, whole = self._own(name, num_own)
        scale = self.weight(f"{name}.weight", (whole,))[begin : begin + num_own] + offset
        return (wide * torch.rsqrt(squares / (num_own * self._ranks.size) + eps) * scale).to(x.dtype)

    def layer_norm_by_head(self, heads: torch.Tensor, name: str, eps: float, num_heads: int) -> torch.Tensor:
        size = heads.shape[-1:]
        begin, whole = self._own(name, num_heads)
        scale = self.weight(f"{name}.weight", (whole, *size))[begin : begin + num_heads]
        return (F.layer_norm(heads.float(), size, None, None, eps) * scale).to(heads.dtype)

    def _own(self, name: str, count: int) -> tuple[int, int]:
        return self._shares.own_kv(count) if name.endswith(".k_norm") else self._shares.own(count)

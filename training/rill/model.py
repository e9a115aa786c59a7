"""The network: a small Llama with the parameter names of `transformers`."""

# The checks run without torch, where `nn.Module` is `Any`.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of the network. Layers are few, since each costs latency on a CPU whatever its width."""

    vocab_size: int = 4096
    hidden_size: int = 320
    num_layers: int = 6
    num_heads: int = 5
    intermediate_size: int = 768
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(shape.hidden_size, shape.hidden_size, bias=False))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.shape.num_heads, self.shape.head_size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = _rotate(self._heads(self.q_proj(x)), cos, sin)
        key = _rotate(self._heads(self.k_proj(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, self._heads(self.v_proj(x)), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape)


class Rill(nn.Module):
    """Maps token ids [batch, length] to logits [batch, length, vocab]. Input and output embeddings are shared."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Body(shape)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_size, 2) / shape.head_size)
        angles = torch.outer(torch.arange(shape.max_positions).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every layer starts as the identity
            elif "embed" in name:
                nn.init.normal_(parameter, 0, 0.02)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, 0, 0.6 / math.sqrt(parameter.shape[1]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = (table[: ids.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def weighted_loss(model: nn.Module, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, weighted by target."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (loss * flat).sum() / flat.sum().clamp(min=1.0)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())

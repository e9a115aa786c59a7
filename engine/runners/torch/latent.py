"""The projection of latent attention that makes keys and values of all heads out of a token's short vector. Short
vectors are what the cache has. Either they are multiplied by it, or, which is less arithmetic for a few tokens that see
many, its part for keys multiplies their queries, and its part for values what they see."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sluice.engine.models.kernels import LatentHeads
from sluice.engine.runners.torch.adapters import DeviceAdapters
from sluice.engine.runners.torch.weights import DeviceWeights


@dataclass(frozen=True, slots=True)
class _OwnAdapters:
    """The stacked matrices of LoRA adapters, and which of them each token has. All tokens of a sequence have the same:
    what a token sees has its own."""

    stacks: DeviceAdapters
    a: torch.Tensor
    b: torch.Tensor
    adapters: torch.Tensor

    def of(self, rows: torch.Tensor | slice) -> "_OwnAdapters":
        return replace(self, adapters=self.adapters[rows])

    def own(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, ..., ranks] with 0 in the ranks of others' adapters."""
        return self.stacks.keep_own(by_rank, self.adapters)


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """A layer's projection, and its adapters for some tokens. Its matrix is not in 8 bits, whatever others are."""

    heads: LatentHeads
    matrix: torch.Tensor
    """[num_heads * (plain_dim + value_dim), rank]"""
    adapted: _OwnAdapters | None = None
    """None if none of the tokens has an adapter that changes it."""

    def of(self, rows: torch.Tensor | slice) -> "LatentProjection":
        """Return the projection for some of the tokens."""
        return self if self.adapted is None else replace(self, adapted=self.adapted.of(rows))

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries that multiply keys of latent pages as `query`, [num_tokens, num_heads, plain_dim +
        turned_dim], multiplies the keys made of them: [num_tokens, num_heads, rank + turned_dim]."""
        plain, turned = query.split((self.heads.plain_dim, self.heads.turned_dim), -1)
        absorbed = _multiply(plain, self._by_head(self.matrix)[0])
        if (adapted := self.adapted) is not None:
            absorbed = absorbed + adapted.own(_multiply(plain, self._by_head(adapted.b)[0])) @ adapted.a
        return torch.cat((absorbed, turned), -1)

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """Return the mixed values [num_tokens, num_heads, value_dim], of mixed short vectors with rank elements."""
        values = _multiply(mixed, self._by_head(self.matrix)[1].mT)
        if (adapted := self.adapted) is not None:
            values = values + _multiply(adapted.own(mixed @ adapted.a.T), self._by_head(adapted.b)[1].mT)
        return values

    def expand(self, seen: torch.Tensor, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all heads, [num_seqs, num_heads, slots, size] in float32, of what sequences
        with `num_new` of the tokens each see: keys of latent pages [num_seqs, slots, rank + turned_dim] in float32."""
        heads, (num_seqs, slots, _) = self.heads, seen.shape
        short, turned = seen[..., : heads.rank].to(self.matrix.dtype), seen[..., heads.rank :]
        wide = F.linear(short, self.matrix)
        if self.adapted is not None:
            adapted = self.adapted.of(slice(None, None, num_new))
            wide = wide + adapted.own(short @ adapted.a.T) @ adapted.b.T
        by_head = wide.float().view(num_seqs, slots, heads.num_heads, -1).transpose(1, 2)
        keys = torch.cat((by_head[..., : heads.plain_dim], turned[:, None].expand(-1, heads.num_heads, -1, -1)), -1)
        return keys, by_head[..., heads.plain_dim :]

    def _by_head(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows for keys [num_heads, plain_dim, columns] and those for values."""
        by_head = matrix.view(self.heads.num_heads, -1, matrix.shape[-1])
        return by_head[:, : self.heads.plain_dim], by_head[:, self.heads.plain_dim :]


def find_projection(
    name: str, heads: LatentHeads, weights: DeviceWeights, stacks: DeviceAdapters | None, adapters: torch.Tensor | None
) -> LatentProjection:
    """Return projection `name` for a step's tokens, which have `adapters`."""
    shape = heads.num_heads * (heads.plain_dim + heads.value_dim), heads.rank
    matrix = weights.tensor(f"{name}.weight", shape)
    found = None if stacks is None else stacks.find(name, shape, adapters)
    if stacks is None or found is None or adapters is None:
        return LatentProjection(heads, matrix)
    return LatentProjection(heads, matrix, _OwnAdapters(stacks, *found, adapters))


def _multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Multiply [num_tokens, num_heads, n] by a matrix of each head, [num_heads, n, m]."""
    return torch.bmm(rows.transpose(0, 1), matrices).transpose(0, 1)

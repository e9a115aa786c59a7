"""Tensor parallel: the part of a model that each of several ranks has, and what they exchange.

A rank's configuration has its share of the heads and of the features between the matrices of an MLP or an expert, so
that the families build a rank's part as they build a whole model. The matrices behind those, `o_proj` and `down_proj`,
have a share of their columns, and what the ranks' products give is added up. All else is on every rank: norms,
embeddings, routers, convolutions, the short vectors of latent attention.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.weights.names import HEAD, HEAD_BIAS
from sluice.engine.runners.torch.weights import Part, WeightSource
from sluice.errors import SluiceError, invalid

_BY_QUERY_HEAD = ("q_proj", "q_b_proj", "kv_b_proj", "heads_qkv_proj", "sinks")
_BY_KV_HEAD = ("k_proj", "v_proj")
_BY_FEATURE = ("gate_proj", "up_proj", "c_fc")
_BY_INPUT = ("o_proj", "down_proj", "c_proj")
_SUFFIXES = (".weight", ".bias", "_bias")


def is_divided_by_input(name: str) -> bool:
    """Return whether each rank has a part of the input of this projection, so that the products are to be added up."""
    return name.rpartition(".")[2] in _BY_INPUT


class Meeting(msgspec.Struct, frozen=True):
    """How the ranks' processes find each other."""

    rank: int
    size: int
    device_type: str
    store: str
    """A file that only this user can access, and rank 0 removes: no port is open to others."""
    timeout_s: float
    """How long a rank may wait for the others within a step."""


def join(meeting: Meeting) -> None:
    """Meet the other ranks, which are processes of this machine. Raises RuntimeError where one does not come."""
    # What gloo binds by itself is the address of the machine's name, which others can reach, or none.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # noqa: TID251 - gloo's own
    is_cuda = meeting.device_type == "cuda"
    if is_cuda:
        torch.cuda.set_device(meeting.rank)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=dist.FileStore(meeting.store, meeting.size),
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timedelta(seconds=meeting.timeout_s),
    )


@dataclass
class Ranks:
    """One rank among those that share a model."""

    rank: int
    size: int
    agree: Callable[[int], int]
    """Returns the least of the numbers that all ranks call it with."""
    are_together: bool = field(default=False, init=False)
    """Whether each rank runs every step. Before that each reads its weights at its own pace, by a pass whose numbers
    nobody reads."""

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers. From then on they compute together."""
        agreed = self.agree(number)
        self.are_together = True
        return agreed

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Replace `x` by the sum of all ranks'."""
        x = x.contiguous()
        if self.are_together:
            dist.all_reduce(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, [rows, columns] -> [rows, size * columns]."""
        parts = x.new_zeros((self.size, *x.shape))
        if self.are_together:
            dist.all_gather(list(parts.unbind(0)), x.contiguous())
        return parts.transpose(0, 1).reshape(len(x), self.size * x.shape[1])


# -- the parts of a rank


def share_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return the configuration of one of `size` ranks. Raises INVALID for what so many cannot share."""
    experts, has_mlp = config.experts, not all(layer.has_experts for layer in config.layers)
    if experts is not None:
        experts = replace(
            experts,
            size=_share("the intermediate size of the experts", experts.size, size),
            shared_size=_share("the intermediate size of the shared expert", experts.shared_size, size),
        )
    intermediate = config.intermediate_size
    return replace(
        config,
        num_heads=_share("num_attention_heads", config.num_heads, size),
        num_kv_heads=_share_kv_heads(config.num_kv_heads, size),
        intermediate_size=_share("intermediate_size", intermediate, size) if has_mlp else intermediate,
        experts=experts,
    )


def _share(what: str, number: int, size: int) -> int:
    if number % size:
        raise _indivisible(what, number, size, f"it must divide {number}")
    return number // size


def _share_kv_heads(number: int, size: int) -> int:
    """Return the heads of a rank. Where there are fewer heads than ranks, several ranks have the same one."""
    if number % size and size % number:
        raise _indivisible("num_key_value_heads", number, size, f"it must divide {number}, or be a multiple of it")
    return max(1, number // size)


def _indivisible(what: str, number: int, size: int, wanted: str) -> SluiceError:
    message = f"tensor_parallel_size is {size}, but {what} of this model is {number}: {wanted}"
    return invalid("tensor_parallel_size", message)


class Shares:
    """The features of a whole model that a rank has."""

    def __init__(self, config: DecoderConfig, ranks: Ranks) -> None:
        """`config` is that of the whole model."""
        self._rank, self._size, self._num_kv_heads = ranks.rank, ranks.size, config.num_kv_heads
        self._local_kv_heads = _share_kv_heads(config.num_kv_heads, ranks.size)
        self._sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._vocab_size = config.vocab_size

    def own(self, count: int) -> tuple[int, int]:
        """Return where `count` features of the rank begin, and how many there are on all ranks."""
        return self._rank * count, self._size * count

    def own_kv(self, count: int) -> tuple[int, int]:
        """Return the same for features of KV heads, which several ranks may have."""
        each = count // self._local_kv_heads
        return self._rank * self._num_kv_heads // self._size * each, self._num_kv_heads * each

    @property
    def vocabulary(self) -> range:
        """The token ids whose logits this rank computes: as many on each, but for the last ones."""
        begin = min(self._rank * self.vocabulary_share, self._vocab_size)
        return range(begin, min(begin + self.vocabulary_share, self._vocab_size))

    @property
    def vocabulary_share(self) -> int:
        return -(-self._vocab_size // self._size)

    def part(self, name: str, shape: tuple[int, ...]) -> Part | None:
        """Return the part of tensor `name` that is the rank's, of this shape; None for the whole."""
        if name in (HEAD, HEAD_BIAS):
            tokens = self.vocabulary
            return Part(_rows(name), ((tokens.start, tokens.stop),), self._vocab_size)
        module = next((name.removesuffix(each) for each in _SUFFIXES if name.endswith(each)), name)
        kind, is_expert = module.rpartition(".")[2], ".experts." in name
        if kind in _BY_INPUT:
            return None if _is_bias(name) else _part(-1, shape, self.own)
        if kind in (*_BY_QUERY_HEAD, *_BY_FEATURE) or (kind == "gate_up_proj" and is_expert):
            return _part(_rows(name), shape, self.own)
        if kind in _BY_KV_HEAD:
            return _part(_rows(name), shape, self.own_kv)
        if kind == "qkv_proj":
            return self._fused_heads(_rows(name))
        return self._fused_halves(_rows(name), shape) if kind == "gate_up_proj" else None

    def is_counted_once(self, name: str) -> bool:
        """Return whether the tensor is a bias of products that are added up."""
        return _is_bias(name) and is_divided_by_input(name.removesuffix(".bias").removesuffix("_bias"))

    def _fused_heads(self, axis: int) -> Part:
        query, key = self._sizes
        own_query = query // self._size
        begin, _ = self.own(own_query)
        own_key = key // self._num_kv_heads * self._local_kv_heads
        kv_begin, _ = self.own_kv(own_key)
        starts = (begin, own_query), (query + kv_begin, own_key), (query + key + kv_begin, own_key)
        return Part(axis, tuple((start, start + count) for start, count in starts), query + 2 * key)

    def _fused_halves(self, axis: int, shape: tuple[int, ...]) -> Part:
        half = shape[axis] // 2
        begin, whole = self.own(half)
        return Part(axis, ((begin, begin + half), (whole + begin, whole + begin + half)), 2 * whole)


def _part(axis: int, shape: tuple[int, ...], own: Callable[[int], tuple[int, int]]) -> Part:
    begin, whole = own(shape[axis])
    return Part(axis, ((begin, begin + shape[axis]),), whole)


def _rows(name: str) -> int:
    """Return the axis of the features out."""
    return -2 if name.endswith(".weight") else -1


def _is_bias(name: str) -> bool:
    return name.endswith(("_bias", ".bias"))


class RankWeights:
    """The tensors of a rank: it reads no more of a checkpoint than its part."""

    def __init__(self, source: WeightSource, shares: Shares, ranks: Ranks) -> None:
        self._source = source
        self._shares = shares
        self._ranks = ranks
        self.has_own_head = source.has_own_head

    def copy(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """See `WeightSource.copy`."""
        assert part is None, "a rank's part is not divided again"
        self._source.copy(name, target, self._shares.part(name, tuple(target.shape)))
        if self._ranks.rank and self._shares.is_counted_once(name):
            target.zero_()

    def copy_codes(self, name: str, codes: torch.Tensor, scales: torch.Tensor, part: Part | None = None) -> bool:
        """See `WeightSource.copy_codes`."""
        assert part is None, "a rank's part is not divided again"
        return self._source.copy_codes(name, codes, scales, self._shares.part(name, tuple(codes.shape)))

    def module(self, name: str) -> str:
        """See `WeightSource.module`."""
        return self._source.module(name)

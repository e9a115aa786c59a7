"""Arithmetic of KV blocks, and the chained hashes that identify full blocks in the prefix cache."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import NewType

from sluice.engine.types import BlockSource

BlockHash = NewType("BlockHash", bytes)
"""Hash of a block's tokens, all tokens before them, the request's cache salt and its LoRA adapter."""

DIGEST_BYTES = 16
"""128 bits of a cryptographic hash, so that no tenant can construct a prefix that collides with another's."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


def worst_case_blocks(prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Return the most blocks a sequence can ever need. The last sampled token is never fed back and needs no slot."""
    return blocks_for(prompt_tokens + max_tokens - 1, block_size)


class HashChain:
    """The block hashes of one sequence, computed when they are first needed."""

    __slots__ = ("_block_size", "_hashes", "_root")

    def __init__(self, salt: str, block_size: int, adapter: str = "") -> None:
        """`adapter` is the digest of the LoRA adapter that computes the blocks (`EngineInfo.adapter_digests`), the same
        in every engine that has loaded these weights; "" for none."""
        self._block_size = block_size
        self._root = chain_root(salt, adapter)
        self._hashes: list[BlockHash] = []

    def hashes(self, token_ids: list[int], num_blocks: int) -> list[BlockHash]:
        """Return the hashes of the first `num_blocks` blocks of `token_ids`, which must fill them and may only grow."""
        hashes, size = self._hashes, self._block_size
        while len(hashes) < num_blocks:
            begin = len(hashes) * size
            parent = hashes[-1] if hashes else self._root
            hashes.append(next_hash(parent, array("i", token_ids[begin : begin + size])))
        return hashes[:num_blocks]


def chain_root(salt: str, adapter: str) -> BlockHash:
    """Return what the hashes of a chain begin with."""
    root = _digest(b"", salt.encode())
    if adapter:  # of an odd length, which the tokens of a block never have
        root = _digest(root, b"adapter" + blake2b(adapter.encode(), digest_size=16).digest())
    return root


def next_hash(parent: BlockHash, token_ids: "array[int]") -> BlockHash:
    """Return the hash of the block with these tokens, of the type "i", that follows `parent`."""
    return _digest(parent, token_ids.tobytes())


class PromptOrigin:
    """Where another engine has blocks of one sequence's prompt. It has fewer with each that turns out to be gone."""

    __slots__ = ("hashes", "source")

    def __init__(self, source: BlockSource, hashes: Iterable[BlockHash]) -> None:
        self.source = source
        self.hashes = set(hashes)


def _digest(parent: bytes, content: bytes) -> BlockHash:
    return BlockHash(blake2b(content, key=parent, digest_size=DIGEST_BYTES).digest())

"""The steps before serving have every size of tiles and every division of a sequence that a request's step can have."""

from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("triton") is None:
    pytest.skip("needs torch and triton: `make test-torch`", allow_module_level=True)

import torch

from sluice.engine.runners.torch.memory import warm_up_steps
from sluice.engine.runners.torch.step import BLOCK_SIZE
from sluice.engine.runners.torch.triton.tiles import Sizes, Tiles, decode_tiles, prefill_tiles
from tests.engine.runners.torch.triton.cases import LARGE_CASES

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
"""Its tiles are those of Hopper GPUs."""
LIMITS = ((8192, 2048, 256), (512, 8192, 70), (131_072, 512, 16), (40, 64, 1))
"""Tokens of a sequence and of a step, and sequences."""


def sizes_of(name: str, element_bytes: int) -> Sizes:
    case = LARGE_CASES[name]
    value_dim = case.latent_dim or case.value_dim or case.head_dim
    return Sizes(case.num_heads, case.num_kv_heads, case.head_dim, value_dim, element_bytes, case.latent_dim is None)


def decoding(sizes: Sizes, num_seqs: int, context: int) -> Tiles:
    """Return the tiles of a step whose block tables have columns for a sequence of `context` tokens."""
    return decode_tiles(sizes, num_seqs, -(-context // BLOCK_SIZE) * BLOCK_SIZE, CPU)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("name", LARGE_CASES)
def test_no_request_is_the_first_to_need_some_tiles(
    name: str, element_bytes: int, limits: tuple[int, int, int]
) -> None:
    sizes, (most_context, most_tokens, most_seqs) = sizes_of(name, element_bytes), limits
    steps = [(past[0] + new[0], new) for past, new in warm_up_steps(*limits)]
    prefills = {prefill_tiles(sizes, sum(new), len(new), CPU) for _, new in steps if max(new) > 1}
    decodes = {decoding(sizes, len(new), context) for context, new in steps if max(new) == 1}
    lengths = [*range(2, most_tokens + 1, 61), most_tokens]
    contexts = [*range(1, min(most_context, 4096) + 1, BLOCK_SIZE), most_context]
    for num_seqs in range(1, most_seqs + 1, 3):
        assert prefills >= {prefill_tiles(sizes, num_tokens, num_seqs, CPU) for num_tokens in lengths}
        assert decodes >= {decoding(sizes, num_seqs, context) for context in contexts}

"""Our kernels in Triton against torch in float64, and in a CUDA graph."""

from typing import Any

import pytest

from sluice.cli.gpus import GpuFacts
from tests.engine.runners.torch.triton.cases import LARGE_CASES, LARGE_NAMES, NAMES

LIMITS = {"bf16": 5e-3, "f32": 2e-6}
"""Largest relative errors, of some roundings. A wrong or missing element gives 0.01 and more."""


def group_of(name: str) -> str:
    """Return the operation of a check."""
    return name.partition(":")[0]


GROUPS = tuple(dict.fromkeys(map(group_of, NAMES)))


@pytest.fixture(scope="module")
def torch(gpus: tuple[GpuFacts, ...]) -> Any:
    """The module, on a machine whose GPU both torch and Triton can use."""
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip(f"torch {module.__version__} has no CUDA")
    pytest.importorskip("triton", reason="Triton is not installed")
    module.manual_seed(7)
    return module


@pytest.mark.gpu("our kernels in Triton are right in {dtype}: {group}")
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_compute_what_torch_does_in_float64(torch: Any, group: str, dtype: str) -> None:
    from tests.engine.runners.torch.triton.checks import CHECKS, TYPES

    names = (*NAMES, *LARGE_NAMES) if dtype == "bf16" else NAMES
    errors = {name: CHECKS[name](TYPES[dtype], "cuda") for name in names if group_of(name) == group}
    assert errors
    assert {name: error for name, error in errors.items() if not error < LIMITS[dtype]} == {}


@pytest.mark.gpu("a CUDA graph of our decode serves sequences of any length")
def test_a_graph_of_decode_is_for_any_lengths(torch: Any) -> None:
    from sluice.engine.runners.torch.triton import attention
    from tests.engine.runners.torch.triton.checks import error
    from tests.engine.runners.torch.triton.pages import Pages, attended

    case = LARGE_CASES["Llama 3 8B"]
    pages = Pages(case, torch.bfloat16, "cuda")
    queries = torch.randn(len(case.lengths), case.num_heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
    past_lens = torch.zeros(len(case.lengths), dtype=torch.int32, device="cuda")

    def decode() -> Any:
        return attention.decode(queries, pages.keys, pages.values, pages.tables, past_lens, scale=case.head_dim**-0.5)

    decode()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode()
    past_lens.copy_(torch.tensor(case.lengths) - 1)
    graph.replay()
    expected = [
        attended(query[None], tokens, case, None)
        for query, tokens in zip(queries.double().cpu(), pages.tokens, strict=True)
    ]
    assert error(result, torch.cat(expected)) < LIMITS["bf16"]

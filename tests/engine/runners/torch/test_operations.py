"""Products of rows and weights on the CPU, where their sizes choose the library that multiplies."""

from importlib.util import find_spec

import pytest

if not find_spec("torch"):
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

import torch

from sluice.engine.runners.torch.operations import linear

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 32), (2048, 512)], ids=["small", "large"])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_product_is_that_of_float64_whatever_its_rows_and_its_matrix(
    num_rows: int, shape: tuple[int, int], has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator)
    weight = torch.randn(shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator) if has_bias else None

    product = linear(x, weight, bias)

    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(product, exact.float(), rtol=1e-5, atol=1e-4)

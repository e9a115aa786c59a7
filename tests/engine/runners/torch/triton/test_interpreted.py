"""Triton's kernels compute what plain torch does in float64, in Triton's interpreter on the CPU."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("triton") is None:
    pytest.skip("needs torch and triton: `make test-torch`", allow_module_level=True)

from tests.engine.runners.torch.triton.cases import NAMES
from tests.engine.runners.torch.triton.worker import Worker, running

pytestmark = pytest.mark.torch
LIMITS = {"f32": 5e-7, "f16": 5e-4}
"""Largest relative errors, of some roundings. The interpreter computes products of bf16 as a GPU does not."""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("interpreter") / "log"
    with running("tests.engine.runners.torch.triton.checks", log, TRITON_INTERPRET="1") as worker:
        yield worker


@pytest.mark.parametrize(
    ("dtype", "check"),
    [(dtype, check) for dtype in LIMITS for check in NAMES if dtype == "f32" or not check.startswith("draw")],
)
def test_a_kernel_computes_what_torch_does_in_float64(interpreter: Worker, dtype: str, check: str) -> None:
    answer = interpreter.ask(f"{dtype}: {check}")
    if "skipped" in answer:
        pytest.skip(answer["skipped"])
    assert "raised" not in answer, answer["raised"]
    assert answer["error"] < LIMITS[dtype]

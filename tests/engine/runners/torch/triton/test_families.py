"""Whole families on the kernels for a GPU, in Triton's interpreter on the CPU: the way into them too."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("triton") is None:
    pytest.skip("needs torch and triton: `make test-torch`", allow_module_level=True)

from tests.engine.runners.torch.triton.worker import Worker, running

pytestmark = pytest.mark.torch
FAMILIES = ("deepseek_v2", "gemma2_softcap", "glm", "gpt_oss", "lfm2", "qwen3_windowed")
"""Heads of several sizes, soft caps and offsets, parts of heads rotated, sinks, convolutions, norms of heads."""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("interpreter") / "log"
    with running("tests.engine.runners.torch.triton.families", log, TRITON_INTERPRET="1") as worker:
        yield worker


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_has_the_logits_of_plain_torch(interpreter: Worker, family: str) -> None:
    assert interpreter.ask(family)["error"] < 3e-5

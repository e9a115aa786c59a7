"""Whole families on the kernels for a GPU, in Triton's interpreter on the CPU: the way into them too."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("torch") is None or find_spec("triton") is None:
    pytest.skip("needs torch and triton: `make test-torch`", allow_module_level=True)

from tests.engine.runners.family_goldens import read_family
from tests.engine.runners.torch.triton.worker import Worker, running

pytestmark = pytest.mark.torch
FAMILIES = ("deepseek_v2", "deepseek_v3", "gemma2_softcap", "glm", "gpt_oss", "lfm2", "qwen3_windowed")
"""Latent keys, heads of several sizes, soft caps and offsets, parts of heads rotated, sinks, convolutions, norms of
heads."""


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("interpreter") / "log"
    with running("tests.engine.runners.torch.triton.families", log, TRITON_INTERPRET="1") as worker:
        yield worker


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_step_has_the_logits_of_plain_torch(interpreter: Worker, family: str) -> None:
    assert interpreter.ask(family)["error"] < 3e-5


@pytest.mark.timeout(300)
def test_a_layer_launches_a_rotation_and_two_norms_with_all_that_belongs_to_them(interpreter: Worker) -> None:
    num_layers = read_family("qwen3_windowed").blueprint.config["num_hidden_layers"]
    launches = {"norm": 1, "add and norm": 2 * num_layers, "rotate and store": num_layers}
    assert interpreter.ask("qwen3_windowed")["launches"] == launches

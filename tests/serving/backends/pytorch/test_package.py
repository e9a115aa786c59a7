"""AOTInductor packages. The tests compile them, which takes a C++ compiler."""

import asyncio
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

import torch
from torch import nn

from sluice.errors import ErrorCode, SluiceError
from tests.serving.backends.builders import infer, request
from tests.serving.backends.pytorch.parts import load

# torch's compiler warns of parts of torch that it uses itself.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TENSORS = """
    platform: "torch_aoti"
    max_batch_size: 8 dynamic_batching { }
    input { name: "ARGS[0]" data_type: TYPE_FP32 dims: [4] }
    input { name: "bias" data_type: TYPE_FP32 dims: [1] }
    output { name: "RESULT[logits]" data_type: TYPE_FP32 dims: [3] }
    output { name: "OUTPUT__2" data_type: TYPE_FP32 dims: [4] }
"""


class Classifier(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> dict[str, object]:
        return {"logits": self.layer(x) + bias, "inputs": (x * 2, x - 1)}


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=8)
    return torch.export.export(
        module,
        (torch.randn(4, 4),),
        {"bias": torch.randn(4, 1)},
        dynamic_shapes={"x": {0: batch}, "bias": {0: batch}},
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed, and compiles the package")
@pytest.mark.timeout(300)
async def test_results_are_the_library_s_own_alone_and_in_batches(tmp_path: Path) -> None:
    module = Classifier().eval()
    (tmp_path / "1").mkdir()
    await asyncio.to_thread(
        torch._inductor.aoti_compile_and_package, exported(module), package_path=str(tmp_path / "1" / "model.pt2")
    )
    with pytest.raises(
        SluiceError, match=r"unexpected inference input 'mask', allowed inputs are: .*ARGS\[0\], KWARGS"
    ):
        await load(tmp_path, TENSORS.replace("bias", "mask"))
    shared = 'parameters { key: "ENABLE_WEIGHT_SHARING" value: { string_value: "true" } }'
    model = await load(tmp_path, f"{TENSORS} instance_group {{ count: 2 kind: KIND_CPU }} {shared}")
    given = [(torch.randn(rows, 4), torch.randn(rows, 1)) for rows in (1, 2, 1, 3, 1)]
    answers = await asyncio.gather(
        *(infer(model, request(**{"ARGS[0]": x.numpy(), "bias": bias.numpy()})) for x, bias in given)
    )
    for (x, bias), answer in zip(given, answers, strict=True):
        with torch.no_grad():
            expected = module(x, bias=bias)["logits"].numpy()
        np.testing.assert_allclose(answer["RESULT[logits]"], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(answer["OUTPUT__2"], (x - 1).numpy())
    assert model.statistics.execution_count < len(given)
    await model.close()


async def test_a_program_that_was_not_compiled_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    torch.export.save(exported(Classifier()), tmp_path / "1" / "model.pt2")
    with pytest.raises(
        SluiceError, match=r"holds no compiled model; write it with torch\._inductor\.aoti_compile"
    ) as caught:
        await load(tmp_path, TENSORS)
    assert caught.value.code is ErrorCode.INVALID


async def test_a_file_that_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pt2").write_bytes(b"nothing of the kind")
    with pytest.raises(SluiceError, match="is no package: File is not a zip file"):
        await load(tmp_path, TENSORS)

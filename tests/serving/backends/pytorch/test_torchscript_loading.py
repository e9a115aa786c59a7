"""Configurations that fit a TorchScript model, and the effects of its parameters."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

import torch
from torch import nn

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import Model
from tests.serving.backends.builders import infer, request
from tests.serving.backends.pytorch.modules import Keyed, Layers, Same, Scaled, Shout, SumAndDifference, put
from tests.serving.backends.pytorch.parts import STRINGS, X_TO_Y, both, load, outputs

# torch says of TorchScript that it is deprecated, at each of its functions.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


@pytest.mark.parametrize(
    ("module", "text", "reason"),
    [
        (Same(), "", r"must contain at least one input, none were specified.*\(forward takes x\)"),
        (Keyed(), outputs("sum"), "must contain at least one input.*forward takes one dictionary"),
        (Same(), 'input { name: "x" data_type: TYPE_FP32 dims: [1] }', "must contain at least one output"),
        (
            SumAndDifference(),
            X_TO_Y,
            "unable to load model 'm', configuration expects 1 inputs, model provides 2",
        ),
        (SumAndDifference(), both(("a", "b")) + outputs("y__2"), "The output y__2 .* This model has 2 outputs"),
        (
            Scaled(),
            both(("x", "scale")) + outputs("y"),
            "An input of type 'float' was detected in the model. Only a single input of type Dict",
        ),
        (
            Same(),
            X_TO_Y.replace("FP32", "STRING"),
            "configuration expects datatype TYPE_STRING for input 'x', model provides Tensor",
        ),
        (
            Shout(),
            X_TO_Y,
            r"configuration expects datatype TYPE_FP32 for input 'x', model provides List\[str\]",
        ),
        (
            Shout(),
            "max_batch_size: 4 " + STRINGS,
            "Triton only supports 1 dimensional List of String as input for 'x' for model 'm'",
        ),
        (
            Same(),
            X_TO_Y.replace("dims: [-1] } output", "dims: [-1] optional: true } output"),
            "input 'x' is optional in the configuration, and not in the model, where it is a Tensor",
        ),
    ],
)
async def test_configurations_that_do_not_fit(tmp_path: Path, module: nn.Module, text: str, reason: str) -> None:
    put(tmp_path, module)
    with pytest.raises(SluiceError, match=reason) as caught:
        await load(tmp_path, text)
    assert caught.value.code is ErrorCode.INVALID


async def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(SluiceError, match="failed to load model 'm': PytorchStreamReader") as caught:
        await load(tmp_path, X_TO_Y)
    assert "\nException raised from" not in caught.value.message


async def test_the_first_model_chooses_the_number_of_threads(
    tmp_path: Path, loaded: list[Model], caplog: pytest.LogCaptureFixture
) -> None:
    from sluice.serving.backends.pytorch.backend import PyTorchBackend

    put(tmp_path, Same())
    before, backend = torch.get_num_threads(), PyTorchBackend()

    def with_threads(count: int) -> str:
        return f'parameters {{ key: "INTRA_OP_THREAD_COUNT" value: {{ string_value: "{count}" }} }} {X_TO_Y}'

    try:
        for count in (3, 1):
            loaded.append(await load(tmp_path, with_threads(count), backend))
        with ThreadPoolExecutor(1) as fresh:
            # As an instance's thread: those that ran something before keep the number that they had.
            assert fresh.submit(torch.get_num_threads).result() == 3
        assert "not obeyed: INTRA_OP_THREAD_COUNT 1 (the process has 3 since it was first set)" in caplog.text
    finally:
        torch.set_num_threads(before)


async def test_switches_of_the_interpreter(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Layers())
    keys = ("DISABLE_OPTIMIZED_EXECUTION", "ENABLE_JIT_PROFILING", "ENABLE_JIT_EXECUTOR", "ENABLE_TENSOR_FUSER")
    given = "".join(f'parameters {{ key: "{key}" value: {{ string_value: "true" }} }}' for key in keys)
    text = 'parameters { key: "INFERENCE_MODE" value { string_value: "false" } } max_batch_size: 2 ' + given
    before = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    try:
        loaded.append(model := await load(tmp_path, text + X_TO_Y))
        assert (await infer(model, request(x=np.ones((2, 16), np.float32))))["y"].shape == (2, 8)
        assert torch._C._jit_texpr_fuser_enabled()
    finally:
        torch._C._jit_set_texpr_fuser_enabled(before)

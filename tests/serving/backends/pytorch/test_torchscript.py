"""Results equal PyTorch's own; names, batches, types, strings, errors, states."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import ml_dtypes
import numpy as np
import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

import torch
from torch import nn

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.pytorch import torchscript
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse, SequenceFlag
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.builders import check_batching, infer, request
from tests.serving.backends.pytorch.modules import (
    Counter,
    InPlace,
    Keyed,
    Layers,
    Listed,
    Optionally,
    Picky,
    Same,
    Shout,
    Stateful,
    SumAndDifference,
    Sums,
    Total,
    put,
)
from tests.serving.backends.pytorch.parts import STRINGS, X_TO_Y, both, load, outputs
from tests.waiting import PATIENCE_S

# torch says of TorchScript that it is deprecated, at each of its functions.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]


async def refused(model: Model, given: InferRequest) -> SluiceError:
    with pytest.raises(SluiceError) as caught:
        await infer(model, given)
    return caught.value


@pytest.mark.parametrize("is_traced", [False, True], ids=["scripted", "traced"])
async def test_results_are_the_library_s_own(tmp_path: Path, loaded: list[Model], is_traced: bool) -> None:
    layers = Layers().eval()
    (tmp_path / "1").mkdir()
    module = torch.jit.trace(layers, torch.ones(2, 16)) if is_traced else torch.jit.script(layers)
    module.save(tmp_path / "1" / "model.pt")
    text = """
        max_batch_size: 8 input { name: "INPUT__0" data_type: TYPE_FP32 dims: [16] }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [8] }
    """
    loaded.append(model := await load(tmp_path, text))
    for rows in (1, 4):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            expected = layers(x).numpy()
        # The first runs profile, later ones are optimized: all are right.
        for _ in range(3):
            answer = await infer(model, request(INPUT__0=x.numpy()))
            np.testing.assert_allclose(answer["OUTPUT__0"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("module", [SumAndDifference(), Listed(), Keyed()], ids=["tuple", "list", "dictionary"])
async def test_requests_that_wait_are_run_as_one_batch(tmp_path: Path, loaded: list[Model], module: nn.Module) -> None:
    put(tmp_path, module)
    loaded.append(model := await load(tmp_path, both(("b", "a")) + outputs("sum", "difference")))
    await check_batching(model)


async def test_outputs_are_those_asked_for_by_index(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, SumAndDifference())
    loaded.append(model := await load(tmp_path, both(("in__1", "in__0")) + outputs("out__1")))
    twos = np.full((1, 4), 2, np.float32)
    answer = await infer(model, request(in__0=twos, in__1=np.ones_like(twos)))
    assert {name: array.tolist() for name, array in answer.items()} == {"out__1": [[1.0] * 4]}


@pytest.mark.parametrize(
    ("name", "scalar"),
    [
        ("BOOL", np.bool_),
        ("UINT8", np.uint8),
        ("UINT16", np.uint16),
        ("UINT64", np.uint64),
        ("INT8", np.int8),
        ("INT16", np.int16),
        ("INT32", np.int32),
        ("INT64", np.int64),
        ("FP16", np.float16),
        ("FP32", np.float32),
        ("FP64", np.float64),
        ("BF16", ml_dtypes.bfloat16),
    ],
)
async def test_types_go_through(tmp_path: Path, loaded: list[Model], name: str, scalar: type) -> None:
    put(tmp_path, Same())
    loaded.append(model := await load(tmp_path, "max_batch_size: 4 " + X_TO_Y.replace("FP32", name)))
    rows: list[Array] = [np.array([[index, 1]]).astype(scalar) for index in range(3)]
    for row, answer in zip(rows, await asyncio.gather(*(infer(model, request(x=row)) for row in rows)), strict=True):
        assert answer["y"].dtype == row.dtype
        assert answer["y"].tobytes() == row.tobytes()


async def test_empty_tensors(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Same())
    loaded.append(model := await load(tmp_path, X_TO_Y))
    assert (await infer(model, request(x=np.zeros(0, np.float32))))["y"].shape == (0,)


STRINGS_IN_BATCHES = "max_batch_size: 8 dynamic_batching { } " + STRINGS.replace(
    "dims: [-1]", "dims: [1] reshape { shape: [] }"
)


async def test_strings(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Shout())
    loaded.append(model := await load(tmp_path, STRINGS))
    answer = await infer(model, request(x=np.array([b"ab", "é漢".encode(), b"", b"a\0b"], object)))
    assert answer["loud__0"].tolist() == [b"ab!", "é漢!".encode(), b"!", b"a\0b!"]
    # TorchScript's strings are bytes of UTF-8.
    assert answer["length__1"].tolist() == [2, 5, 0, 3]
    error = await refused(model, request(x=np.array([b"\xff"], object)))
    assert error.code is ErrorCode.INVALID
    assert "holds bytes that are not UTF-8, which the strings of PyTorch have to be" in error.message


async def test_strings_in_batches(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Shout())
    loaded.append(model := await load(tmp_path, STRINGS_IN_BATCHES))
    given = [[[b"one"]], [[b"two"], [b"three"]], [[b"four"]]]
    answers = await asyncio.gather(*(infer(model, request(x=np.array(each, object))) for each in given))
    assert [answer["loud__0"].tolist() for answer in answers] == [[[b"one!"]], [[b"two!"], [b"three!"]], [[b"four!"]]]
    assert model.statistics.execution_count < len(given)


async def test_a_model_that_writes_into_its_input_changes_no_request(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, InPlace())
    loaded.append(model := await load(tmp_path, X_TO_Y))
    given = request(x=np.zeros(2, np.float32))
    assert (await infer(model, given))["y"].tolist() == [1, 1]
    assert given.inputs["x"].array.tolist() == [0, 0]
    wire = InferRequest({"x": Tensor("x", "FP32", (2,), raw=np.zeros(2, np.float32).tobytes())})
    assert (await infer(model, wire))["y"].tolist() == [1, 1]


async def test_answers_do_not_change_with_the_model_s_state(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Counter())
    loaded.append(model := await load(tmp_path, X_TO_Y))
    answers = [(await infer(model, request(x=np.ones(1, np.float32))))["y"] for _ in range(3)]
    assert [answer.tolist() for answer in answers] == [[1], [2], [3]]


@pytest.mark.parametrize(("shares", "seen"), [("false", [1, 1]), ("true", [1, 2])])
async def test_instances_have_modules_of_their_own_unless_they_share(
    tmp_path: Path, loaded: list[Model], shares: str, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that begin at once are in two instances, and end one after the other."""
    put(tmp_path, Counter())
    text = f"""
        instance_group {{ count: 2 kind: KIND_CPU }}
        parameters {{ key: "ENABLE_WEIGHT_SHARING" value: {{ string_value: "{shares}" }} }}
    """
    loaded.append(model := await load(tmp_path, text + X_TO_Y))
    began, gates = [Event(), Event()], [Event(), Event()]
    runs = iter(zip(began, gates, strict=True))
    ran = torchscript.TorchScriptSession._compute

    def hold(session: Any, values: dict[str, object]) -> Any:
        mine, gate = next(runs)
        mine.set()
        assert gate.wait(PATIENCE_S)
        return ran(session, values)

    monkeypatch.setattr(torchscript.TorchScriptSession, "_compute", hold)
    one = request(x=np.ones(1, np.float32))
    waiting = {asyncio.create_task(infer(model, one)) for _ in gates}
    for event in began:
        assert await asyncio.to_thread(event.wait, PATIENCE_S)
    answers = []
    for gate in gates:
        gate.set()
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        answers += [task.result()["y"].item() for task in done]
    assert answers == seen


async def test_optional_arguments(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Optionally())
    bias = 'input { name: "bias" data_type: TYPE_FP32 dims: [1] optional: true }'
    loaded.append(model := await load(tmp_path, X_TO_Y + bias))
    one = np.ones(1, np.float32)
    assert (await infer(model, request(x=one)))["y"].tolist() == [1]
    assert (await infer(model, request(x=one, bias=one)))["y"].tolist() == [2]


async def test_one_bad_request_fails_alone(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Picky())
    text = """
        max_batch_size: 8 dynamic_batching { } input { name: "x" data_type: TYPE_INT64 dims: [1] }
        output { name: "y" data_type: TYPE_FP32 dims: [1] }
    """
    loaded.append(model := await load(tmp_path, text))
    answers = await asyncio.gather(
        *(infer(model, request(x=np.array([[index]]))) for index in (1, 99, 3)), return_exceptions=True
    )
    assert isinstance(answers[1], SluiceError)
    assert answers[1].code is ErrorCode.INTERNAL
    assert answers[1].message.startswith("PyTorch execute failure: ")
    assert "index 99 is out of bounds" in answers[1].message
    assert [answer["y"].tolist() for answer in answers if isinstance(answer, dict)] == [[[1]], [[3]]]


async def test_results_that_the_configuration_does_not_fit(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Same())
    loaded.append(
        model := await load(tmp_path, X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_INT64'))
    )
    error = await refused(model, request(x=np.ones(1, np.float32)))
    assert (error.code, error.message) == (
        ErrorCode.INVALID,
        "configuration expects datatype TYPE_INT64 for output 'y', model provides TYPE_FP32",
    )


async def test_results_of_a_list_that_are_not_there(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Listed())
    loaded.append(model := await load(tmp_path, both(("a", "b")) + outputs("x__2")))
    ones = np.ones((1, 4), np.float32)
    error = await refused(model, request(a=ones, b=ones))
    assert error.message == (
        "The output x__2 in the model configuration refers to an output index which doesn't exist. "
        "This model has 2 outputs"
    )


async def test_keys_that_are_not_there(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Keyed())
    loaded.append(model := await load(tmp_path, both(("a", "b")) + outputs("product")))
    ones = np.ones((1, 4), np.float32)
    error = await refused(model, request(a=ones, b=ones))
    assert error.message == "unexpected inference output 'product', the model's results are: sum, difference"


async def test_scalars_are_no_rows(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Total())
    loaded.append(model := await load(tmp_path, "max_batch_size: 4 " + X_TO_Y))
    error = await refused(model, request(x=np.ones((2, 2), np.float32)))
    assert error.message == "output 'y' is a scalar which is not supported."


async def test_ragged_rows_and_what_describes_them(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Sums())
    text = """
        max_batch_size: 8 dynamic_batching { }
        input { name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "x" }
        output { name: "y" data_type: TYPE_FP32 dims: [1] }
    """
    loaded.append(model := await load(tmp_path, text))
    rows = [np.arange(1, 2 + length, dtype=np.float32)[None] for length in range(4)]
    answers = await asyncio.gather(*(infer(model, request(x=row)) for row in rows))
    assert [answer["y"].tolist() for answer in answers] == [[[row.sum()]] for row in rows]
    assert model.statistics.execution_count < len(rows)


async def test_states_of_sequences(tmp_path: Path, loaded: list[Model]) -> None:
    put(tmp_path, Stateful())
    text = """
        max_batch_size: 4
        sequence_batching {
          control_input { name: "START__1" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
          state { input_name: "IN_STATE__2" output_name: "OUT_STATE__1" data_type: TYPE_FP32 dims: [1] }
        }
        input { name: "INPUT__0" data_type: TYPE_FP32 dims: [1] }
        output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [1] }
    """
    loaded.append(model := await load(tmp_path, text))

    async def step(number: int, value: float, flag: SequenceFlag) -> float:
        given = request(INPUT__0=np.full((1, 1), value, np.float32))
        given.correlation_id, given.sequence = number, flag
        return float((await infer(model, given))["OUTPUT__0"].item())

    assert await step(1, 5, SequenceFlag.START) == 5
    assert await step(2, 7, SequenceFlag.START) == 7
    assert await step(1, 1, SequenceFlag.NONE) == 6
    assert await step(2, 1, SequenceFlag.END) == 8
    assert await step(1, 1, SequenceFlag.END) == 7


async def test_what_waits_behind_a_run_is_cancelled_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch cannot be interrupted: a run goes on, and nobody waits for it."""
    put(tmp_path, Same())
    model = await load(tmp_path, X_TO_Y)
    began, release = Event(), Event()
    num_runs = 0
    ran = torchscript.TorchScriptSession._compute

    def hold(session: Any, values: dict[str, object]) -> Any:
        nonlocal num_runs
        num_runs += 1
        began.set()
        assert release.wait(PATIENCE_S)
        return ran(session, values)

    monkeypatch.setattr(torchscript.TorchScriptSession, "_compute", hold)
    responses: list[InferResponse] = []
    model.submit(request(x=np.ones(1, np.float32)), responses.append)
    assert await asyncio.to_thread(began.wait, PATIENCE_S)
    model.submit(request(x=np.ones(1, np.float32)), responses.append).cancel()
    await model.close()
    assert [response.error.code for response in responses if response.error] == [ErrorCode.UNAVAILABLE]
    release.set()
    assert num_runs == 1

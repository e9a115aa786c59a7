"""Mismatches between steps and models are refused at load, in Triton's words; models that batch join with those that
do not.
"""

from pathlib import Path

import numpy as np
import pytest

from serving.model import infer_one
from serving.request import InferRequest
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError
from tests.serving.backends.ensemble.parts import (
    FunctionModel,
    HeldModel,
    Models,
    ensemble_config,
    floats,
    load,
    request,
    simple_config,
)

CHAIN = "first: X=a -> Y=b; second: X=b -> Y=z"


async def refusal(steps: str, *models: HeldModel, extra: str = "", dims: str = "-1", **tensors: str) -> str:
    with pytest.raises(SluiceError) as caught:
        await load(ensemble_config(steps, extra=extra, dims=dims, **tensors), Models(*models))
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


async def test_a_model_that_is_not_loaded() -> None:
    assert await refusal("nope: X=a -> Y=z") == (
        "ensemble 'whole' depends on 'nope' which has no loaded version. Model 'nope' loading failed with error: "
        "Request for unknown model: 'nope' is not found"
    )


async def test_an_input_that_the_model_does_not_have() -> None:
    message = await refusal("first: X=a Q=a -> Y=z", HeldModel(simple_config("first")))
    assert message == "in ensemble whole, ensemble tensor a is mapping to non-existing input Q in model first"


async def test_an_output_that_the_model_does_not_have() -> None:
    message = await refusal("first: X=a -> Q=z", HeldModel(simple_config("first")))
    assert message == "in ensemble whole, ensemble tensor z is mapped from non-existing output Q in model first"


async def test_an_input_that_nothing_feeds() -> None:
    message = await refusal("first: X=a -> Y=z", HeldModel(simple_config("first", inputs="XW")))
    assert message == "in ensemble whole, input W in model first is not mapped to any ensemble tensors"


async def test_types_that_differ() -> None:
    second = HeldModel(simple_config("second", data_type="TYPE_INT32"))
    message = await refusal(CHAIN, HeldModel(simple_config("first")), second)
    assert message == (
        "in ensemble whole, ensemble tensor b: inconsistent data type: TYPE_FP32 is inferred from model first while "
        "TYPE_INT32 is inferred from model second"
    )


async def test_shapes_that_differ() -> None:
    first = HeldModel(simple_config("first", dims="4", max_batch_size=8))
    message = await refusal("first: X=a -> Y=z", first, extra="max_batch_size: 8", dims="5")
    assert message == (
        "in ensemble whole, ensemble tensor a: inconsistent shape: [-1,5] is inferred from model whole while [-1,4] is "
        "inferred from model first"
    )


async def test_a_batch_that_a_model_cannot_take() -> None:
    first = HeldModel(simple_config("first", max_batch_size=8))
    message = await refusal("first: X=a -> Y=z", first, extra="max_batch_size: 9")
    assert message == (
        "ensemble whole allows maximum batch size 9, but it contains model first which only allows maximum batch size "
        "to be 8"
    )


async def test_streams_that_would_have_to_meet() -> None:
    left, right = (HeldModel(simple_config(name, is_decoupled=True)) for name in ("left", "right"))
    join = HeldModel(simple_config("join", inputs="XW"))
    steps = "left: X=a -> Y=b; right: X=a -> Y=c; join: X=b W=c -> Y=z"
    assert await refusal(steps, left, right, join) == (
        "in ensemble whole, step of model 'join' receives inputs originated from different decoupled models"
    )
    message = await refusal("left: X=a -> Y=y; right: X=a -> Y=z", left, right, outputs="yz")
    assert message.endswith("receives inputs originated from different decoupled models")


async def test_steps_in_a_circle() -> None:
    first = HeldModel(simple_config("first", inputs="XW"))
    message = await refusal("first: X=a W=c -> Y=b; first: X=a W=b -> Y=c", first, outputs="b")
    assert message == "in ensemble whole, steps wait for tensors that nothing writes"


async def test_a_batch_of_one_is_taken_apart_for_a_model_that_does_not_batch() -> None:
    batching = FunctionModel(simple_config("first", dims="2", max_batch_size=4), lambda X: {"Y": X + 1})
    plain = FunctionModel(simple_config("second", dims="2"), lambda X: {"Y": X * 2})
    config = ensemble_config(CHAIN, extra="max_batch_size: 4", dims="2")
    model = await load(config, Models(batching, plain))
    response = await infer_one(model, request({"a": np.array([[1, 2]], np.float32)}))
    assert plain.requests[0].inputs["X"].shape == (2,)
    assert response.outputs[0].array.tolist() == [[4, 6]]


async def test_a_whole_batch_passes_as_one_tensor_where_it_fits() -> None:
    batching = FunctionModel(simple_config("first", dims="2", max_batch_size=4), lambda X: {"Y": X + 1})
    plain = FunctionModel(simple_config("second", dims="-1, 2"), lambda X: {"Y": X * 2})
    model = await load(ensemble_config(CHAIN, extra="max_batch_size: 4", dims="2"), Models(batching, plain))
    response = await infer_one(model, request({"a": np.ones((3, 2), np.float32)}))
    assert response.outputs[0].array.tolist() == [[4, 4]] * 3
    await infer_one(model, request({"a": np.ones((1, 2), np.float32)}))
    assert plain.requests[1].inputs["X"].shape == (1, 2)


async def test_strings_keep_their_wire_form_where_a_batch_is_taken_apart() -> None:
    batching = FunctionModel(
        simple_config("first", dims="1", max_batch_size=4, data_type="TYPE_STRING"), lambda X: {"Y": X}
    )
    config = ensemble_config("first: X=a -> Y=z", dims="1")
    config.input[0].data_type = config.output[0].data_type = 13
    model = await load(config, Models(batching))
    text = Tensor("a", "BYTES", (1,), raw=b"\x02\0\0\0hi")
    response = await infer_one(model, InferRequest({"a": text}))
    assert batching.requests[0].inputs["X"].shape == (1, 1)
    assert (response.outputs[0].shape, response.outputs[0].array.tolist()) == ((1,), [b"hi"])


async def test_reshape_of_the_ensemble_s_own_tensors() -> None:
    first = FunctionModel(simple_config("first", dims="2, -1"), lambda X: {"Y": X})
    config = ensemble_config("first: X=a -> Y=z", dims="-1")
    config.input[0].dims[:] = [2, -1]
    config.output[0].dims[:] = [1, 2, -1]
    config.output[0].reshape.shape[:] = [2, -1]
    model = await load(config, Models(first))
    response = await infer_one(model, request({"a": np.ones((2, 3), np.float32)}))
    assert response.outputs[0].shape == (1, 2, 3)


async def test_a_reshaped_output_of_a_model_that_does_not_batch() -> None:
    first = FunctionModel(simple_config("first", dims="2"), lambda X: {"Y": X})
    config = ensemble_config("first: X=a -> Y=z", dims="2", extra="max_batch_size: 4")
    config.output[0].dims[:] = [1, 2]
    config.output[0].reshape.shape[:] = [2]
    model = await load(config, Models(first))
    response = await infer_one(model, request({"a": np.ones((1, 2), np.float32)}))
    assert response.outputs[0].shape == (1, 1, 2)


async def test_labels_are_the_steps_where_the_ensemble_has_none(tmp_path: Path) -> None:
    first = HeldModel(simple_config("first", outputs="YV"))
    first.labels = {"Y": ["cat", "dog"], "V": ["one"]}
    config = ensemble_config("first: X=a -> Y=y V=z", outputs="yz")
    config.output[1].label_filename = "own.txt"
    (tmp_path / "own.txt").write_text("uno\ndos\n")
    model = await load(config, Models(first), tmp_path)
    assert model.labels == {"y": ["cat", "dog"], "z": ["uno", "dos"]}


async def test_the_reference_s_ensemble() -> None:
    """The numbers are those of the recorded exchange."""
    add_sub = FunctionModel(
        simple_config("add_sub", inputs="PQ", outputs="ST", dims="4", max_batch_size=8),
        lambda P, Q: {"S": P + Q, "T": P - Q},
    )
    steps = "add_sub: P=a Q=b -> S=c T=d; add_sub: P=c Q=d -> S=y T=z"
    config = ensemble_config(steps, inputs="ab", outputs="yz", extra="max_batch_size: 8", dims="4")
    model = await load(config, Models(add_sub))
    given = {"a": floats(1, 2, 3, 4).reshape(1, 4), "b": floats(1, 1, 1, 1).reshape(1, 4)}
    response = await infer_one(model, request(given))
    assert [each.array.tolist() for each in response.outputs] == [[[2, 2, 2, 2]], [[2, 4, 6, 8]]]
    assert response.parameters == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}

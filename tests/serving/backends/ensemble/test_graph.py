"""Mismatches between steps and models are refused at load, in Triton's words; models that batch join with those that
do not.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.model import infer_one
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import (
    FunctionModel,
    HeldModel,
    ensemble_config,
    load,
    request,
    simple_config,
)

CHAIN = "first: X=a -> Y=b; second: X=b -> Y=z"


Refusal = tuple[str, list[HeldModel], dict[str, str], str]
MEET = "in ensemble whole, step of model '{}' receives inputs originated from different decoupled models"


def held(name: str = "first", **tensors: Any) -> HeldModel:
    return HeldModel(simple_config(name, **tensors))


def refusals() -> dict[str, Refusal]:
    """Steps, their models, what else the ensemble's configuration says, and Triton's words."""
    streams = [held("left", is_decoupled=True), held("right", is_decoupled=True)]
    return {
        "a model that is not loaded": (
            "nope: X=a -> Y=z",
            [],
            {},
            "ensemble 'whole' depends on 'nope' which has no loaded version. Model 'nope' loading failed with error: "
            "Request for unknown model: 'nope' is not found",
        ),
        "an input that the model does not have": (
            "first: X=a Q=a -> Y=z",
            [held()],
            {},
            "in ensemble whole, ensemble tensor a is mapping to non-existing input Q in model first",
        ),
        "an output that the model does not have": (
            "first: X=a -> Q=z",
            [held()],
            {},
            "in ensemble whole, ensemble tensor z is mapped from non-existing output Q in model first",
        ),
        "an input that nothing feeds": (
            "first: X=a -> Y=z",
            [held(inputs="XW")],
            {},
            "in ensemble whole, input W in model first is not mapped to any ensemble tensors",
        ),
        "types that differ": (
            CHAIN,
            [held(), held("second", data_type="TYPE_INT32")],
            {},
            "in ensemble whole, ensemble tensor b: inconsistent data type: TYPE_FP32 is inferred from model first "
            "while TYPE_INT32 is inferred from model second",
        ),
        "shapes that differ": (
            "first: X=a -> Y=z",
            [held(dims="4", max_batch_size=8)],
            {"extra": "max_batch_size: 8", "dims": "5"},
            "in ensemble whole, ensemble tensor a: inconsistent shape: [-1,5] is inferred from model whole while "
            "[-1,4] is inferred from model first",
        ),
        "a batch that a model cannot take": (
            "first: X=a -> Y=z",
            [held(max_batch_size=8)],
            {"extra": "max_batch_size: 9"},
            "ensemble whole allows maximum batch size 9, but it contains model first which only allows maximum batch "
            "size to be 8",
        ),
        "streams that would have to meet in a step": (
            "left: X=a -> Y=b; right: X=a -> Y=c; join: X=b W=c -> Y=z",
            [*streams, held("join", inputs="XW")],
            {},
            MEET.format("join"),
        ),
        "streams that would have to meet in a response": (
            "left: X=a -> Y=y; right: X=a -> Y=z",
            streams,
            {"outputs": "yz"},
            MEET.format("whole"),
        ),
        "steps in a circle": (
            "first: X=a W=c -> Y=b; first: X=a W=b -> Y=c",
            [held(inputs="XW")],
            {"outputs": "b"},
            "in ensemble whole, steps wait for tensors that nothing writes",
        ),
    }


@pytest.mark.parametrize("case", refusals())
async def test_what_does_not_fit_is_refused_in_tritons_words(case: str) -> None:
    steps, models, rest, said = refusals()[case]
    with pytest.raises(SluiceError) as caught:
        await load(ensemble_config(steps, **rest), Lookup(*models))
    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID, said)


async def test_a_batch_of_one_is_taken_apart_for_a_model_that_does_not_batch() -> None:
    batching = FunctionModel(simple_config("first", dims="2", max_batch_size=4), lambda X: {"Y": X + 1})
    plain = FunctionModel(simple_config("second", dims="2"), lambda X: {"Y": X * 2})
    config = ensemble_config(CHAIN, extra="max_batch_size: 4", dims="2")
    model = await load(config, Lookup(batching, plain))
    response = await infer_one(model, request({"a": np.array([[1, 2]], np.float32)}))
    assert plain.requests[0].inputs["X"].shape == (2,)
    assert response.outputs[0].array.tolist() == [[4, 6]]


async def test_a_whole_batch_passes_as_one_tensor_where_it_fits() -> None:
    batching = FunctionModel(simple_config("first", dims="2", max_batch_size=4), lambda X: {"Y": X + 1})
    plain = FunctionModel(simple_config("second", dims="-1, 2"), lambda X: {"Y": X * 2})
    model = await load(ensemble_config(CHAIN, extra="max_batch_size: 4", dims="2"), Lookup(batching, plain))
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
    model = await load(config, Lookup(batching))
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
    model = await load(config, Lookup(first))
    response = await infer_one(model, request({"a": np.ones((2, 3), np.float32)}))
    assert response.outputs[0].shape == (1, 2, 3)


async def test_a_reshaped_output_of_a_model_that_does_not_batch() -> None:
    first = FunctionModel(simple_config("first", dims="2"), lambda X: {"Y": X})
    config = ensemble_config("first: X=a -> Y=z", dims="2", extra="max_batch_size: 4")
    config.output[0].dims[:] = [1, 2]
    config.output[0].reshape.shape[:] = [2]
    model = await load(config, Lookup(first))
    response = await infer_one(model, request({"a": np.ones((1, 2), np.float32)}))
    assert response.outputs[0].shape == (1, 1, 2)


async def test_labels_are_the_steps_where_the_ensemble_has_none(tmp_path: Path) -> None:
    first = HeldModel(simple_config("first", outputs="YV"))
    first.labels = {"Y": ["cat", "dog"], "V": ["one"]}
    config = ensemble_config("first: X=a -> Y=y V=z", outputs="yz")
    config.output[1].label_filename = "own.txt"
    (tmp_path / "own.txt").write_text("uno\ndos\n")
    model = await load(config, Lookup(first), tmp_path)
    assert model.labels == {"y": ["cat", "dog"], "z": ["uno", "dos"]}

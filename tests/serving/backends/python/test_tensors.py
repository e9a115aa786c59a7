"""Tensors of every type, shape and size, there and back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from sluice.serving.backends.python.worker import pb_utils
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.python.parts import ARRAY, DECOUPLED, array_request, ask, loaded, text_request, write_model

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y_" + x.name(), x.as_numpy()) for x in request.inputs()])
            for request in requests
        ]
"""
ALL_TYPES = "".join(
    f'input {{ name: "{name}" data_type: {each.config_name} dims: [ -1, -1 ] optional: true }} '
    f'output {{ name: "Y_{name}" data_type: {each.config_name} dims: [ -1, -1 ] }} '
    for name, each in DATA_TYPES.items()
)


def example(datatype: str, shape: tuple[int, int]) -> Array:
    dtype = DATA_TYPES[datatype].dtype
    count = shape[0] * shape[1]
    if datatype == "BYTES":
        array = np.empty(count, np.object_)
        array[:] = [b"\x00\xff" * (number % 3) for number in range(count)]
        return array.reshape(shape)
    return (np.arange(count) % 2 if datatype == "BOOL" else np.arange(count) % 100).astype(dtype).reshape(shape)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("as_raw", [False, True])
# The largest goes through shared memory in every type: it has more than 64 KiB of one byte each.
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (256, 260)])
async def test_every_type_comes_back_as_it_went(echo: Model, shape: tuple[int, int], as_raw: bool) -> None:
    arrays = {name: example(name, shape) for name in DATA_TYPES}
    tensors = {name: Tensor.of(name, array) for name, array in arrays.items()}
    if as_raw:
        tensors = {n: Tensor(n, t.datatype, t.shape, raw=memoryview(bytes(t.raw))) for n, t in tensors.items()}
    response = await infer_one(echo, InferRequest(tensors))
    assert [each.datatype for each in response.outputs] == list(DATA_TYPES)
    for output in response.outputs:
        expected = arrays[output.name.removeprefix("Y_")]
        assert output.array.dtype == expected.dtype
        assert output.shape == expected.shape
        np.testing.assert_array_equal(output.array, expected)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    async with loaded(write_model(tmp_path_factory.mktemp("models") / "echo", ECHO, ALL_TYPES)) as model:
        yield model


MAKER = """
class TritonPythonModel:
    def execute(self, requests):
        base = np.arange(120000, dtype=np.float32).reshape(300, 400)
        small = base[:3, :4].copy()
        makes = {
            "transposed": base.T, "strided": base[::2, ::3], "reversed": small[::-1], "big endian": base.astype(">f4"),
            "read only": np.broadcast_to(np.float32(7), (2, 3)), "scalar": np.array(5, np.float32),
            "strings": np.array(["a", "\u00e9"]), "byte strings": np.array([b"a", b"bc"]),
            "objects": np.array([1, None, b"x", "y"], np.object_), "empty": np.zeros((0, 5), np.int64),
            "no strings": np.array([], np.object_),
        }
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", makes[text_of(r)])]) for r in requests]
"""
_BASE = np.arange(120000, dtype=np.float32).reshape(300, 400)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("transposed", _BASE.T),
        ("strided", _BASE[::2, ::3]),
        ("reversed", _BASE[2::-1, :4]),
        ("big endian", _BASE),
        ("read only", np.full((2, 3), 7, np.float32)),
        ("scalar", np.array(5, np.float32)),
        ("strings", np.array([b"a", "é".encode()], np.object_)),
        ("byte strings", np.array([b"a", b"bc"], np.object_)),
        ("objects", np.array([b"1", b"None", b"x", b"y"], np.object_)),
        ("empty", np.zeros((0, 5), np.int64)),
        ("no strings", np.array([], np.object_)),
    ],
)
async def test_arrays_of_any_layout_are_outputs(what: str, expected: Array, maker: Model) -> None:
    (output,) = (await infer_one(maker, text_request(what))).outputs
    assert output.shape == expected.shape
    assert output.array.dtype == expected.dtype
    np.testing.assert_array_equal(output.array, expected)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def maker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    async with loaded(write_model(tmp_path_factory.mktemp("models") / "maker", MAKER)) as model:
        yield model


CHANGER = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            x += 1
            y = x.copy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return answers
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def changer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Model]:
    async with loaded(write_model(tmp_path_factory.mktemp("models") / "changer", CHANGER, ARRAY)) as model:
        yield model


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("shape", [(2, 2), (1000, 1000)])
async def test_a_model_may_write_its_inputs_and_nobody_else_sees_it(changer: Model, shape: tuple[int, int]) -> None:
    mine = np.zeros(shape, np.float32)
    request = array_request(mine)
    for _ in range(3):
        (output,) = (await infer_one(changer, request)).outputs
        np.testing.assert_array_equal(output.array, np.ones(shape, np.float32))
    assert not mine.any()


async def test_what_was_sent_may_be_changed_at_once(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                for size in (4, 40000):
                    x = np.zeros((1, size), np.float32)
                    for number in range(20):
                        x[:] = number
                        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
                sender.send(flags=FINAL)
    """
    from tests.serving.backends.builders import infer_stream

    config = DECOUPLED.split("input")[0] + ARRAY
    async with loaded(write_model(tmp_path / "reuse", code, config)) as model:
        answers = [each async for each in infer_stream(model, array_request(np.zeros((1, 1), np.float32)))]
        seen = [(float(each.outputs[0].array.min()), float(each.outputs[0].array.max())) for each in answers[:-1]]
    assert seen == [(number, number) for number in range(20)] * 2


async def test_inputs_and_outputs_stay_valid_while_somebody_holds_them(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def initialize(self, args):
                self.kept = []

            def execute(self, requests):
                answers = []
                for request in requests:
                    x = request.inputs()[0].as_numpy()
                    self.kept.append(x)
                    total = np.array([[float(each[0, 0]) for each in self.kept]], np.float32)
                    y = np.concatenate([total, np.zeros((1, 40000), np.float32)], axis=1)
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
                return answers
    """
    async with loaded(write_model(tmp_path / "keeper", code, ARRAY)) as model:
        arrays = []
        for number in range(12):
            (output,) = (await infer_one(model, array_request(np.full((200, 200), number, np.float32)))).outputs
            arrays.append(output.array)
        for number, array in enumerate(arrays):
            np.testing.assert_array_equal(array[0, : number + 1], np.arange(number + 1))
    np.testing.assert_array_equal(arrays[-1][0, :12], np.arange(12))  # after the worker's end, too


@pytest.mark.asyncio(loop_scope="module")
async def test_a_large_tensor_goes_from_model_to_model(tmp_path: Path, changer: Model) -> None:
    """Above 4 MiB the server forwards its memory without a copy."""
    async with loaded(write_model(tmp_path / "second", CHANGER, ARRAY)) as other:
        for _ in range(3):
            (output,) = (await infer_one(changer, array_request(np.zeros((1050, 1000), np.float32)))).outputs
            requests = [InferRequest({"X": output.renamed("X")}) for _ in range(3)]
            for answer in await asyncio.gather(*(infer_one(other, each) for each in requests)):
                assert (answer.outputs[0].array == 2).all()
            assert (output.array == 1).all()


@pytest.mark.asyncio(loop_scope="module")
async def test_many_large_tensors_at_once(changer: Model) -> None:
    requests = [array_request(np.full((300, 300), number, np.float32)) for number in range(100)]
    answers = await asyncio.gather(*(infer_one(changer, each) for each in requests))
    for number, answer in enumerate(answers):
        assert (answer.outputs[0].array == number + 1).all()


async def test_dlpack(tmp_path: Path) -> None:
    code = """
        class TritonPythonModel:
            def execute(self, requests):
                x = pb_utils.Tensor("X", np.arange(6, dtype=np.float32).reshape(2, 3))
                assert x.is_cpu() and x.triton_dtype() == 11
                np.testing.assert_array_equal(np.from_dlpack(x), x.as_numpy())
                for value in (x, x.as_numpy(), x.to_dlpack()):
                    y = pb_utils.Tensor.from_dlpack("Y", value)
                    assert y.name() == "Y"
                    np.testing.assert_array_equal(y.as_numpy(), x.as_numpy())
                try:
                    requests[0].inputs()[0].to_dlpack()
                except pb_utils.TritonModelException:
                    return [text("right")]
    """
    async with loaded(write_model(tmp_path / "dlpack", code)) as model:
        assert await ask(model, "") == "right"


NUMBERS = {
    1: np.bool_, 2: np.uint8, 3: np.uint16, 4: np.uint32, 5: np.uint64, 6: np.int8, 7: np.int16, 8: np.int32,
    9: np.int64, 10: np.float16, 11: np.float32, 12: np.float64, 13: np.object_,
}  # fmt: skip


def test_numbers_and_numpys_types() -> None:
    for number, scalar in NUMBERS.items():
        assert pb_utils.triton_to_numpy_type(number) is scalar
        assert pb_utils.numpy_to_triton_type(scalar) == number
        assert pb_utils.numpy_to_triton_type(np.dtype(scalar)) == number
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.triton_to_numpy_type(99) is None


def test_names_and_numpys_types() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_NONE")


def test_strings_in_the_protocols_form() -> None:
    raw = pb_utils.serialize_byte_tensor(np.array([[b"a", "é"], [1, b""]], np.object_))
    assert raw == b"\x01\0\0\0a\x02\0\0\0\xc3\xa9\x01\0\0\x001\0\0\0\0"
    assert pb_utils.deserialize_bytes_tensor(raw).tolist() == [b"a", "é".encode(), b"1", b""]
    assert pb_utils.serialize_byte_tensor(np.array([], np.object_)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(1)) is None


def test_what_models_look_up_in_their_configuration() -> None:
    config = {"input": [{"name": "A"}], "output": [{"name": "B"}], "model_transaction_policy": {"decoupled": True}}
    assert pb_utils.get_input_config_by_name(config, "A") == {"name": "A"}
    assert pb_utils.get_input_config_by_name(config, "B") is None
    assert pb_utils.get_output_config_by_name(config, "B") == {"name": "B"}
    assert pb_utils.get_output_config_by_name({}, "B") is None
    assert pb_utils.using_decoupled_model_transaction_policy(config)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


def test_tensors_and_responses_tell_what_they_hold() -> None:
    tensor = pb_utils.Tensor("A", np.zeros((2, 3), np.int8))
    response = pb_utils.InferenceResponse([tensor], parameters={"k": 1})
    assert (tensor.name(), tensor.triton_dtype(), tensor.is_cpu(), tensor.shape()) == ("A", 6, True, [2, 3])
    assert pb_utils.get_output_tensor_by_name(response, "A") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "B") is None
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"k":1}')
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.NOT_FOUND))
    error = failed.error()
    assert failed.has_error()
    assert error is not None
    assert (error.message(), error.code()) == ("gone", pb_utils.TritonError.NOT_FOUND)
    assert pb_utils.TritonError("x").code() == pb_utils.TritonError.INTERNAL
    with pytest.raises(pb_utils.TritonModelException):
        pb_utils.InferenceResponse([tensor], parameters={"k": []})

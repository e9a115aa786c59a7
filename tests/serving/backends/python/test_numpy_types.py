"""The conversions that models call."""

import numpy as np
import pytest

from serving.backends.python.worker import pb_utils

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

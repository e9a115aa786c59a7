"""From a model's response to the protocol's messages."""

from tritonclient.grpc import service_pb2

from gateway.grpc.parameters import write_parameter
from gateway.grpc.requests import Asked
from gateway.v2.classification import classify
from serving.request import InferResponse
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

_FINAL = "triton_final_response"


def write_response(message: "service_pb2.ModelInferResponse", asked: Asked, response: InferResponse) -> None:
    """Fill `message`, and what lies in shared memory. Raises SluiceError for outputs that cannot be given as asked."""
    model = asked.model
    message.model_name = model.name
    message.model_version = str(model.version)
    message.id = response.id
    for name, value in response.parameters.items():
        write_parameter(message.parameters[name], value)
    for tensor in response.outputs:
        _write_output(message, asked, tensor)


def _write_output(message: "service_pb2.ModelInferResponse", asked: Asked, tensor: Tensor) -> None:
    if asked.classes and tensor.name in asked.classes:
        labels = asked.model.labels.get(tensor.name, ())
        tensor = classify(tensor, asked.classes[tensor.name], labels, asked.model.spec.max_batch_size > 0)
    output = message.outputs.add()
    output.name = tensor.name
    output.datatype = tensor.datatype
    output.shape.extend(tensor.shape)
    raw = tensor.raw
    if asked.windows and tensor.name in asked.windows:
        _write_memory(asked.windows[tensor.name], tensor)
        raw = b""
    message.raw_output_contents.append(raw if isinstance(raw, bytes) else bytes(raw))


def _write_memory(window: memoryview, tensor: Tensor) -> None:
    raw = memoryview(tensor.raw).cast("B")
    if len(raw) > len(window):
        message = (
            f"shared memory size specified with the request for output '{tensor.name}' ({len(window)} bytes) should be "
            f"at least {len(raw)} bytes to hold the results"
        )
        raise SluiceError(ErrorCode.INTERNAL, message)
    window[: len(raw)] = raw


def stream_message(asked: Asked, response: InferResponse) -> "service_pb2.ModelStreamInferResponse":
    """One message of a stream: outputs, an error, or nothing but that the request has ended."""
    message = service_pb2.ModelStreamInferResponse()
    inner = message.infer_response
    error = response.error
    if error is None and not (response.is_empty and asked.is_decoupled):
        try:
            write_response(inner, asked, response)
        except SluiceError as caught:
            error = caught
            inner.Clear()
    if error is not None:
        message.error_message = error.message
    if not inner.model_name:
        inner.model_name = asked.model.name
        inner.id = response.id
    inner.parameters[_FINAL].bool_param = response.is_final
    return message


def refusal_message(request_id: str, error: SluiceError) -> "service_pb2.ModelStreamInferResponse":
    """For a request of a stream that has not begun."""
    message = service_pb2.ModelStreamInferResponse(error_message=error.message)
    message.infer_response.id = request_id
    message.infer_response.SetInParent()
    return message

"""Checks of the v2 protocol over gRPC, with Triton's own client, and that HTTP gives the same answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from sluice.addresses import is_loopback
from sluice.cli.smoke.deployment import Deployment, SmokeFailedError, SmokeSkippedError
from sluice.cli.smoke.text_checks import NUM_TOKENS, PROMPT, compare

_NO_PROXY = (("grpc.enable_http_proxy", 0),)
"""Options of a channel that ignores http_proxy."""
_TEXTS = ("Money comes back within five days.", "Cats sleep most of the day.")
_TOLERANCE = 1e-3
"""Largest difference between two runs of an encoder: batches of other sizes round differently."""


async def check_grpc_health(deployment: Deployment) -> str:
    """The server is live and ready over gRPC, and names itself."""
    async with _connect(deployment) as client:
        is_live = await client.is_server_live(**_call(deployment))
        is_ready = await client.is_server_ready(**_call(deployment))
        if not (is_live and is_ready):
            raise SmokeFailedError(f"gRPC: live is {is_live}, ready is {is_ready}; expected both true")
        about = await client.get_server_metadata(**_call(deployment))
    return f"live and ready, presents itself as {about.name} {about.version}"


async def check_grpc_stream(deployment: Deployment) -> str:
    """A language model over ModelInfer and ModelStreamInfer."""
    model = deployment.required_language_model()
    async with _connect(deployment) as client:

        async def whole() -> str:
            answer = await client.infer(model, _inputs(is_streamed=False), **_call(deployment))
            return _joined(answer)

        async def streamed() -> str:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {"model_name": model, "inputs": _inputs(is_streamed=True), "enable_empty_final_response": True}

            pieces = []
            async for answer, error in client.stream_infer(requests(), headers=_headers(deployment)):
                if error is not None:
                    raise error
                pieces.append(_joined(answer))
                if answer.get_response().parameters["triton_final_response"].bool_param:
                    return "".join(pieces)
            raise SmokeFailedError(f"ModelStreamInfer: {len(pieces)} responses and none was the final one")

        return await compare("ModelStreamInfer", whole, streamed)


async def check_infer(deployment: Deployment) -> str:
    """An encoder over HTTP and gRPC: the vectors are the same, and those of different texts are not."""
    model = deployment.required_encoder()
    tensor = {"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": list(_TEXTS)}
    answer = await deployment.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
    [output] = [each for each in answer["outputs"] if each["name"] == "embeddings"]
    vectors = np.array(output["data"], np.float32).reshape(output["shape"])
    if len(vectors) != 2 or not np.isfinite(vectors).all() or np.allclose(vectors[0], vectors[1], atol=_TOLERANCE):
        raise SmokeFailedError(f"{model} gave vectors of shape {vectors.shape}; expected two finite ones that differ")
    seen = f"{model}: vectors of {vectors.shape[1]}"
    try:
        async with _connect(deployment) as client:
            text = triton.InferInput("text", [2, 1], "BYTES")
            text.set_data_from_numpy(np.array([[each.encode()] for each in _TEXTS], np.object_))
            result = await client.infer(model, [text], **_call(deployment))
            over_grpc = result.as_numpy("embeddings")
    except SmokeSkippedError:
        return seen
    if not np.allclose(vectors, over_grpc, atol=_TOLERANCE):
        raise SmokeFailedError(
            f"{model}: HTTP and gRPC gave vectors that differ by {abs(vectors - over_grpc).max():.3g}"
        )
    return f"{seen}, the same over HTTP and gRPC"


@asynccontextmanager
async def _connect(deployment: Deployment) -> AsyncIterator[triton.InferenceServerClient]:
    """Open Triton's client. Its errors become SmokeFailedErrors."""
    address, is_encrypted = await deployment.find_grpc()
    options = _NO_PROXY if is_loopback(address) else None
    async with triton.InferenceServerClient(address, ssl=is_encrypted, channel_args=options) as client:
        try:
            yield client
        except InferenceServerException as error:
            hint = "; give its address with --grpc, or none" if "UNAVAILABLE" in str(error.status()) else ""
            raise SmokeFailedError(f"gRPC {address}: {error.status()} {error.message()}{hint}") from None


def _call(deployment: Deployment) -> dict[str, Any]:
    return {"headers": _headers(deployment), "client_timeout": deployment.target.timeout_s}


def _headers(deployment: Deployment) -> dict[str, str]:
    key = deployment.target.api_key
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _inputs(is_streamed: bool) -> list[triton.InferInput]:
    values = {
        "text_input": np.array([PROMPT.encode()], np.object_),
        "max_tokens": np.array([NUM_TOKENS], np.int32),
        "temperature": np.array([0], np.float32),
        "stream": np.array([is_streamed], np.bool_),
    }
    datatypes = {"text_input": "BYTES", "max_tokens": "INT32", "temperature": "FP32", "stream": "BOOL"}
    inputs = []
    for name, value in values.items():
        tensor = triton.InferInput(name, [1], datatypes[name])
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def _joined(answer: triton.InferResult) -> str:
    texts = answer.as_numpy("text_output")
    return "" if texts is None else b"".join(texts.reshape(-1).tolist()).decode()

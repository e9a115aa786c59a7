"""Text stages, what they call, and requests to them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backend import Backend, BackendContext
from sluice.serving.job import InferJob
from sluice.serving.model import Model, infer_one
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.builders import Lookup, infer_stream


def config_of(text: str, **parameters: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(text, ModelConfig())
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


async def load(backend: Backend, folder: Path, config: ModelConfig, lookup: Lookup | None = None) -> Model:
    def refuse(*_: str) -> Any:
        raise AssertionError("a stage runs no engine")

    lent = BackendContext(lookup or Lookup())
    complete = await backend.complete(ModelSource(folder, 1, config), lent)
    return await backend.load(ModelSource(folder, 1, complete), lent)


def request(model: Model, *, streams: bool = False, **fields: Any) -> InferRequest:
    """Lists of rows, or arrays, by input; texts as strings."""
    inputs = {name: tensor(model, name, value) for name, value in fields.items()}
    return InferRequest(inputs, streams_by_default=streams)


def tensor(model: Model, name: str, value: Any) -> Tensor:
    data_type = model.spec.inputs[name].data_type
    array = np.array(value, data_type.dtype)
    if data_type.name == "BYTES":
        flat = [each.encode() for each in array.ravel()]
        array = np.array(flat, np.object_).reshape(array.shape)
    return Tensor(name, data_type.name, array.shape, array=array)


async def arrays(model: Model, **fields: Any) -> dict[str, Array]:
    """Return the arrays of the one response, by name."""
    response = await infer_one(model, request(model, **fields))
    return {each.name: each.array for each in response.outputs}


async def texts(model: Model, *, streams: bool = False, **fields: Any) -> list[str]:
    """`text_output` of each response, of one row and one beam."""
    found = [each async for each in infer_stream(model, request(model, streams=streams, **fields))]
    for each in found:
        if each.error is not None:
            raise each.error
    return [each.outputs[0].array.ravel()[0].decode() for each in found if each.outputs]


Answer = Callable[[InferJob], None]
TOKEN_MODEL = """
name: "tensorrt_llm" backend: "tensorrtllm" max_batch_size: 4 model_transaction_policy { decoupled: true }
input { name: "input_ids" data_type: TYPE_INT32 dims: -1 }
input { name: "input_lengths" data_type: TYPE_INT32 dims: 1 reshape { shape: [] } }
input { name: "request_output_len" data_type: TYPE_INT32 dims: 1 reshape { shape: [] } }
input { name: "end_id" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "stop_words_list" data_type: TYPE_INT32 dims: [2, -1] optional: true }
input { name: "bad_words_list" data_type: TYPE_INT32 dims: [2, -1] optional: true }
input { name: "runtime_top_k" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "return_log_probs" data_type: TYPE_BOOL dims: 1 reshape { shape: [] } optional: true }
input { name: "streaming" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "output_ids" data_type: TYPE_INT32 dims: [-1, -1] }
output { name: "sequence_length" data_type: TYPE_INT32 dims: -1 }
output { name: "cum_log_probs" data_type: TYPE_FP32 dims: -1 }
output { name: "batch_index" data_type: TYPE_INT32 dims: 1 }
"""


class Scripted(Model):
    """A model that answers as the test says, and keeps the requests it got."""

    def __init__(self, answer: Answer, config: str = TOKEN_MODEL) -> None:
        parsed = config_of(config)
        super().__init__(parsed, build_spec(parsed, 1))
        self._answer = answer
        self.requests: list[InferRequest] = []
        self.jobs: list[InferJob] = []

    def _start(self, job: InferJob) -> None:
        self.requests.append(job.request)
        self.jobs.append(job)
        self._answer(job)

    async def close(self) -> None:
        self.retire()


def generated(*rows: Sequence[int], is_final: bool = True, **others: Array) -> InferResponse:
    """A token model's response of one beam a row."""
    longest = max(map(len, rows))
    ids = np.array([[[*row, *[0] * (longest - len(row))]] for row in rows], np.int32)
    lengths = np.array([[len(row)] for row in rows], np.int32)
    named = {"output_ids": ids, "sequence_length": lengths, **others}
    return InferResponse([Tensor.of(name, array) for name, array in named.items()], is_final=is_final)


def streaming(token_ids: Sequence[int]) -> Answer:
    """Each token as a response, the last one final."""

    def answer(job: InferJob) -> None:
        for index, token_id in enumerate(token_ids, 1):
            if not job.is_cancelled:
                job.respond(generated([token_id], is_final=index == len(token_ids)))

    return answer


def at_once(*rows: Sequence[int], **others: Array) -> Answer:
    return lambda job: job.respond(generated(*rows, is_final=True, **others))

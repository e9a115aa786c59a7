"""Small models without a backend, for tests of the v2 routes."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.spec import build_spec
from serving.tensors.datatypes import DATA_TYPES
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

Compute = Callable[[InferRequest], list[Tensor]]


class Held(Model):
    """Keeps its jobs until the test answers them, and records cancelled ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, build_spec(config, 1))
        self.jobs: list[InferJob] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where the jobs belong, once there is one."""
        self.started = threading.Event()
        self.cancelled = threading.Event()

    def _start(self, job: InferJob) -> None:
        self.jobs.append(job)
        self.loop = asyncio.get_running_loop()
        job.on_cancel = lambda: self._on_cancel(job)
        self.started.set()

    def _on_cancel(self, job: InferJob) -> None:
        job.respond(InferResponse())
        self.cancelled.set()

    async def close(self) -> None:
        return None


class Computed(Model):
    """Answers each request by a function, in the next turn of the event loop."""

    def __init__(
        self, config: ModelConfig, compute: Compute, version: int = 1, labels: dict[str, list[str]] | None = None
    ) -> None:
        super().__init__(config, build_spec(config, version), labels)
        self.compute = compute

    def _start(self, job: InferJob) -> None:
        asyncio.get_running_loop().call_soon(self._answer, job)

    def _answer(self, job: InferJob) -> None:
        try:
            outputs = self.compute(job.request)
        except SluiceError as error:
            job.fail(error)
            return
        wanted = job.request.requested_outputs
        job.respond(InferResponse([tensor for tensor in outputs if not wanted or tensor.name in wanted]))

    async def close(self) -> None:
        return None


class Repeat(Computed):
    """Decoupled: a response for each word; ERR fails one, BIG is FP16."""

    def _answer(self, job: InferJob) -> None:
        text = job.request.inputs["text_input"].array.ravel()[0].decode()
        counted = job.request.inputs.get("max_tokens")
        words = text.split(" ")
        for index in range(int(counted.array.ravel()[0]) if counted is not None else 1):
            word = words[index % len(words)]
            if word == "ERR":
                error = SluiceError(ErrorCode.INTERNAL, "asked to fail")
                job.respond(InferResponse(error=error, is_final=False))
                continue
            outputs = [strings("text_output", word.encode()), Tensor.of("index", np.array([index], np.int32))]
            job.respond(InferResponse(outputs, is_final=False))
        job.respond(InferResponse())


def config_of(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def strings(name: str, *values: bytes) -> Tensor:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return Tensor(name, "BYTES", array.shape, array=array)


def _tensor_text(kind: str, name: str, data_type: str, dims: str, more: str = "") -> str:
    return f'{kind} {{ name: "{name}" data_type: {data_type} dims: [{dims}] {more} }} '


def identity(name: str, data_type: str, dims: str = "-1, -1", max_batch_size: int = 0) -> Computed:
    """OUTPUT0 is INPUT0."""
    text = f'name: "{name}" backend: "python" max_batch_size: {max_batch_size} '
    text += _tensor_text("input", "INPUT0", data_type, dims) + _tensor_text("output", "OUTPUT0", data_type, dims)
    return Computed(config_of(text), lambda request: [request.inputs["INPUT0"].renamed("OUTPUT0")])


def add_sub() -> Computed:
    text = 'name: "add_sub" backend: "python" max_batch_size: 8 '
    for index in range(2):
        text += _tensor_text("input", f"INPUT{index}", "TYPE_FP32", "4")
        text += _tensor_text("output", f"OUTPUT{index}", "TYPE_FP32", "4")

    def compute(request: InferRequest) -> list[Tensor]:
        left, right = (request.inputs[f"INPUT{index}"].array for index in range(2))
        return [Tensor.of("OUTPUT0", left + right), Tensor.of("OUTPUT1", left - right)]

    return Computed(config_of(text), compute, labels={"OUTPUT0": ["zero", "one", "two", "three"]})


def all_types() -> Computed:
    """OUT_FP32 is IN_FP32, and so on for every type; BYTES is called STRING."""
    names = [each.config_name.removeprefix("TYPE_") for each in DATA_TYPES.values()]
    text = 'name: "alltypes" backend: "python" '
    for name in names:
        text += _tensor_text("input", f"IN_{name}", f"TYPE_{name}", "-1", "optional: true")
        text += _tensor_text("output", f"OUT_{name}", f"TYPE_{name}", "-1")

    def compute(request: InferRequest) -> list[Tensor]:
        given = request.inputs
        return [given[f"IN_{name}"].renamed(f"OUT_{name}") for name in names if f"IN_{name}" in given]

    return Computed(config_of(text), compute)


def half() -> Computed:
    """Returns a tensor that JSON cannot carry."""
    text = 'name: "half" backend: "python" '
    text += _tensor_text("input", "INPUT0", "TYPE_FP32", "1") + _tensor_text("output", "OUTPUT0", "TYPE_FP16", "1")

    def compute(request: InferRequest) -> list[Tensor]:
        return [Tensor.of("OUTPUT0", request.inputs["INPUT0"].array.astype(np.float16))]

    return Computed(config_of(text), compute)


def text_once() -> Computed:
    text = 'name: "text_once" backend: "python" max_batch_size: 4 '
    text += _tensor_text("input", "text_input", "TYPE_STRING", "1")
    text += _tensor_text("input", "max_tokens", "TYPE_INT32", "1", "optional: true")
    text += _tensor_text("output", "text_output", "TYPE_STRING", "1")

    def compute(request: InferRequest) -> list[Tensor]:
        tail = " " + json.dumps(request.parameters, sort_keys=True)
        given = request.inputs["text_input"].array
        made = strings("text_output", *(value.upper() + tail.encode() for value in given.ravel()))
        return [Tensor("text_output", "BYTES", given.shape, array=made.array.reshape(given.shape))]

    return Computed(config_of(text), compute)


def text_repeat() -> Repeat:
    text = 'name: "text_repeat" backend: "python" model_transaction_policy { decoupled: true } '
    text += _tensor_text("input", "text_input", "TYPE_STRING", "1")
    text += _tensor_text("input", "max_tokens", "TYPE_INT32", "1", "optional: true")
    text += _tensor_text("output", "text_output", "TYPE_STRING", "1") + _tensor_text(
        "output", "index", "TYPE_INT32", "1"
    )
    return Repeat(config_of(text), lambda request: [])


def params_echo() -> Computed:
    text = 'name: "params_echo" backend: "python" '
    text += _tensor_text("input", "INPUT0", "TYPE_INT32", "1") + _tensor_text("output", "PARAMS", "TYPE_STRING", "1")

    def compute(request: InferRequest) -> list[Tensor]:
        told = {
            "id": request.id,
            "corr": request.correlation_id,
            "flags": int(request.sequence),
            "timeout": request.timeout_us,
            "params": request.parameters,
            "want": ["PARAMS"],
            "greeting": "hello",
        }
        return [strings("PARAMS", json.dumps(told, sort_keys=True).encode())]

    return Computed(config_of(text), compute)


_CODES = {"INVALID_ARG": ErrorCode.INVALID, "UNSUPPORTED": ErrorCode.UNIMPLEMENTED} | {
    code.name: code for code in ErrorCode
}
"""Error codes by Triton's names and ours."""


def error_model() -> Computed:
    text = 'name: "error_model" backend: "python" '
    text += _tensor_text("input", "CODE", "TYPE_STRING", "1") + _tensor_text("output", "OUTPUT0", "TYPE_STRING", "1")

    def compute(request: InferRequest) -> list[Tensor]:
        code = request.inputs["CODE"].array.ravel()[0].decode()
        if code == "OK":
            return [strings("OUTPUT0", b"OK")]
        raise SluiceError(_CODES.get(code, ErrorCode.INTERNAL), f"failed as {code}")

    return Computed(config_of(text), compute)


def versioned() -> Iterator[Computed]:
    for version in (1, 2):
        text = 'name: "versioned" backend: "python" version_policy { specific { versions: [1, 2] } } '
        text += _tensor_text("input", "INPUT0", "TYPE_INT32", "-1") + _tensor_text(
            "output", "OUTPUT0", "TYPE_INT32", "-1"
        )
        yield Computed(config_of(text), partial(_add, 100 * version), version)


def _add(added: int, request: InferRequest) -> list[Tensor]:
    return [Tensor.of("OUTPUT0", request.inputs["INPUT0"].array + np.int32(added))]


def held(is_decoupled: bool) -> Held:
    text = f'name: "held" backend: "python" model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }} '
    text += _tensor_text("input", "INPUT0", "TYPE_INT32", "1") + _tensor_text("output", "OUTPUT0", "TYPE_INT32", "1")
    return Held(config_of(text))


def all_models() -> list[Model]:
    return [
        identity("identity", "TYPE_FP32"),
        identity("identity_bytes", "TYPE_STRING"),
        identity("identity_int32", "TYPE_INT32"),
        add_sub(),
        all_types(),
        half(),
        text_once(),
        text_repeat(),
        params_echo(),
        error_model(),
        *versioned(),
    ]

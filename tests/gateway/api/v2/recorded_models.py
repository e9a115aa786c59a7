"""The models whose answers were recorded from the real Triton, run by their own code on the server's event loop."""

import asyncio
import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.tensors.tensor import Array, Tensor
from tests.paths import DATA
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble.parts import load

FOLDER = DATA / "triton" / "models"
NAMES = (
    *("add_sub", "alltypes", "cached_square", "error_model", "half", "identity", "identity_bytes", "identity_int32"),
    *("params_echo", "ragged", "reshaped", "shout", "text_once", "text_repeat", "trickle"),
)
ENSEMBLES = ("ensemble_addsub", "ensemble_stream")
_MODULE = "triton_python_backend_utils"
_ELSEWHERE = ("dynamic_batching", "response_cache")
"""Parts of a configuration that the recorded answers do not show."""
_CODES = {code.name: code for code in ErrorCode}
_CODES |= {"INVALID_ARG": ErrorCode.INVALID, "UNSUPPORTED": ErrorCode.UNIMPLEMENTED}
"""Error codes by Triton's names and ours."""


class _Tensor:
    """A tensor as the models see it."""

    def __init__(self, name: str, array: Array) -> None:
        self.tensor = Tensor.of(name, array)

    @classmethod
    def seen(cls, tensor: Tensor) -> "_Tensor":
        made = cls.__new__(cls)
        made.tensor = tensor
        return made

    @classmethod
    def from_dlpack(cls, name: str, other: "_Tensor") -> "_Tensor":
        return cls.seen(other.tensor.renamed(name))

    def as_numpy(self) -> Array:
        return self.tensor.array


class _Request:
    """A job as the models see it, and the sender of its responses."""

    def __init__(self, job: InferJob, outputs: Sequence[str]) -> None:
        self.job, self._outputs = job, outputs
        self._loop = asyncio.get_running_loop()
        self.request_id = lambda: job.request.id
        self.correlation_id = lambda: job.request.correlation_id
        self.flags = lambda: int(job.request.sequence)
        self.timeout = lambda: job.request.timeout_us
        self.parameters = lambda: json.dumps(job.request.parameters)
        self.requested_output_names = lambda: job.request.requested_outputs or outputs

    def get_response_sender(self) -> "_Request":
        return self

    def send(self, response: InferResponse | None = None, flags: int = 0) -> None:
        self._loop.call_soon_threadsafe(self.respond, response or InferResponse(), bool(flags))

    def respond(self, given: InferResponse, is_final: bool) -> None:
        wanted = self.job.request.requested_outputs
        outputs = [each for each in given.outputs if not wanted or each.name in wanted]
        self.job.respond(InferResponse(outputs, error=given.error, is_final=is_final))


def _utilities() -> ModuleType:
    """Make the module that models import: as much of Triton's as these use."""

    def error(message: str, code: ErrorCode = ErrorCode.INTERNAL) -> SluiceError:
        return SluiceError(code, message)

    def response(output_tensors: Sequence[_Tensor] = (), error: SluiceError | None = None) -> InferResponse:
        return InferResponse([each.tensor for each in output_tensors], error=error)

    def find(request: _Request, name: str) -> _Tensor | None:
        tensor = request.job.request.inputs.get(name)
        return None if tensor is None else _Tensor.seen(tensor)

    vars(error).update(_CODES)
    module = ModuleType(_MODULE)
    vars(module).update(
        Tensor=_Tensor,
        TritonError=error,
        TritonModelException=ValueError,
        InferenceResponse=response,
        get_input_tensor_by_name=find,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    return module


class RecordedModel(Model):
    """Runs a model's recorded code, each request alone, in the next turn of the loop."""

    def __init__(self, name: str, version: int = 1) -> None:
        folder = FOLDER / name
        config = read_config(name)
        labels = {
            each.name: (folder / each.label_filename).read_text().split()
            for each in config.output
            if each.label_filename
        }
        super().__init__(config, build_spec(config, version), labels)
        names: dict[str, Any] = {}
        sys.modules[_MODULE] = _utilities()
        try:
            exec((folder / str(version) / "model.py").read_text(), names)
        finally:
            del sys.modules[_MODULE]
        self._code = names["TritonPythonModel"]()
        if hasattr(self._code, "initialize"):
            parameters = {key: {"string_value": each.string_value} for key, each in config.parameters.items()}
            self._code.initialize({"model_config": json.dumps({"parameters": parameters})})

    def _start(self, job: InferJob) -> None:
        asyncio.get_running_loop().call_soon(self._run, job)

    def _run(self, job: InferJob) -> None:
        request = _Request(job, list(self.spec.outputs))
        try:
            answers = self._code.execute([request])
        except Exception as error:
            job.fail(SluiceError(ErrorCode.INTERNAL, f"the model raised {error!r}"))
            return
        if answers is not None:
            request.respond(answers[0], is_final=True)

    async def close(self) -> None:
        return None


def read_config(name: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse((FOLDER / name / "config.pbtxt").read_text(), ModelConfig())
    for each in _ELSEWHERE:
        config.ClearField(each)
    return config


def recorded_models() -> list[Model]:
    models: list[Model] = [RecordedModel(name) for name in NAMES]
    models += [RecordedModel("versioned", version) for version in (1, 2)]
    known, loop = Lookup(*models), asyncio.new_event_loop()
    ensembles = [loop.run_until_complete(load(read_config(name), known)) for name in ENSEMBLES]
    loop.close()
    return [*models, *ensembles]

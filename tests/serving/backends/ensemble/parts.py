"""Lookup that tests answer by hand, and ensembles of them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import BackendContext
from sluice.serving.backends.ensemble.backend import EnsembleBackend, EnsembleModel
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse, Parameters, SequenceFlag
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.tensors.tensor import Array, Tensor
from tests.serving.backends.builders import Lookup


def config_of(text: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(text, ModelConfig())
    return config


def simple_config(
    name: str,
    *,
    inputs: str = "X",
    outputs: str = "Y",
    max_batch_size: int = 0,
    is_decoupled: bool = False,
    optional: str = "",
    dims: str = "-1",
    data_type: str = "TYPE_FP32",
) -> ModelConfig:
    """Make a model's configuration with one-letter tensors: each letter of `inputs` and `outputs` is one."""
    lines = [f'name: "{name}" backend: "test" max_batch_size: {max_batch_size}']
    lines += [
        f'input {{ name: "{each}" data_type: {data_type} dims: [{dims}] optional: {str(each in optional).lower()} }}'
        for each in inputs
    ]
    lines += [f'output {{ name: "{each}" data_type: {data_type} dims: [{dims}] }}' for each in outputs]
    lines += [f"model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}"]
    return config_of("\n".join(lines))


class HeldModel(Model):
    """Keeps every job until the test answers it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, build_spec(config, 1))
        self.jobs: list[InferJob] = []
        self.num_cancelled = 0

    def _start(self, job: InferJob) -> None:
        self.jobs.append(job)
        job.on_cancel = lambda: self._cancelled(job)

    def _cancelled(self, job: InferJob) -> None:
        self.num_cancelled += 1
        job.respond(InferResponse())

    def answer(
        self, index: int, *, is_final: bool = True, parameters: Parameters | None = None, **values: Array
    ) -> None:
        outputs = [Tensor.of(name, array) for name, array in values.items()]
        self.jobs[index].respond(InferResponse(outputs, parameters or {}, is_final=is_final))

    def end(self, index: int) -> None:
        self.jobs[index].respond(InferResponse())

    async def close(self) -> None:
        for job in self.jobs:
            job.fail(SluiceError(ErrorCode.UNAVAILABLE, "closed"))


class FunctionModel(Model):
    """Answers at once with a function of its inputs."""

    def __init__(self, config: ModelConfig, function: Callable[..., dict[str, Array]]) -> None:
        super().__init__(config, build_spec(config, 1))
        self.function = function
        self.requests: list[InferRequest] = []

    def _start(self, job: InferJob) -> None:
        self.requests.append(job.request)
        made = self.function(**{name: tensor.array for name, tensor in job.request.inputs.items()})
        outputs = [Tensor.of(name, array) for name, array in made.items() if name in job.request.requested_outputs]
        job.respond(InferResponse(outputs))

    async def close(self) -> None:
        pass


async def load(config: ModelConfig, models: Lookup, folder: Path = Path("nowhere")) -> EnsembleModel:
    context = BackendContext(models)
    model = await EnsembleBackend().load(ModelSource(folder, 1, config), context)
    assert isinstance(model, EnsembleModel)
    models.models[model.name] = model
    return model


def ensemble_config(
    steps: str, *, inputs: str = "a", outputs: str = "z", extra: str = "", dims: str = "-1"
) -> ModelConfig:
    """Make a configuration of steps `model: X=a Y=b; …`, which map a model's tensor to the ensemble's; outputs
    follow `->`.
    """
    lines = [f'name: "whole" platform: "ensemble" {extra}']
    lines += [f'input {{ name: "{each}" data_type: TYPE_FP32 dims: [{dims}] }}' for each in inputs]
    lines += [f'output {{ name: "{each}" data_type: TYPE_FP32 dims: [{dims}] }}' for each in outputs]
    config = config_of("\n".join(lines))
    for text in steps.split(";"):
        name, maps = text.split(":")
        step = config.ensemble_scheduling.step.add(model_name=name.strip(), model_version=-1)
        for side, mapping in zip(maps.split("->"), (step.input_map, step.output_map), strict=True):
            mapping.update(dict(pair.split("=") for pair in side.split()))
    return config


class Caller:
    """Receives the responses of one request."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        self.responses: list[InferResponse] = []
        self.job = model.submit(request, self.responses.append)

    @property
    def only(self) -> InferResponse:
        assert len(self.responses) == 1
        return self.responses[0]

    @property
    def error(self) -> SluiceError:
        assert self.only.error is not None
        return self.only.error

    def values(self, output: str = "z") -> list[object]:
        """Return the first element of that output in each response that has it."""
        return [
            tensor.array.ravel()[0].item()
            for each in self.responses
            for tensor in each.outputs
            if tensor.name == output
        ]


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def request(
    inputs: Mapping[str, Array] | None = None,
    *,
    id: str = "",
    outputs: tuple[str, ...] = (),
    parameters: Parameters | None = None,
    priority: int = 0,
    timeout_us: int = 0,
    correlation_id: int | str = 0,
    sequence: SequenceFlag = SequenceFlag.NONE,
) -> InferRequest:
    given = inputs if inputs is not None else {"a": floats(1)}
    return InferRequest(
        {name: Tensor.of(name, array) for name, array in given.items()},
        id=id,
        requested_outputs=outputs,
        parameters=parameters or {},
        priority=priority,
        timeout_us=timeout_us,
        correlation_id=correlation_id,
        sequence=sequence,
    )


class Script:
    """The events of one request to an ensemble of held models, in words.

    `talk=7` answers the first request to the step talk with Y [7], `talk.1=7` the second one, and `talk=` with nothing.
    `talk~7` is a response with more to come, and `talk!7` an error with that message. `-` cancels the request.
    """

    def __init__(
        self, steps: str, *, streams: str = "", given: Mapping[str, Model] | None = None, **options: Any
    ) -> None:
        """Each step of `steps` is a model that the script answers, but those `given`. Those in `streams` are decoupled.
        `options` are those of `ensemble_config`, and `optional` of `simple_config`."""
        self._events: list[str] = []
        self._given = given or {}
        self._optional = options.pop("optional", "")
        self._streams = streams.split()
        self._config = ensemble_config(steps, **options)
        self.held: dict[str, HeldModel] = {}

    def _model(self, step: Any) -> Model:
        name = step.model_name
        if (found := self._given.get(name)) is not None:
            return found
        config = simple_config(
            name, inputs="".join(step.input_map), is_decoupled=name in self._streams, optional=self._optional
        )
        self.held[name] = _ToldModel(config, self._events)
        return self.held[name]

    async def play(self, words: str, asked: InferRequest | None = None) -> str:
        """Return what each word leads to, after what the request itself does: `>talk 7` is a request to a step, with
        its inputs by their names, and `xtalk` a cancelled one; `s=7,z=1` is a response, the last one with a dot. That
        of a request that streams begins with `~`."""
        models = Lookup(*map(self._model, self._config.ensemble_scheduling.step))
        model, asked = await load(self._config, models), asked or request()
        told = [["~"] if model.is_decoupled_for(asked) else []]
        self._events.clear()
        job = model.submit(asked, lambda response: self._events.append(_describe(response)))
        for word in ["", *words.split()]:
            if word:
                told.append([])
                self._do(word, job)
            told[-1] += sorted(self._events, key=lambda event: (event[0] != "x", event if event[0] == "x" else ""))
            self._events.clear()
        if job.is_finished:
            assert all(each.num_in_flight == 0 for each in (model, *models.models.values()))
        return " | ".join(" ".join(each) for each in told)

    def _do(self, word: str, job: InferJob) -> None:
        if word == "-":
            job.cancel()
            return
        place, kind, value = re.fullmatch(r"([a-z.0-9]+)([=~!])(.*)", word).groups()  # type: ignore[union-attr]
        name, _, index = place.partition(".")
        if kind == "!":
            error = SluiceError(ErrorCode.UNAVAILABLE, value, param="X")
            self.held[name].jobs[int(index or 0)].respond(InferResponse(error=error, is_final=False))
            return
        tensors = [Tensor.of("Y", floats(float(value)))] if value else []
        self.held[name].jobs[int(index or 0)].respond(InferResponse(tensors, is_final=kind == "="))


class _ToldModel(HeldModel):
    """Tells of its requests, and of those that are cancelled."""

    def __init__(self, config: ModelConfig, events: list[str]) -> None:
        super().__init__(config)
        self._events = events

    def _start(self, job: InferJob) -> None:
        self._events.append(
            f">{self.name} {','.join(_number(job.request.inputs[name]) for name in sorted(job.request.inputs))}"
        )
        super()._start(job)

    def _cancelled(self, job: InferJob) -> None:
        self._events.append(f"x{self.name}")
        super()._cancelled(job)


def _number(tensor: Tensor) -> str:
    return f"{tensor.array.ravel()[0].item():g}"


def _describe(response: InferResponse) -> str:
    said = "" if response.error is None else f"({response.error.message})"
    outputs = ",".join(f"{each.name}={_number(each)}" for each in response.outputs)
    return said + outputs + "." * response.is_final

"""The steps of a version between its backend's load and its first request."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sluice.errors import SluiceError
from sluice.serving.backend import BackendContext, ModelLookup
from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.model import infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.serving.batching.test_warm_up_samples import CLASSIFIER, write_classifier
from tests.serving.repository.parts import CONFIG, READY, Bench, context_for, failure, rows, write_model

NEEDS_TWO = 'instance_group { count: 1 kind: KIND_CPU rate_limiter { resources { name: "R" count: 2 } } }'


def limited(limiter: RateLimiter) -> Callable[[ModelLookup], BackendContext]:
    return lambda models: replace(context_for(models), rate_limiter=limiter)


async def test_a_model_that_fails_its_warm_up_is_closed(bench: Bench, repository: ModelRepository, root: Path) -> None:
    value = "value { data_type: TYPE_INT32 dims: 1 zero_data: true }"
    wrong = f'model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "OTHER" {value} }} }}'
    write_model(root, "a", 1, config=CONFIG + wrong)
    error = await failure(repository.load("a"))
    assert "failed to run warmup sample 'w':" in error.message
    assert bench.stamp.loads and not bench.stamp.open_models


async def test_a_model_that_needs_more_than_there_is_does_not_load(root: Path) -> None:
    write_classifier(root, CLASSIFIER + NEEDS_TWO)
    limiter = RateLimiter({("R", None): 1})
    repository = ModelRepository([root], ControlMode.EXPLICIT, limited(limiter))
    await repository.start()
    assert "which will prevent scheduling" in (await failure(repository.load("m"))).message
    assert limiter.free(("R", 0)) == 0
    await repository.close()


async def test_what_a_model_claims_goes_with_it(root: Path) -> None:
    write_classifier(root, CLASSIFIER + NEEDS_TWO)
    limiter = RateLimiter()
    repository = ModelRepository([root], ControlMode.EXPLICIT, limited(limiter))
    await repository.start()
    await repository.load("m")
    assert limiter.free(("R", 0)) == 2
    await repository.close()
    assert limiter.free(("R", 0)) == 0


async def test_a_model_of_passive_instances_alone_is_refused(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 1, config=CONFIG + "instance_group { passive: true } instance_group { passive: true }")
    assert "all instances of model 'a' are passive" in (await failure(repository.load("a"))).message
    write_model(root, "b", 1, config=CONFIG + "instance_group { passive: true } instance_group { count: 1 }")
    await repository.load("b")
    assert rows(repository)["b", 1] == READY


async def test_what_would_take_another_command_line_is_said(
    repository: ModelRepository, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked = 'instance_group { count: 1 kind: KIND_CPU host_policy: "p" rate_limiter { priority: 2 } }'
    write_model(root, "a", 1, config=CONFIG + asked)
    await repository.load("a")
    assert "model 'a': instance_group.rate_limiter has no effect without --rate-limit=execution_count" in caplog.text
    assert "model 'a': host_policy 'p' is not known to the server" in caplog.text


WORKER = """
import os

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        if os.path.exists(__file__ + ".dies"):
            os.kill(os.getpid(), 9)
        return [pb_utils.InferenceResponse([pb_utils.get_input_tensor_by_name(each, "X")]) for each in requests]
"""
WORKER_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
"""


@pytest.mark.slow
async def test_a_worker_that_dies_gives_back_what_it_had(root: Path) -> None:
    for name in ("dies", "lives"):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(WORKER)
        (root / name / "config.pbtxt").write_text(WORKER_CONFIG + NEEDS_TWO)
    (root / "dies" / "1" / "model.py.dies").touch()
    limiter = RateLimiter()
    repository = ModelRepository([root], ControlMode.NONE, limited(limiter))
    await repository.start()
    tensor = Tensor.of("X", np.array([1], np.int32))
    died, answered = await asyncio.gather(
        *(infer_one(repository.find(name), InferRequest({"X": tensor})) for name in ("dies", "lives")),
        return_exceptions=True,
    )
    assert isinstance(died, SluiceError)
    assert isinstance(answered, InferResponse)
    assert limiter.free(("R", 0)) == 2
    await repository.close()

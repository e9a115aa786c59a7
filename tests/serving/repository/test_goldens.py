"""The configurations of the reference models as the real server answers them: `configs` holds its HTTP bodies."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backend import Backend, BackendContext, ModelFile
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.config_json import config_dict, config_json, parse_config_json
from sluice.serving.job import InferJob
from sluice.serving.model import Model, infer_one
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode
from sluice.serving.request import InferRequest
from sluice.serving.spec import ModelSource, build_spec
from sluice.serving.tensors.tensor import Tensor
from tests.serving.repository.parts import DATA, context_for

MODELS = [DATA.parent / "triton" / "models", DATA / "models"]
CONFIGS = {path.stem: path.read_text() for path in sorted((DATA / "configs").glob("*.json"))}


class SilentModel(Model):
    def __init__(self, source: ModelSource) -> None:
        super().__init__(source.config, build_spec(source.config, source.version))

    def _start(self, job: InferJob) -> None:
        raise AssertionError("nobody asks these models")

    async def warm_up(self, request: InferRequest) -> None:
        pass

    async def close(self) -> None:
        pass


class PythonConfigs(Backend):
    """Completes as the reference's autoconf/1/model.py does, without running it."""

    name = "python"
    default_model_filename = "model.py"
    model_files: tuple[ModelFile, ...] = (ModelFile("model.py"),)

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = ModelConfig()
        config.CopyFrom(source.config)
        if source.name == "autoconf":
            config.max_batch_size = 2
            config.input.add(name="IN", data_type="TYPE_INT64", dims=[-1])
            config.output.add(name="OUT", data_type="TYPE_INT64", dims=[-1])
            config.dynamic_batching.SetInParent()
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        return SilentModel(source)


@pytest.fixture
async def reference(no_gpu: None) -> AsyncIterator[ModelRepository]:
    """Over the reference's models."""
    registry = BackendRegistry()
    registry.register(PythonConfigs())
    repository = ModelRepository(MODELS, ControlMode.NONE, context_for, registry=registry)
    assert await repository.start() == {}
    yield repository
    await repository.close()


class AnyLlm(PythonConfigs):
    name = "tensorrtllm"
    default_model_filename = ""
    model_files = ()


async def test_the_configuration_of_a_users_llm_loads_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "llama3_8b"
    (folder / "1").mkdir(parents=True)
    shutil.copy(DATA.parent / "seed_configs" / "000_llama3_8b.pbtxt", folder / "config.pbtxt")
    registry = BackendRegistry()
    registry.register(AnyLlm())
    notes: list[str] = []
    repository = ModelRepository([tmp_path], ControlMode.NONE, context_for, on_note=notes.append, registry=registry)
    assert await repository.start() == {}
    spec = repository.find("llama3_8b").spec
    assert spec.max_batch_size == 256
    assert spec.inputs["sampling_config"].data_type.name == "BYTES"
    assert spec.inputs["streaming"].is_optional
    assert list(spec.outputs) == ["output_ids", "sequence_length"]
    assert len(notes) == 1
    assert notes[0].startswith("model 'llama3_8b': config.pbtxt:8: TYPE_BYTES is read as TYPE_STRING")
    await repository.close()


@pytest.mark.slow
async def test_with_the_backends_that_are_installed(tmp_path: Path) -> None:
    for name in ("add_sub", "ensemble_addsub"):
        shutil.copytree(MODELS[0] / name, tmp_path / name)
    repository = ModelRepository([tmp_path], ControlMode.EXPLICIT, context_for)
    assert await repository.start(["ensemble_addsub"]) == {}
    tensors = {name: Tensor.of(name, np.array([[1, 2, 3, value]], np.float32)) for name, value in (("A", 4), ("B", 5))}
    response = await infer_one(repository.find("ensemble_addsub"), InferRequest(tensors))
    assert {each.name: each.array.tolist() for each in response.outputs} == {
        "TWICE_A": [[2.0, 4.0, 6.0, 8.0]],
        "TWICE_B": [[2.0, 4.0, 6.0, 10.0]],
    }
    await repository.close()


def in_order(value: Any, key: str = "") -> Any:
    """Objects as lists of their members, so that the order of members counts; a map's has none."""
    if isinstance(value, list):
        return [in_order(each) for each in value]
    if not isinstance(value, dict):
        return value
    members = sorted(value.items()) if key in ("input_map", "output_map") else value.items()
    return [(name, in_order(each, name)) for name, each in members]


async def test_configs_are_the_real_servers(reference: ModelRepository) -> None:
    assert len(CONFIGS) == 17
    for name, expected in CONFIGS.items():
        answered = config_json(reference.find(name).config).decode()
        assert in_order(json.loads(answered)) == in_order(json.loads(expected)), name
        if name != "ensemble_addsub":  # its maps come in another order in each of the real server's runs
            assert answered == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_printed_can_be_read(name: str) -> None:
    config = parse_config_json(CONFIGS[name])
    assert config.name == name
    assert in_order(config_dict(config)) == in_order(json.loads(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_protobufs_own_json_can_be_read(name: str) -> None:
    config = parse_config_json(CONFIGS[name])
    for keeps_names in (True, False):
        text = json_format.MessageToJson(config, preserving_proto_field_name=keeps_names)
        assert parse_config_json(text) == config

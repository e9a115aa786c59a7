"""Backends whose code is a `model.py`, until the server itself reads them from --backend-directory."""

import os
from dataclasses import replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import BackendContext
from serving.backends.python.backend import PythonBackend
from serving.model import Model
from serving.spec import ModelSource
from tests.paths import DATA


def make(name: str) -> type[PythonBackend]:
    class PythonBasedBackend(PythonBackend):
        model_files = ()

        async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
            return source.config

        async def load(self, source: ModelSource, context: BackendContext) -> Model:
            config = ModelConfig()
            config.CopyFrom(source.config)
            config.default_model_filename = str(DATA / "triton_qa" / "backends" / name / "model.py")
            return await super().load(replace(source, config=config), context)

    PythonBasedBackend.name = name
    PythonBasedBackend.default_model_filename = ""
    return PythonBasedBackend


for each in sorted(os.listdir(DATA / "triton_qa" / "backends")):
    globals()[each] = make(each)

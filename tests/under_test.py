"""The runtime that tests of every runner load: OpenVINO, with `--on-torch` torch on the CPU."""

import os

import msgspec

from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.loop import load
from sluice.engine.runners.base import Runner

_ON_TORCH = {"SLUICE_RUNTIME": "torch", "SLUICE_DEVICE": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}
"""The environment of servers, and of torch itself: its threads must not spin where many processes share the cores."""


def runtime() -> Runtime:
    return Runtime.TORCH if "SLUICE_RUNTIME" in os.environ else Runtime.OPENVINO  # noqa: TID251 - see `use_torch`


def use_torch() -> None:
    """Let servers, and the runners and engines of tests, be on torch from now on."""
    os.environ.update(_ON_TORCH)  # noqa: TID251 - servers inherit it


def load_runner(config: EngineConfig) -> Runner:
    """Load a runner of the runtime under test."""
    return load.load_runner(msgspec.structs.replace(config, runtime=runtime(), device="cpu"))

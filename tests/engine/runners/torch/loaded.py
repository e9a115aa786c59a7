"""Torch runners on the CPU, of families' small checkpoints."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from tests.engine.runners.family_goldens import FamilyGolden, read_family
from tests.goldens.checkpoints import write_checkpoint

if find_spec("torch") is None:
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

from sluice.engine.runners.torch import runner as torch_runner

Loaded = torch_runner.TorchRunner
load = torch_runner.load_runner


def config(folder: Path, **fields: Any) -> EngineConfig:
    """One thread: several cost more than these small models give them to do."""
    return EngineConfig(
        **{"model_path": str(folder), "device": "cpu", "dtype": "f32", "num_blocks": 40, "num_threads": 1, **fields}
    )


def load_family(name: str, folder: Path, **fields: Any) -> tuple[Loaded, FamilyGolden]:
    golden = read_family(name)
    write_checkpoint(golden.blueprint, folder)
    return load(config(folder, max_model_len=golden.max_model_len, **fields)), golden

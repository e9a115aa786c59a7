"""Torch runners on the CPU, of families' small checkpoints."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.runners.base import Runner
from tests.engine.runners.drive import Driver, Prompt
from tests.engine.runners.family_goldens import FamilyGolden, read_family
from tests.goldens.checkpoints import write_checkpoint

if find_spec("torch") is None:
    pytest.skip("needs torch: `make test-torch`", allow_module_level=True)

from engine.runners.torch import runner as torch_runner

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


def continuations(runner: Runner, golden: FamilyGolden) -> list[list[int]]:
    """Return the tokens of a golden's prompts, from prefill chunks and decodes mixed in one step, and decodes alone."""
    prompts = [
        Prompt(case.prompt_token_ids, case.max_tokens, first_step=2 * index) for index, case in enumerate(golden.cases)
    ]
    return Driver(runner, chunk_sizes=(7, 30, 50), seed=4).generate(prompts)

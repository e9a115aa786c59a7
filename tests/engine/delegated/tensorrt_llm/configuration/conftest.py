"""Plans of a configuration over the stand-in."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan, plan_llm
from sluice.engine.delegated.tensorrt_llm.folder import read_folder
from sluice.engine.delegated.tensorrt_llm.library import load_library
from tests.engine.delegated.tensorrt_llm.flavours import imported

Plan = Callable[..., LlmPlan]


@pytest.fixture
def package(flavour: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported(flavour, monkeypatch) as package:
        yield package


@pytest.fixture
def plan(package: ModuleType, checkpoint: Path) -> Plan:
    """`plan(folder, max_num_seqs=8, settings={"tp_size": "2"})`; the folder is a checkpoint where none is given."""

    def make(folder: Path = checkpoint, settings: dict[str, str] | None = None, **fields: Any) -> LlmPlan:
        config = EngineConfig(model_path=str(folder), runtime_settings=settings or {}, **fields)
        return plan_llm(config, read_folder(folder), load_library())

    return make

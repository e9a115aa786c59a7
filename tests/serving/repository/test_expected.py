"""Models that are loaded elsewhere and come while the repository starts."""

import asyncio
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.repository.settings import ControlMode
from serving.spec import ModelSource
from tests.serving.repository.parts import (
    CONFIG,
    READY,
    Bench,
    StampBackend,
    StampModel,
    ask,
    ensemble_config,
    rows,
    write_model,
)
from tests.waiting import until


async def test_an_ensemble_waits_for_a_model_that_is_loaded_elsewhere(bench: Bench, root: Path) -> None:
    write_model(root, "llm", 4)
    write_model(root, "other", 5)
    write_model(root, "outer", 0, config=ensemble_config("llm", "other"))
    repository = bench.repository(ControlMode.NONE)
    arrived = repository.expect("llm")
    starting = asyncio.ensure_future(repository.start())
    await until(lambda: rows(repository).get(("other", 1)) == READY)
    assert bench.join.loads == []
    config = text_format.Parse(f'name: "llm" {CONFIG} default_model_filename: "stamp.txt"', ModelConfig())
    repository.add(StampModel(ModelSource(root / "llm", 1, config), StampBackend()))
    arrived()
    assert await starting == {}
    assert bench.join.loads == [("outer", 1)]
    assert await ask(repository, "outer") == 4
    assert [model.name for model in bench.stamp.made] == ["other"], "the folder of the model that came is not loaded"
    await repository.close()


async def test_an_ensemble_hears_that_a_model_does_not_come(bench: Bench, root: Path) -> None:
    write_model(root, "outer", 0, config=ensemble_config("llm"))
    repository = bench.repository(ControlMode.NONE)
    repository.expect("llm")()
    failures = await repository.start()
    assert "llm" in failures["outer"].message
    await repository.close()

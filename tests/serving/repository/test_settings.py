"""How a repository loads: how many models side by side, how often again, and what has failed."""

import asyncio
from pathlib import Path

import pytest

from sluice.serving.backend import BackendContext
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode, RepositorySettings
from tests.serving.repository.parts import Bench, failure, write_model
from tests.waiting import until


@pytest.mark.parametrize(
    ("settings", "num_parallel"),
    [
        (None, 4),
        (RepositorySettings(num_parallel_loads=1), 1),
        (RepositorySettings(num_parallel_loads=2), 2),
    ],
)
async def test_models_load_side_by_side_as_told(
    bench: Bench, root: Path, settings: RepositorySettings | None, num_parallel: int
) -> None:
    for name in "abcde":
        write_model(root, name, "hang")
    repository = bench.repository(ControlMode.NONE, settings=settings)
    starting = asyncio.ensure_future(repository.start())
    await until(lambda: bench.stamp.num_loading == num_parallel)
    bench.stamp.release.set()
    assert await starting == {}
    assert bench.stamp.most_loading == num_parallel
    await repository.close()


@pytest.mark.parametrize("num_retries", [0, 2])
async def test_a_load_that_fails_is_tried_again(bench: Bench, root: Path, num_retries: int) -> None:
    write_model(root, "bad", "fail")
    write_model(root, "good", 1)
    repository = bench.repository(settings=RepositorySettings(num_load_retries=num_retries))
    await repository.start(["good"])
    assert "cannot start" in (await failure(repository.load("bad"))).message
    assert bench.stamp.loads.count(("bad", 1)) == 1 + num_retries
    assert bench.stamp.loads.count(("good", 1)) == 1
    assert repository.num_failed_loads == {"bad": 1}
    await repository.close()


async def test_a_retry_that_goes_well(bench: Bench, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(root, "a", "hang")
    repository = bench.repository(load_timeout_s=0.05, settings=RepositorySettings(num_load_retries=100))
    starting = asyncio.ensure_future(repository.start(["a"]))
    await until(lambda: len(bench.stamp.loads) > 1)
    (folder / "1" / "stamp.txt").write_text("5")
    assert await starting == {}
    assert repository.find("a").stamp == 5  # type: ignore[attr-defined]
    assert "attempt 1 of 101" in caplog.text
    assert repository.num_failed_loads == {}
    await repository.close()


async def test_failures_are_counted_by_model(repository: ModelRepository, root: Path) -> None:
    write_model(root, "bad", "fail")
    write_model(root, "broken", 1, config="nonsense {")
    for _ in range(2):
        await failure(repository.load("bad"))
    await failure(repository.load("broken"))
    for name in ("nope", "nada"):  # a client's mistake is no failure of a model
        await failure(repository.load(name))
    assert repository.num_failed_loads == {"bad": 2, "broken": 1}


async def test_a_configuration_of_the_chosen_name_stands_for_config_pbtxt(bench: Bench, root: Path) -> None:
    named, plain = (write_model(root, name, 1) for name in ("named", "plain"))
    (named / "configs").mkdir()
    own = (named / "config.pbtxt").read_text() + 'parameters { key: "of" value: { string_value: "h100" } }'
    (named / "configs" / "h100.pbtxt").write_text(own)
    for name, expected in (("h100", ["of"]), ("v100", []), ("", [])):
        repository = bench.repository(ControlMode.NONE, settings=RepositorySettings(config_name=name))
        assert await repository.start() == {}
        assert list(repository.find("named").config.parameters) == expected
        assert list(repository.find(plain.name).config.parameters) == []
        await repository.close()


async def test_an_error_in_a_named_configuration_names_its_file(bench: Bench, root: Path) -> None:
    folder = write_model(root, "named", 1)
    (folder / "configs").mkdir()
    (folder / "configs" / "h100.pbtxt").write_text("max_batch_size: many")
    repository = bench.repository(ControlMode.NONE, settings=RepositorySettings(config_name="h100"))
    assert "h100.pbtxt" in (await repository.start())["named"].message
    await repository.close()


CHAIN = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        name, number = args["model_name"].split("_")
        if int(number):
            pb_utils.load_model(f"{name}_{int(number) - 1}")

    def execute(self, requests): ...
"""
CHAIN_CONFIG = """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


@pytest.mark.slow
async def test_a_chain_of_models_that_load_each_other_loads_with_one_slot(root: Path) -> None:
    for number in range(3):
        (write_model(root, f"chain_{number}", 1, config=CHAIN_CONFIG) / "1" / "model.py").write_text(CHAIN)
    repository = ModelRepository(
        [root],
        ControlMode.EXPLICIT,
        lambda models: BackendContext(models, control=models),
        settings=RepositorySettings(num_parallel_loads=1),
    )
    assert await repository.start(["chain_2"]) == {}
    assert [model.name for model in repository.models()] == ["chain_0", "chain_1", "chain_2"]
    await repository.close()

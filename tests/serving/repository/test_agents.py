"""Repository agents: files are checked before anything of them is loaded."""

import hashlib
from pathlib import Path

import pytest

from sluice.errors import ErrorCode
from sluice.serving.backend import LoadOverrides
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from tests.serving.repository.parts import CONFIG, Bench, ask, failure, rows, write_model


def checksums(*sums: tuple[str, str], agent: str = "checksum") -> str:
    parameters = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in sums)
    return f'{CONFIG} model_repository_agents {{ agents [ {{ name: "{agent}" {parameters} }} ] }}'


def digest(algorithm: str, content: str) -> str:
    return hashlib.new(algorithm, content.encode()).hexdigest()


@pytest.mark.parametrize("algorithm", ["MD5", "md5", "SHA1", "SHA256"])
async def test_files_that_are_what_they_should_be(repository: ModelRepository, root: Path, algorithm: str) -> None:
    config = checksums((f"{algorithm}:1/stamp.txt", digest(algorithm, "7").upper()))
    write_model(root, "a", 7, config=config)
    await repository.load("a")
    assert await ask(repository, "a") == 7


async def test_a_file_that_is_not(bench: Bench, repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 7, config=checksums(("MD5:1/stamp.txt", digest("md5", "6"))))
    error = await failure(repository.load("a"))
    said = f"Mismatched MD5 hash for file 1/stamp.txt, expect: {digest('md5', '6')}, got: {digest('md5', '7')}"
    assert said in error.message
    assert rows(repository)["a", 1] == (ModelState.UNAVAILABLE, f"Invalid argument: {said}")
    assert bench.stamp.loads == []
    (root / "a" / "1" / "stamp.txt").write_text("6")
    await repository.load("a")
    assert await ask(repository, "a") == 6


async def test_a_changed_file_leaves_what_serves(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 7, config=checksums(("MD5:1/stamp.txt", digest("md5", "7"))))
    await repository.load("a")
    (root / "a" / "1" / "stamp.txt").write_text("8")
    assert "Mismatched MD5" in (await failure(repository.load("a"))).message
    assert await ask(repository, "a") == 7


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("1/stamp.txt", "failed to parse key: 1/stamp.txt"),
        ("CRC32:1/stamp.txt", "Unsupported checksum algorithm: CRC32; supported are MD5, SHA1, SHA256"),
        ("MD5:1/none.txt", "failed to open text file for read 1/none.txt: No such file or directory"),
        ("MD5:../b/secret.txt", "'../b/secret.txt' is not a path inside a model's folder"),
    ],
)
async def test_keys_that_say_nothing(repository: ModelRepository, root: Path, key: str, said: str) -> None:
    write_model(root, "a", 7, config=checksums((key, "0")))
    assert said in (await failure(repository.load("a"))).message


async def test_an_agent_that_there_is_not(repository: ModelRepository, root: Path) -> None:
    write_model(root, "a", 7, config=checksums(agent="decrypt"))
    error = await failure(repository.load("a"))
    assert "unable to find repository agent 'decrypt' of model 'a'; there is 'checksum'" in error.message
    assert rows(repository)["a", 1][1].startswith("Unsupported: ")


async def test_files_that_come_with_a_request(repository: ModelRepository) -> None:
    config = (
        '{"backend": "stamp", "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]}],'
        ' "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}], "model_repository_agents":'
        ' {"agents": [{"name": "checksum", "parameters": {"MD5:1/stamp.txt": "%s"}}]}}'
    )
    for content, wanted in (("7", "8"), ("7", "7")):
        overrides = LoadOverrides(config % digest("md5", wanted), (("1/stamp.txt", content.encode()),))
        if content == wanted:
            await repository.load("a", overrides)
        else:
            error = await failure(repository.load("a", overrides))
            assert error.code is ErrorCode.INTERNAL
            assert "Mismatched MD5" in error.message
    assert await ask(repository, "a") == 7

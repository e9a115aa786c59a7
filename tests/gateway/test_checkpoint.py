from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.checkpoint import find_checkpoint, model_name
from gateway.options.option import ConfigError
from tests.stand_ins.model_folders import make_compiled_engine, make_converted_checkpoint
from tests.stand_ins.paths import STAND_INS


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_checkpoint_is_found_and_named_after_its_folder(tmp_path: Path) -> None:
    folder = make(tmp_path / "Qwen3-0.6B")
    assert find_checkpoint(str(folder)) == folder
    assert model_name(folder) == "Qwen3-0.6B"


def test_a_model_folder_means_its_highest_version(tmp_path: Path) -> None:
    for version in ("2", "10", "9"):
        make(tmp_path / "rill" / version)
    (tmp_path / "rill" / "11").mkdir()  # still being copied, say
    found = find_checkpoint(str(tmp_path / "rill"))
    assert found == tmp_path / "rill" / "10"
    assert model_name(found) == "rill"


@pytest.mark.parametrize(
    ("path", "said"),
    [("missing", "which is no folder"), ("empty", "which has no config.json, so it is no HuggingFace checkpoint")],
)
def test_says_why_there_is_no_checkpoint(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=said):
        find_checkpoint(str(tmp_path / path))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (make_compiled_engine, "a compiled engine of"),
        (make_converted_checkpoint, "a checkpoint converted for"),
    ],
)
def test_what_only_tensorrt_llm_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], Path], what: str
) -> None:
    folder = make(tmp_path / "made")
    with pytest.raises(ConfigError, match=f"installed here, got '{folder}', {what} TensorRT-LLM: install it"):
        find_checkpoint(str(folder))
    monkeypatch.syspath_prepend(str(STAND_INS))
    assert find_checkpoint(str(folder)) == folder


def test_an_engine_without_its_config(tmp_path: Path) -> None:
    (tmp_path / "rank0.engine").touch()
    with pytest.raises(ConfigError, match=r"has compiled engines, but not the config\.json"):
        find_checkpoint(str(tmp_path))

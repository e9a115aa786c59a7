import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.gateway.checkpoint import find_checkpoint, is_hub_id, model_name
from sluice.gateway.options.option import OptionError
from tests.gateway.fake_hub import COMMIT, fake_hub
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


def test_the_bundled_model_has_a_name() -> None:
    assert find_checkpoint("rill") == find_checkpoint(None)


@pytest.mark.parametrize(
    ("path", "said"),
    [("missing", "which is no folder"), ("empty", "which has no config.json, so it is no HuggingFace checkpoint")],
)
def test_says_why_there_is_no_checkpoint(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=said):
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
    with pytest.raises(OptionError, match=f"installed here, got '{folder}', {what} TensorRT-LLM: install it"):
        find_checkpoint(str(folder))
    assert find_checkpoint(str(folder), has_engine=False) == folder, "engines elsewhere may have it"
    monkeypatch.syspath_prepend(str(STAND_INS))
    assert find_checkpoint(str(folder)) == folder


def test_an_engine_without_its_config(tmp_path: Path) -> None:
    (tmp_path / "rank0.engine").touch()
    with pytest.raises(OptionError, match=r"has compiled engines, but not the config\.json"):
        find_checkpoint(str(tmp_path))


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# Tiny",
    "pytorch_model.bin": b"the same weights",
    "consolidated.safetensors": b"the same weights",
    "original/params.json": b"{}",
}
SCRIPT = """
import json, sys
from sluice.gateway.checkpoint import find_checkpoint
from sluice.gateway.options.option import OptionError
said = []
for name in sys.argv[1:]:
    try:
        said.append(str(find_checkpoint(name.strip("~"), has_engine="~" not in name)))
    except OptionError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def find(home: Path, endpoint: str, *names: str) -> list[str]:
    """Return the result of `find_checkpoint` for each name, from a process of its own with this environment."""
    environment = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, check=True, env=environment
    )
    said: list[str] = json.loads(done.stdout)
    return said


def test_a_name_is_fetched_once_and_then_found_offline(tmp_path: Path) -> None:
    with fake_hub({"acme/tiny": FILES}) as hub:
        (first,) = find(tmp_path, hub.url, "acme/tiny")
    folder = Path(first)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(hub.fetched) == sorted(path.name for path in folder.iterdir())
    assert (folder.name, model_name(folder)) == (COMMIT, "tiny")

    nobody = "http://127.0.0.1:1"
    again, other = find(tmp_path, nobody, "acme/tiny", "acme/other")
    assert again == first
    assert "the hub cannot be reached, and the local cache does not hold all of it" in other


def test_a_gateway_of_engines_elsewhere_needs_no_weights(tmp_path: Path) -> None:
    with fake_hub({"acme/tiny": FILES}) as hub:
        (first,) = find(tmp_path, hub.url, "~acme/tiny")
        assert sorted(hub.fetched) == ["chat_template.jinja", "config.json", "tokenizer.json"]
        (again,) = find(tmp_path, hub.url, "acme/tiny")
    assert first == again
    assert (Path(again) / "model.safetensors").read_bytes() == b"weights"


def test_what_the_hub_refuses_is_explained(tmp_path: Path) -> None:
    names = ("acme/tiny@v1", "acme/tiny@v2", "acme/none", "acme/gated")
    with fake_hub({"acme/tiny": FILES, "acme/gated": FILES}, gated="acme/gated") as hub:
        found, no_revision, no_model, gated = find(tmp_path, hub.url, *names)
    assert Path(found, "config.json").is_file()
    assert no_revision.startswith("MODEL 'acme/tiny@v2' is no folder here, and cannot be had from the hub: it has no")
    assert "there is no such model, or it is private and HF_TOKEN is not set" in no_model
    assert "accept its licence on its page, and set HF_TOKEN" in gated


NAMES = ("Qwen/Qwen3-0.6B", "a/b@main", "acme/tiny@refs/pr/1")
OTHERS = ("./my/model", "/models/x", "gpt2", "a/b/c", "../a", "a/b@", "a b/c", "~/model")


@pytest.mark.parametrize("text", [*NAMES, *OTHERS])
def test_what_is_a_name_of_the_hub(text: str) -> None:
    assert is_hub_id(text) is (text in NAMES)


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    (tmp_path / "acme" / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("acme/tiny") == Path("acme/tiny")

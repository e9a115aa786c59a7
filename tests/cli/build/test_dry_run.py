"""`--dry-run` prints a shell script that makes what the build makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.build.parts import Build, tree


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--link", "--layout", "prefixed"),
        ("--runtime", "tensorrt_llm", "--name", "a"),
        ("--quantization", "int8"),
    ],
)
def test_the_script_makes_the_same(
    build: Build, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "with 'a space").mkdir()
    by_script, by_build = tmp_path / "with 'a space" / "models", tmp_path / "models"
    done = build(tiny, "--output", by_script, "--dry-run", *arguments)
    assert not by_script.exists()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # sluice is there
    subprocess.run(["sh"], input=done.out, text=True, check=True)
    build(tiny, "--output", by_build, *arguments)
    built = tree(by_build)
    name = next(path for path in built if path.endswith("sluice-build.json"))
    del built[name]  # times and versions are what a script does not know
    assert tree(by_script) == built


def test_every_step_says_what_it_is_for(build: Build, tiny: Path, tmp_path: Path) -> None:
    lines = build(tiny, "--quantization", "int8", "--dry-run").out.splitlines()
    steps = [line for line in lines if line.startswith("# ") and line[2].isdigit()]
    assert steps[0] == "# 1/9: compress the weights to int8"
    assert steps[-1] == "# 9/9: join the stages"
    assert lines[-1] == f"# sluice serve --model-repository {tmp_path / 'models'}"


def test_a_model_of_the_hub_is_not_downloaded(build: Build, tmp_path: Path) -> None:
    output = tmp_path / "models"
    done = build("acme/llama@v2", "--output", output, "--dry-run", "--layout", "single")
    assert (
        f"""# 1/3: download the checkpoint
hf download acme/llama \\
  --revision v2 \\
  --local-dir {output}.work/huggingface
"""
        in done.out
    )
    assert f"{output}.work/huggingface/*.safetensors" in done.out
    assert f"rm -r {output}.work" in done.out
    assert 'name: "llama"' in done.out

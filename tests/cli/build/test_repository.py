"""The repository that `sluice build` writes, and what it refuses to build."""

import hashlib
import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.bundled import models_folder
from sluice.cli.build import steps
from sluice.cli.build.options import BuildError
from sluice.cli.build.output import publish
from sluice.cli.build.steps import CompressStep
from sluice.cli.repository.command import command as repository_command
from sluice.engine.config import EngineConfig
from sluice.engine.runners.openvino import convert as conversion
from sluice.engine.runners.openvino import source
from sluice.engine.runners.openvino.runner import load_runner
from sluice.engine.runners.openvino.source import FolderKind, open_weights
from sluice.errors import SluiceError
from tests.cli.build.parts import Build, names, tree
from tests.engine.runners.drive import prefill
from tests.engine.runners.family_goldens import read_family
from tests.gateway.fake_hub import COMMIT, fake_hub
from tests.goldens.checkpoints import write_checkpoint
from tests.paths import DATA

MODELS = {"tiny", "preprocessing", "postprocessing", "ensemble"}


def manifest(repository: Path, model: str = "tiny") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((repository / model / "sluice-build.json").read_text())
    return content


def test_the_checkpoint_the_stages_and_what_was_built(build: Build, tiny: Path, tmp_path: Path) -> None:
    done = build(tiny)
    assert names(tmp_path / "models") == MODELS
    assert tree(tmp_path / "models" / "tiny" / "1") == tree(tiny)
    for stage in ("preprocessing", "postprocessing"):
        assert (tmp_path / "models" / stage / "1" / "tokenizer.json").read_bytes() == (
            tiny / "tokenizer.json"
        ).read_bytes()
        assert not (tmp_path / "models" / stage / "1" / "model.safetensors").exists()
    assert f"sluice serve --model-repository {tmp_path / 'models'}" in done.out
    assert all(model in done.out for model in MODELS)


def test_every_configuration_would_load(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--max-num-seqs", "8", "--max-model-len", "512")
    assert repository_command(["check", "--strict", str(tmp_path / "models")]) == 0


def test_the_manifest(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--quantization", "int8", "--dtype", "float")
    content = manifest(tmp_path / "models")
    tokenizer = hashlib.sha256((tiny / "tokenizer.json").read_bytes()).hexdigest()
    assert content["sluice_version"] == version("sluice")
    assert (content["runtime"], content["runtime_version"]) == ("openvino", version("openvino"))
    assert (content["quantization"], content["dtype"], content["model_format"]) == ("int8", "float32", "huggingface")
    assert content["source"]["checkpoint"] == str(tiny)
    assert (content["tokenizer_file"], content["tokenizer_sha256"]) == ("tokenizer.json", tokenizer)
    assert content["compute_capability"] is None
    assert set(content["models"]) == MODELS


@pytest.mark.parametrize("arguments", [("--quantization", "int8"), ("--dry-run",)])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_hidden_layers": 1}, "but the checkpoint has tensors of 2 layers, and 9 tensors (model.layers.1."),
        ({"intermediate_size": 100}, "by config.json it must be (100, "),
    ],
)
def test_a_checkpoint_that_serve_would_refuse_is_not_built(
    build: Build, tiny: Path, tmp_path: Path, arguments: tuple[str, ...], fields: dict[str, Any], expected: str
) -> None:
    source = shutil.copytree(tiny, tmp_path / "tiny")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))
    build(source, *arguments, code=2, error=expected)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_take_the_place_of_the_checkpoints(build: Build, tmp_path: Path, quantization: str) -> None:
    """The files are the same that the engine makes of the checkpoint."""
    rill, output = models_folder() / "rill" / "1", tmp_path / "models"
    build(rill, "--output", output, "--quantization", quantization, "--layout", "single")
    built = output / "rill" / "1"
    files = {file.name: file.stat().st_size for file in built.glob("*.safetensors")}
    assert files.keys() == {f"model-{quantization}.safetensors", "model-others.safetensors"}
    assert sum(files.values()) < 0.6 * (rill / "model.safetensors").stat().st_size
    by_engine, by_build = (open_weights(each, quantization, tmp_path / "other") for each in (rill, built))
    assert by_build.quantization == quantization
    assert list((tmp_path / "other").rglob("*.safetensors"))
    for name, stored in by_engine.tensors.items():
        assert by_engine.constant(name, stored.shape).shape == by_build.constant(name, stored.shape).shape
    assert (tmp_path / "other" / "compressed").joinpath(
        next((tmp_path / "other" / "compressed").iterdir())
    ).read_bytes() == (built / f"model-{quantization}.safetensors").read_bytes()


def test_compressed_weights_are_not_compressed_otherwise(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--quantization", "int8")
    built = tmp_path / "models" / "tiny" / "1"
    with pytest.raises(SluiceError, match="are stored in int8; build it again from the checkpoint"):
        open_weights(built, "int4", tmp_path / "cache")
    more = ("--output", tmp_path / "more", "--name", "b")
    build(built, *more, "--quantization", "int8", code=2, error="are compressed already")
    build(built, *more)


def test_an_ir_stays_as_it_is(build: Build, tmp_path: Path) -> None:
    source = shutil.copytree(DATA / "checkpoints" / "gpt2_ir", tmp_path / "gpt2")
    shutil.copy(DATA / "tokenizers" / "rill" / "tokenizer.json", source)
    build(source, "--layout", "single")
    assert tree(tmp_path / "models" / "gpt2" / "1") == tree(source)
    as_they_are = "is an IR, whose weights are stored as they are"
    build(source, "--output", tmp_path / "more", "--quantization", "int8", code=2, error=as_they_are)


def test_what_has_no_graph_here_is_converted(
    build: Build, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """optimum-intel is replaced by a finished conversion; the tests of the engine run the real one."""
    converted, calls = DATA / "checkpoints" / "gpt2_ir", []

    def convert(folder: Path, quantization: str, cache: Path) -> Path:
        calls.append((folder, quantization, cache))
        return converted

    monkeypatch.setattr(source, "identify_folder", lambda folder: (FolderKind.CONVERTIBLE, "it is odd"))
    monkeypatch.setattr(conversion, "convert", convert)
    dry = build(tiny, "--quantization", "int4", "--dry-run").out
    assert f"optimum-cli export openvino \\\n  --model {tiny}" in dry
    assert "--weight-format int4 \\\n  --group-size-fallback adjust" in dry
    build(tiny, "--quantization", "int4", "--layout", "single")
    assert calls == [(tiny, "int4", tmp_path / "cache" / "converted")]
    version = tmp_path / "models" / "tiny" / "1"
    assert {"openvino_model.xml", "openvino_model.bin", "tokenizer.json"} <= names(version)
    assert not (version / "model.safetensors").exists()
    assert "quantization" not in (tmp_path / "models" / "tiny" / "config.pbtxt").read_text()
    assert manifest(tmp_path / "models")["model_format"] == "openvino_ir"


def test_a_model_of_the_hub(tiny: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    with fake_hub({"acme/small": files}) as hub:
        environment = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
        arguments = ["build", "acme/small", "--output", str(tmp_path / "models"), "--layout", "single"]
        subprocess.run(
            [sys.executable, "-m", "sluice.cli", *arguments], env=environment, check=True, capture_output=True
        )
    assert tree(tmp_path / "models" / "small" / "1") == tree(tiny)
    source = manifest(tmp_path / "models", "small")["source"]
    assert (source["checkpoint"], source["revision"]) == ("acme/small", COMMIT)


def test_several_models_in_one_repository(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--layout", "single")
    before = tree(tmp_path / "models")
    build(tiny, "--name", "second", "--layout", "prefixed")
    stages = {"second", "second_preprocessing", "second_postprocessing", "second_ensemble"}
    assert names(tmp_path / "models") == {"tiny", *stages}
    assert before.items() <= tree(tmp_path / "models").items()
    assert repository_command(["check", "--strict", str(tmp_path / "models")]) == 0


def test_links_in_the_place_of_copies(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--link")
    weights = tmp_path / "models" / "tiny" / "1" / "model.safetensors"
    assert weights.is_symlink()
    assert weights.resolve() == (tiny / "model.safetensors").resolve()


def test_what_is_there_is_replaced_only_by_force(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--layout", "single")
    (tmp_path / "models" / "other").mkdir()
    before = tree(tmp_path / "models")
    build(tiny, code=2, error="has tiny already; replace with --force")
    assert tree(tmp_path / "models") == before
    build(tiny, "--force", "--max-model-len", "64")
    assert names(tmp_path / "models") == {*MODELS, "other"}
    assert "max_model_len" in (tmp_path / "models" / "tiny" / "config.pbtxt").read_text()


def test_a_failure_leaves_nothing(build: Build, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(steps, "_copy", fail)
    (tmp_path / "models").mkdir()
    build(tiny, code=1, error="No space left on device")
    assert names(tmp_path / "models") == set()
    build(tiny, "--output", tmp_path / "new", code=1)
    assert not (tmp_path / "new").exists()
    assert not [name for name in names(tmp_path) if name.startswith(".sluice")]


@pytest.mark.parametrize(("error", "raised"), [(OSError("no"), BuildError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_move_that_fails_brings_back_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    for name in ("a", "b"):
        (tmp_path / "built" / name).mkdir(parents=True)
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "before").touch()
    rename = Path.rename

    def fail_at_b(before: Path, after: Path) -> Path:
        if isinstance(error, OSError) and before == tmp_path / "built" / "b":
            raise error
        moved = rename(before, after)
        if before == tmp_path / "models" / "b" and not isinstance(error, OSError):
            raise error
        return moved

    monkeypatch.setattr(Path, "rename", fail_at_b)
    with pytest.raises(raised, match="cannot move b" if raised is BuildError else None):
        publish(tmp_path / "built", tmp_path / "models", ["a", "b"], tmp_path / "aside")
    assert [names(tmp_path / "models" / name) for name in ("a", "b")] == [{"before"}, {"before"}]


def test_too_little_space_is_seen_before(
    build: Build, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    done = build(tiny, code=2, error="not enough space: the build needs about")
    assert "1000 B are free" in done.err
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--quantization", "fp8", "--runtime", "openvino"],
            "--quantization must be one of none, int8, int4 for openvino",
        ),
        (["--quantization", "int9"], "--quantization must be one of none, int8, int4 for openvino, got 'int9'"),
        (["--dtype", "float16", "--runtime", "openvino"], "--dtype must be auto, bfloat16 or float32"),
        (["--dtype", "int3"], "--dtype: must be one of auto, "),
        (["--kv-cache-dtype", "fp8", "--runtime", "openvino"], "--kv-cache-dtype must be one of auto, bf16, f32, u8"),
        (["--runtime", "openvino", "--compile"], "--compile makes TensorRT engines"),
        (["--runtime", "openvino", "--tensor-parallel-size", "2"], "--tensor-parallel-size and"),
        (["--runtime", "openvino", "--max-beam-width", "2"], "--max-beam-width must be 1 for openvino"),
        (["--runtime", "vllm"], "--runtime must be auto, openvino or tensorrt_llm for a build, got vllm"),
        (["--max-num-seqs", "0"], "--max-num-seqs: must be a whole number from 1 to 4096, got '0'"),
        (["--name", "../up"], "--name must be letters"),
        (["--name", "ensemble"], "--name ensemble is a stage's name too"),
        (["--quantisation", "int8"], "unknown option --quantisation; did you mean --quantization?"),
    ],
)
def test_what_cannot_be_asked(build: Build, tiny: Path, tmp_path: Path, arguments: list[str], error: str) -> None:
    build(tiny, *arguments, code=2, error=error)
    assert not (tmp_path / "models").exists()


def test_what_cannot_be_built_from(build: Build, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    odd, light = (shutil.copytree(tiny, tmp_path / name) for name in ("odd", "light"))
    (odd / "config.json").write_text('{"model_type": "odd"}')
    (light / "model.safetensors").unlink()
    for folder, error in (
        (tmp_path / "none", "which is no folder"),
        (tmp_path / "empty", "which has no config.json"),
        (DATA / "checkpoints" / "llama_tiny", "has no tokenizer"),
        (odd, "OpenVINO cannot run"),
        (light, "holds no *.safetensors file"),
    ):
        build(folder, "--runtime", "openvino", code=2, error=error)
        assert not (tmp_path / "models").exists()
    build(tiny, "--layout", "single")
    build(tiny, "--output", tmp_path / "models" / "tiny", "--name", "more", code=2, error="is a model's folder")


def test_weights_in_several_files(build: Build, tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "sharded")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "consolidated.safetensors").write_text("the same in another layout")
    build(folder, "--layout", "single")
    copied = names(tmp_path / "models" / "sharded" / "1")
    assert copied == names(folder) - {"consolidated.safetensors"}


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "mixtral"])
def test_experts_and_transposed_matrices_are_built_as_the_engine_makes_them(name: str, tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    write_checkpoint(read_family(name).blueprint, source)
    CompressStep("", source, built, "int8").run(lambda _: None)
    shutil.copy(source / "config.json", built)
    runners = [
        load_runner(
            EngineConfig(
                model_path=str(folder),
                dtype="f32",
                quantization="int8",
                cache_path=str(tmp_path / "cache"),
                num_blocks=9,
            )
        )
        for folder in (source, built)
    ]
    prompt = list(range(10, 50))
    by_engine, by_build = (prefill(runner, prompt, sampled_rows=[20, 39]) for runner in runners)
    np.testing.assert_array_equal(by_engine, by_build)

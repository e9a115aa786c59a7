"""Builds from NeMo checkpoints: archives of the first generation, folders of the second."""

import io
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from sluice.cli.build.source import read_nemo
from tests.cli.build.fake_tools import NEMO, NEMO_HANGS, write_program
from tests.cli.build.parts import Build, names, tree
from tests.waiting import PATIENCE_S, wait_until

FIRST = {
    "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
    "num_layers": 32,
    "tokenizer": {"library": "sentencepiece", "model": "nemo:abc_tokenizer.model"},
}
SECOND = """\
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config:
  _target_: nemo.collections.llm.gpt.model.llama.Llama3Config8B
  num_layers: 16
  dtype: !!python/name:torch.bfloat16
"""


def write_archive(path: Path, config: object = FIRST, inside: str = "./model_config.yaml") -> Path:
    text = yaml.safe_dump(config).encode()
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(inside)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return path


def write_folder(path: Path) -> Path:
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "__0_0.distcp").write_bytes(b"weights")
    (path / "context").mkdir()
    (path / "context" / "model.yaml").write_text(SECOND)
    return path


def test_what_a_checkpoint_tells(tmp_path: Path) -> None:
    archive = read_nemo(write_archive(tmp_path / "llama3.nemo"))
    assert archive is not None
    assert (archive.generation, archive.model_class, archive.num_layers) == (1, "MegatronGPTModel", 32)
    assert archive.description == "NeMo 1 checkpoint (MegatronGPTModel, 32 layers)"
    folder = read_nemo(write_folder(tmp_path / "second"))
    assert folder is not None
    assert (folder.generation, folder.model_class, folder.num_layers) == (2, "LlamaModel", 16)


def test_the_commands_for_an_archive(build: Build, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "llama3.nemo")
    output = tmp_path / "models"
    model = ("--nemo-model-id", "meta-llama/Meta-Llama-3-8B")
    done = build(archive, "--output", output, "--dry-run", "--layout", "single", *model)
    assert (
        f"""# 1/4: turn the .nemo archive into a NeMo 2 checkpoint
python3 /opt/NeMo/scripts/checkpoint_converters/convert_nemo1_to_nemo2.py \\
  --input_path={archive} \\
  --output_path={output}.work/nemo2 \\
  --model_id=meta-llama/Meta-Llama-3-8B

# 2/4: export the NeMo checkpoint to HuggingFace's format
nemo llm export -y path={output}.work/nemo2 output_path={output}.work/huggingface target=hf
"""
        in done.out
    )
    assert f"{output}.work/huggingface/*.safetensors" in done.out
    assert "nvcr.io/nvidia/nemo" in done.out
    assert 'name: "llama3"' in done.out


def test_engines_of_an_archive(build: Build, tmp_path: Path) -> None:
    """The model type is not known before the export, so quantize.py must convert: it reads the type itself."""
    config = {**FIRST, "tokenizer": {"library": "huggingface", "type": "meta-llama/Meta-Llama-3-8B"}}
    archive = write_archive(tmp_path / "llama3.nemo", config)
    done = build(archive, "--dry-run", "--compile", "--tensorrt-llm-version", "1.2.1")
    assert "--model_id=meta-llama/Meta-Llama-3-8B" in done.out
    assert f"quantize.py \\\n  --model_dir {tmp_path}/models.work/huggingface" in done.out


@pytest.mark.slow
def test_a_folder_is_exported_and_built(
    build: Build, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "bin" / "nemo", NEMO)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("NEMO_EXPORTS", str(tiny))
    build(write_folder(tmp_path / "second"))
    assert tree(tmp_path / "models" / "second" / "1") == tree(tiny)
    assert names(tmp_path) == {"models", "second", "bin"}


def test_without_nemo(build: Build, tmp_path: Path) -> None:
    done = build(write_folder(tmp_path / "second"), code=1)
    assert "nemo is not here, and needed to export the NeMo checkpoint" in done.err
    assert "nvcr.io/nvidia/nemo" in done.err
    assert f"output_path={tmp_path}/models.work/huggingface target=hf" in done.err


def test_what_an_archive_says_is_no_command(build: Build, tmp_path: Path) -> None:
    """Text from the archive stands in comments of the script that a shell runs."""
    config = {**FIRST, "target": "nemo.Model\ntouch stolen #", "tokenizer": "none"}
    archive = write_archive(tmp_path / "llama3.nemo", config)
    done = build(archive, "--dry-run", "--nemo-model-id", "meta-llama/Meta-Llama-3-8B")
    assert "Model touch stolen #" in done.out
    assert not any(line.startswith("touch") for line in done.out.splitlines())


def test_what_cannot_be_read_or_placed_is_refused(build: Build, tmp_path: Path) -> None:
    (tmp_path / "text.nemo").write_bytes(b"no archive")
    (tmp_path / "empty.nemo").touch()
    write_archive(tmp_path / "other.nemo", inside="notes.txt")
    write_archive(tmp_path / "llama3.nemo")
    (tmp_path / "llama3").mkdir()
    (tmp_path / "llama3" / "model_config.yaml").write_text("num_layers: 2")
    for name, words in (
        ("text.nemo", "cannot read"),
        ("empty.nemo", "cannot read"),
        ("other.nemo", "has no model_config.yaml"),
        ("llama3.nemo", "--nemo-model-id"),
        ("llama3", f"tar -cf llama3.nemo -C {tmp_path / 'llama3'} ."),
    ):
        build(tmp_path / name, "--dry-run", code=2, error=words)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    write_program(tmp_path / "bin" / "nemo", NEMO_HANGS)
    began, folder = tmp_path / "began", write_folder(tmp_path / "second")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("NEMO_BEGAN", str(began))
    arguments = [sys.executable, "-m", "sluice.cli", "build", str(folder), "--output", str(tmp_path / "models")]
    before = signal.signal(number, signal.SIG_DFL)  # under nohup the tests ignore SIGHUP, and so would the build
    try:
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    finally:
        signal.signal(number, before)
    with process:
        try:
            wait_until(lambda: began.exists() or process.poll() is not None)
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 128 + number
        finally:
            process.kill()
    assert names(tmp_path) == {"bin", "began", "second"}

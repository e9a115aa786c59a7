"""The steps of a build. Each can be run, and can be written as shell commands that do the same."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import TensorSpec, serialize_file

from sluice.cli.build.options import BuildError
from sluice.cli.checkpoint_files import (
    TOKENIZER_AND_CONFIG_PATTERNS,
    model_files,
    model_patterns,
    size_of,
    tokenizer_files,
)
from sluice.engine.config import EngineConfig
from sluice.engine.model_folder import ModelFormat
from sluice.engine.models.weights.assembled import stored_tensors
from sluice.engine.models.weights.files import compressed_file, weight_files
from sluice.engine.models.weights.mapped import StoredTensor

Advance = Callable[[int], None]
"""Receives the number of bytes that were written since the last call, for a progress bar."""

PYTHON = "python3"
UNCOMPRESSED_FILE = "model-others.safetensors"
"""File of the tensors that stay uncompressed: norms and biases."""
_CHUNK_BYTES = 8 << 20
_READABLE = 0o644
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class BuildStep(ABC):
    """A step of a build. `purpose` is a verb phrase that can follow 'to'."""

    purpose: str

    @abstractmethod
    def script(self) -> str:
        """Return shell commands that do the same as `run`."""

    def size_bytes(self) -> int:
        """Estimate the bytes that the step writes; 0 for few, or an unknown number."""
        return 0

    @abstractmethod
    def run(self, advance: Advance) -> None:
        """Run the step. Raises BuildError, SluiceError or OSError."""


@dataclass(frozen=True, slots=True)
class ToolStep(BuildStep):
    """Runs another program. `requires` is the program or the script that must exist for it."""

    argv: tuple[str, ...]
    requires: str
    install_command: str
    """Command that installs `requires`."""
    output_bytes: int = 0
    needs_gpu: bool = True

    def script(self) -> str:
        return shell_command(self.argv)

    def size_bytes(self) -> int:
        return self.output_bytes

    @property
    def is_available(self) -> bool:
        return Path(self.requires).is_file() or shutil.which(self.requires) is not None

    def run(self, advance: Advance) -> None:
        """Run the program. Its output goes to standard error."""
        argv = (sys.executable, *self.argv[1:]) if self.argv[0] == PYTHON else self.argv
        code = subprocess.run(argv, stdout=sys.stderr, check=False).returncode
        if code:
            raise BuildError(f"the step to {self.purpose} ended with exit code {code}: {shlex.join(self.argv)}")


@dataclass(frozen=True, slots=True)
class CopyStep(BuildStep):
    """Copies or links a checkpoint's files into a folder: all that serving needs, or those of the tokenizer."""

    source: Path
    target: Path
    format: ModelFormat | None
    """Format of the model; None to copy the tokenizer alone."""
    is_linked: bool = False

    def files(self) -> list[Path]:
        return tokenizer_files(self.source) if self.format is None else model_files(self.source, self.format)

    def script(self) -> str:
        command = "ln -s" if self.is_linked else "cp -L"
        return (
            f'mkdir -p {shell_quote(self.target)}\n{self._loop()} {command} "$file" {shell_quote(self.target)}/; done'
        )

    def _loop(self) -> str:
        """Return the head of a shell loop over the files, or over their patterns where an earlier step makes them."""
        if self.source.is_dir():
            names = " ".join(shell_quote(file.absolute() if self.is_linked else file) for file in self.files())
            return f"for file in {names}; do"
        patterns = TOKENIZER_AND_CONFIG_PATTERNS if self.format is None else model_patterns(self.format)
        names = " ".join(f"{shell_quote(self.source)}/{pattern}" for pattern in patterns)
        return f'for file in {names}; do [ ! -e "$file" ] ||'

    def size_bytes(self) -> int:
        return 0 if self.is_linked or not self.source.is_dir() else size_of(self.files())

    def run(self, advance: Advance) -> None:
        self.target.mkdir(parents=True, exist_ok=True)
        for file in self.files():
            target = self.target / file.name
            if self.is_linked:
                target.symlink_to(file.absolute())
            else:
                _copy(file, target, advance)


@dataclass(frozen=True, slots=True)
class WriteStep(BuildStep):
    """Writes a text file."""

    path: Path
    text: str

    def script(self) -> str:
        return f"mkdir -p {shell_quote(self.path.parent)}\ncat > {shell_quote(self.path)} <<'END'\n{self.text}END"

    def run(self, advance: Advance) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text)


@dataclass(frozen=True, slots=True)
class ConvertStep(BuildStep):
    """Converts a checkpoint by optimum-intel where Sluice has no graph for it. The result stays in the cache too."""

    source: Path
    target: Path
    quantization: str
    weight_format: str
    """Format for optimum-intel, which compresses large models where none is given."""
    cache_path: str | None

    def script(self) -> str:
        argv = ["optimum-cli", "export", "openvino", "--model", str(self.source)]
        argv += ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
        argv += ["--weight-format", self.weight_format]
        argv += ["--group-size-fallback", "adjust"] if self.quantization == "int4" else []
        return f"mkdir -p {shell_quote(self.target)}\n{shell_command([*argv, str(self.target)])}"

    def size_bytes(self) -> int:
        return 2 * size_of(model_files(self.source, ModelFormat.HUGGINGFACE))

    def run(self, advance: Advance) -> None:
        from sluice.engine.runners.openvino.convert import convert
        from sluice.engine.runners.openvino.source import (
            cache_folder,  # imports OpenVINO, which other builds do without
        )

        config = EngineConfig(model_path=str(self.source), cache_path=self.cache_path)
        folder = convert(self.source, self.quantization, cache_folder(config) / "converted")
        CopyStep(self.purpose, folder, self.target, ModelFormat.OPENVINO_IR).run(advance)


@dataclass(frozen=True, slots=True)
class CompressStep(BuildStep):
    """Compresses the weights to 8 or 4 bits, and copies the tensors that stay uncompressed."""

    source: Path
    target: Path
    quantization: str

    def script(self) -> str:
        """Return a build of this model alone: no other program has Sluice's compression."""
        folder = f"{self.target}.compressing"
        argv = ["sluice", "build", str(self.source), "--output", folder, "--name", "model", "--layout", "single"]
        argv += ["--runtime", "openvino", "--quantization", self.quantization]
        move = f"mv {shell_quote(folder)}/model/1/*.safetensors {shell_quote(self.target)}/"
        return f"{shell_command(argv)}\nmkdir -p {shell_quote(self.target)}\n{move}\nrm -r {shell_quote(folder)}"

    def size_bytes(self) -> int:
        """Estimate from 16-bit weights; embeddings stay at 8 bits."""
        return size_of(weight_files(self.source)) // 2 if self.source.is_dir() else 0

    def run(self, advance: Advance) -> None:
        from sluice.engine.runners.openvino.weights.checkpoint import CheckpointWeights
        from sluice.engine.runners.openvino.weights.compression import compress

        self.target.mkdir(parents=True, exist_ok=True)
        tensors = CheckpointWeights.open(self.source).tensors
        with tempfile.TemporaryDirectory(dir=self.target) as folder:
            compressed = compress(tensors, weight_files(self.source), self.quantization, Path(folder))
            (file,) = Path(folder).iterdir()
            file.chmod(_READABLE)
            file.rename(self.target / compressed_file(self.quantization))
        others = stored_tensors(stored for name, stored in tensors.items() if name not in compressed)
        names = [name for name in tensors if name not in compressed]
        specs = {name: _tensor_spec(stored) for name, stored in zip(names, others, strict=True)}
        serialize_file(specs, self.target / UNCOMPRESSED_FILE)


def _tensor_spec(stored: StoredTensor) -> TensorSpec:
    """Describe the tensor where it lies in its file's memory map, which must live until it is written."""
    array = stored.array()
    return TensorSpec(
        dtype=_DTYPES[stored.dtype], shape=list(stored.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
    )


def shell_comment(text: str) -> str:
    """Format a comment of one line. Line breaks of a path or a checkpoint's file are removed, as they would end it."""
    return f"# {''.join(each if each.isprintable() else ' ' for each in text)}"


def shell_quote(path: Path | str) -> str:
    return shlex.quote(str(path))


def shell_command(argv: Sequence[str]) -> str:
    """Format a command with one option a line."""
    lines = [[argv[0]]]
    for word in argv[1:]:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(shlex.join(line) for line in lines)


def _copy(source: Path, target: Path, advance: Advance) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while chunk := read.read(_CHUNK_BYTES):
            write.write(chunk)
            advance(len(chunk))
    shutil.copystat(source, target)

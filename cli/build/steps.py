"""The steps of a build. Each can be run, and be said as lines of a shell script that do the same."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import TensorSpec, serialize_file

from engine.config import EngineConfig
from engine.runners.openvino.convert import convert
from engine.runners.openvino.source import cache_folder
from engine.runners.openvino.weights.checkpoint import CheckpointWeights, compressed_file, weight_files
from engine.runners.openvino.weights.compression import compress
from engine.runners.openvino.weights.mapped import StoredTensor
from engine.model_folder import ModelFormat
from cli.build.failures import BuildError
from cli.build.files import TOKENIZER_AND_KIN, model_files, model_patterns, size_of, tokenizer_files

Advance = Callable[[int], None]
"""Told of bytes that were written, for a progress bar."""

PYTHON = "python3"
OTHERS = "model-others.safetensors"
"""What is not compressed: norms, biases."""
_CHUNK_BYTES = 8 << 20
_READABLE = 0o644
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Step(Protocol):
    """One thing to do."""

    @property
    def purpose(self) -> str:
        """For what, in words that follow 'to'."""
        ...

    def script(self) -> str:
        """Shell commands that do the same."""
        ...

    def size_bytes(self) -> int:
        """About how much it writes, 0 where that cannot be told."""
        ...

    def run(self, advance: Advance) -> None:
        """Raises BuildError, SluiceError or OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Tool:
    """A command of another program. `needs` is what must be there: a program or a script."""

    purpose: str
    argv: tuple[str, ...]
    needs: str
    had_by: str
    """Command that brings what it needs."""
    writes_bytes: int = 0
    wants_gpu: bool = True

    def script(self) -> str:
        return wrapped(self.argv)

    def size_bytes(self) -> int:
        return self.writes_bytes

    @property
    def is_there(self) -> bool:
        return Path(self.needs).is_file() or shutil.which(self.needs) is not None

    def run(self, advance: Advance) -> None:
        """Its output goes where ours goes."""
        argv = (sys.executable, *self.argv[1:]) if self.argv[0] == PYTHON else self.argv
        code = subprocess.run(argv, stdout=sys.stderr, check=False).returncode
        if code:
            raise BuildError(f"the step to {self.purpose} ended with exit code {code}: {shlex.join(self.argv)}")


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint's files into a folder: all that serving needs, or the tokenizer's alone."""

    purpose: str
    source: Path
    target: Path
    format: ModelFormat | None
    """Of the model; None for the tokenizer alone."""
    is_linked: bool = False

    def files(self) -> list[Path]:
        return tokenizer_files(self.source) if self.format is None else model_files(self.source, self.format)

    def script(self) -> str:
        command = "ln -s" if self.is_linked else "cp -L"
        return f'mkdir -p {quoted(self.target)}\n{self._loop()} {command} "$file" {quoted(self.target)}/; done'

    def _loop(self) -> str:
        """A folder that is made by an earlier step has no files yet: their patterns."""
        if self.source.is_dir():
            names = " ".join(quoted(file.absolute() if self.is_linked else file) for file in self.files())
            return f"for file in {names}; do"
        patterns = TOKENIZER_AND_KIN if self.format is None else model_patterns(self.format)
        names = " ".join(f"{quoted(self.source)}/{pattern}" for pattern in patterns)
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
class Write:
    """A text file."""

    purpose: str
    path: Path
    text: str

    def script(self) -> str:
        return f"mkdir -p {quoted(self.path.parent)}\ncat > {quoted(self.path)} <<'END'\n{self.text}END"

    def size_bytes(self) -> int:
        return len(self.text)

    def run(self, advance: Advance) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.text)


@dataclass(frozen=True, slots=True)
class Convert:
    """A checkpoint that our graphs do not cover, by optimum-intel; kept in the cache, copied from there."""

    purpose: str
    source: Path
    target: Path
    quantization: str
    weight_format: str
    """Of optimum-intel, which compresses large models where it is not said."""
    cache_path: str | None

    def script(self) -> str:
        argv = ["optimum-cli", "export", "openvino", "--model", str(self.source)]
        argv += ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
        argv += ["--weight-format", self.weight_format]
        argv += ["--group-size-fallback", "adjust"] if self.quantization == "int4" else []
        return f"mkdir -p {quoted(self.target)}\n{wrapped([*argv, str(self.target)])}"

    def size_bytes(self) -> int:
        return 2 * size_of(model_files(self.source, ModelFormat.HUGGINGFACE))

    def run(self, advance: Advance) -> None:
        config = EngineConfig(model_path=str(self.source), cache_path=self.cache_path)
        folder = convert(self.source, self.quantization, cache_folder(config) / "converted")
        Copy(self.purpose, folder, self.target, ModelFormat.OPENVINO_IR).run(advance)


@dataclass(frozen=True, slots=True)
class Compress:
    """The weights in 8 or 4 bits, beside those that stay as they are."""

    purpose: str
    source: Path
    target: Path
    quantization: str

    def script(self) -> str:
        """The compression is Sluice's own, so a build of this model alone does it."""
        aside = f"{self.target}.compressing"
        argv = ["sluice", "build", str(self.source), "--output", aside, "--name", "model", "--layout", "single"]
        argv += ["--runtime", "openvino", "--quantization", self.quantization]
        move = f"mv {quoted(aside)}/model/1/*.safetensors {quoted(self.target)}/"
        return f"{wrapped(argv)}\nmkdir -p {quoted(self.target)}\n{move}\nrm -r {quoted(aside)}"

    def size_bytes(self) -> int:
        """Of 16-bit weights; embeddings stay at 8 bits."""
        return size_of(weight_files(self.source)) // 2 if self.source.is_dir() else 0

    def run(self, advance: Advance) -> None:
        self.target.mkdir(parents=True, exist_ok=True)
        tensors = CheckpointWeights.open(self.source).tensors
        with tempfile.TemporaryDirectory(dir=self.target) as folder:
            made = compress(tensors, weight_files(self.source), self.quantization, Path(folder))
            (file,) = Path(folder).iterdir()
            file.chmod(_READABLE)
            file.rename(self.target / compressed_file(self.quantization))
        others = {name: stored for name, stored in tensors.items() if name not in made}
        serialize_file({name: _as_it_is(stored) for name, stored in others.items()}, self.target / OTHERS)


def _as_it_is(stored: StoredTensor) -> TensorSpec:
    """Where the tensor lies in its file's map, which must live until it is written."""
    array = stored.array()
    return TensorSpec(
        dtype=_DTYPES[stored.dtype], shape=list(stored.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
    )


def comment(text: str) -> str:
    """One line, whatever a checkpoint's files or a path say: a second one would be a command."""
    return f"# {''.join(each if each.isprintable() else ' ' for each in text)}"


def quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def wrapped(argv: Sequence[str]) -> str:
    """A command with an option a line, to be read and pasted."""
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

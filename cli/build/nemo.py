"""NeMo's checkpoints: what they are, and how NeMo itself makes HuggingFace checkpoints of them."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cli.build.failures import AskedError
from cli.build.steps import PYTHON, Step, Tool

_CONVERTER = "scripts/checkpoint_converters/convert_nemo1_to_nemo2.py"
_IMAGE = 'docker run --rm -it --gpus all --shm-size 16g -v "$PWD:$PWD" -w "$PWD" nvcr.io/nvidia/nemo:25.09 bash'
"""NeMo's packages go together in its images; the tools of this module are in them."""
MODEL_CONFIG = "model_config.yaml"
CONTEXT, WEIGHTS = "context", "weights"


@dataclass(frozen=True, slots=True)
class NemoCheckpoint:
    """A .nemo archive (generation 1), or a folder of NeMo 2."""

    path: Path
    generation: int
    model_class: str
    """As its configuration says; "" where it does not."""
    num_layers: int | None = None
    hub_id: str | None = None
    """Which model of the hub it is of, where its tokenizer tells."""

    @property
    def name(self) -> str:
        return self.path.absolute().name.removesuffix(".nemo")

    @property
    def description(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers else ""
        return f"NeMo {self.generation} checkpoint ({self.model_class or 'of no named class'}{layers})"


class _Loader(yaml.SafeLoader):
    """Takes the plain part of NeMo's files: what only Python objects could say is None."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def read_nemo(path: Path) -> NemoCheckpoint | None:
    """None for what is not NeMo's. Raises AskedError for what is, and cannot be read or used."""
    if path.is_file() and path.suffix == ".nemo":
        return _of_archive(path)
    if not path.is_dir():
        return None
    if (path / CONTEXT).is_dir() and (path / WEIGHTS).is_dir():
        return _of_folder(path)
    if (path / MODEL_CONFIG).is_file():
        raise AskedError(
            f"{path} is an unpacked .nemo archive; pack it again, as NeMo's converter wants it: "
            f"tar -cf {path.name}.nemo -C {path} ."
        )
    return None


def nemo_steps(
    nemo: NemoCheckpoint, work: Path, target: Path, nemo_folder: Path, model_id: str | None
) -> Iterator[Step]:
    """From the checkpoint to a HuggingFace one in `target`. Raises AskedError where it must be said what it is of."""
    folder = nemo.path
    if nemo.generation == 1:
        hub_id = model_id or nemo.hub_id
        if hub_id is None:
            raise AskedError(
                f"{nemo.path} does not say which model it is of; give the one that it was trained from with "
                "--nemo-model-id, such as meta-llama/Meta-Llama-3-8B (NeMo's converter lists those that it knows)"
            )
        script, folder = str(nemo_folder / _CONVERTER), work / "nemo2"
        options = (f"--input_path={nemo.path}", f"--output_path={folder}", f"--model_id={hub_id}")
        yield Tool(
            "turn the .nemo archive into a NeMo 2 checkpoint",
            (PYTHON, script, *options),
            script,
            _IMAGE,
            nemo.path.stat().st_size,
            wants_gpu=False,
        )
    yield Tool(
        "export the NeMo checkpoint to HuggingFace's format",
        ("nemo", "llm", "export", "-y", f"path={folder}", f"output_path={target}", "target=hf"),
        "nemo",
        _IMAGE,
        _size(nemo.path),
        wants_gpu=False,
    )


def _of_archive(path: Path) -> NemoCheckpoint:
    try:
        with tarfile.open(path) as archive:
            member = next((each for each in archive if Path(each.name).name == MODEL_CONFIG), None)
            file = archive.extractfile(member) if member is not None else None
            fields = _fields(file.read()) if file is not None else None
    except (tarfile.TarError, OSError, yaml.YAMLError) as error:
        raise AskedError(f"cannot read {path}: {error}") from None
    if fields is None:
        raise AskedError(f"{path} has no {MODEL_CONFIG}, so it is no NeMo checkpoint")
    tokenizer = _part(fields, "tokenizer")
    hub_id = str(tokenizer.get("type") or "") if tokenizer.get("library") == "huggingface" else ""
    return NemoCheckpoint(
        path, 1, _class_name(fields.get("target")), _count(fields.get("num_layers")), hub_id if "/" in hub_id else None
    )


def _of_folder(path: Path) -> NemoCheckpoint:
    file = path / CONTEXT / "model.yaml"
    try:
        fields = _fields(file.read_bytes()) if file.is_file() else {}
    except (OSError, yaml.YAMLError) as error:
        raise AskedError(f"cannot read {file}: {error}") from None
    num_layers = _count(_part(fields, "config").get("num_layers"))
    return NemoCheckpoint(path, 2, _class_name(fields.get("_target_")), num_layers)


def _fields(text: bytes) -> dict[str, Any]:
    read = yaml.load(text, _Loader)
    return read if isinstance(read, dict) else {}


def _part(fields: dict[str, Any], name: str) -> dict[str, Any]:
    part = fields.get(name)
    return part if isinstance(part, dict) else {}


def _class_name(target: object) -> str:
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)

"""The source of a build: a checkpoint's folder, a model of the hub, or a NeMo checkpoint."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sluice.cli.build.options import UsageError
from sluice.cli.build.steps import PYTHON, BuildStep, ToolStep
from sluice.cli.checkpoint_files import CONFIG
from sluice.engine.model_folder import ModelFormat, model_format
from sluice.engine.yaml_text import load_yaml
from sluice.gateway.checkpoint import download_from_hub, find_checkpoint, is_hub_id, model_name
from sluice.gateway.options.option import OptionError

_NEMO_CONVERTER = "scripts/checkpoint_converters/convert_nemo1_to_nemo2.py"
_NEMO_IMAGE = 'docker run --rm -it --gpus all --shm-size 16g -v "$PWD:$PWD" -w "$PWD" nvcr.io/nvidia/nemo:25.09 bash'
"""Command that starts NeMo's image. Its packages only fit together there, so its tools are run in it."""
_NEMO_CONFIG = "model_config.yaml"
_NEMO_CONTEXT, _NEMO_WEIGHTS = "context", "weights"


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A folder with a model. It does not exist yet where an earlier step makes it."""

    path: Path
    format: ModelFormat
    name: str
    origin: str
    """CHECKPOINT as the command line gives it."""
    config: dict[str, Any] = field(default_factory=dict)
    """Content of config.json; empty where there is none yet."""

    @property
    def description(self) -> str:
        return self.format.value.replace("_", " ")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def quantized_by(self) -> str:
        """Name of the tool or method that compressed the weights; "" for uncompressed weights."""
        settings = self.config.get("quantization_config") or {}
        method = str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""
        return method or ("modelopt" if (self.path / "hf_quant_config.json").is_file() else "")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub that is not downloaded."""

    hub_id: str
    revision: str | None
    description: str = "model of the hub"

    @property
    def name(self) -> str:
        return self.hub_id.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class NemoCheckpoint:
    """A .nemo archive (generation 1), or a folder of NeMo 2."""

    path: Path
    generation: int
    model_class: str
    """Class that its configuration names; "" where it names none."""
    num_layers: int | None = None
    hub_id: str | None = None
    """Hub model that the checkpoint was trained from, where its tokenizer names it."""

    @property
    def name(self) -> str:
        return self.path.absolute().name.removesuffix(".nemo")

    @property
    def description(self) -> str:
        layers = f", {self.num_layers} layers" if self.num_layers else ""
        return f"NeMo {self.generation} checkpoint ({self.model_class or 'of no named class'}{layers})"


BuildSource = SourceCheckpoint | HubModel | NemoCheckpoint


def find_source(text: str, *, is_dry: bool) -> BuildSource:
    """Find the source of CHECKPOINT. A model of the hub is downloaded, unless this is a dry run.

    Raises UsageError where it names nothing that can be built from.
    """
    path = Path(text)
    nemo = read_nemo(path)
    if nemo is not None:
        return nemo
    if not path.exists() and is_hub_id(text):
        if is_dry:
            hub_id, _, revision = text.partition("@")
            return HubModel(hub_id, revision or None)
        try:
            return read_checkpoint(download_from_hub(text), text)
        except OptionError as error:
            raise UsageError(str(error)) from None
    if path.is_dir() and model_format(path) is not None:
        return read_checkpoint(path, text)
    try:
        return read_checkpoint(find_checkpoint(text, "CHECKPOINT"), text)
    except OptionError as error:
        raise UsageError(
            f"{error}; a .nemo archive or a NeMo 2 checkpoint (context/ and weights/) will do too"
        ) from None


def read_checkpoint(folder: Path, origin: str) -> SourceCheckpoint:
    """Read the format and config.json of a checkpoint. Raises UsageError for a folder without a model."""
    kind = model_format(folder)
    if kind is None:
        raise UsageError(f"{folder} holds no model: it has neither {CONFIG} nor an OpenVINO IR")
    return SourceCheckpoint(folder, kind, model_name(folder), origin, _read_config(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {folder / CONFIG}: {error}") from None


def read_nemo(path: Path) -> NemoCheckpoint | None:
    """Read the configuration of a NeMo checkpoint. Returns None for a path that is not NeMo's.

    Raises UsageError for a NeMo checkpoint that cannot be read or used.
    """
    if path.is_file() and path.suffix == ".nemo":
        return _read_archive(path)
    if not path.is_dir():
        return None
    if (path / _NEMO_CONTEXT).is_dir() and (path / _NEMO_WEIGHTS).is_dir():
        return _read_nemo2(path)
    if (path / _NEMO_CONFIG).is_file():
        raise UsageError(
            f"{path} is an unpacked .nemo archive; pack it again, as NeMo's converter wants it: "
            f"tar -cf {path.name}.nemo -C {path} ."
        )
    return None


def nemo_steps(
    nemo: NemoCheckpoint, work: Path, target: Path, nemo_folder: Path, model_id: str | None
) -> Iterator[BuildStep]:
    """Yield the steps that convert the checkpoint to HuggingFace's format in `target`, by NeMo's own tools.

    Raises UsageError where the model that an archive was trained from is not known.
    """
    folder = nemo.path
    if nemo.generation == 1:
        hub_id = model_id or nemo.hub_id
        if hub_id is None:
            raise UsageError(
                f"{nemo.path} does not say which model it is of; give the one that it was trained from with "
                "--nemo-model-id, such as meta-llama/Meta-Llama-3-8B (NeMo's converter lists those that it knows)"
            )
        script, folder = str(nemo_folder / _NEMO_CONVERTER), work / "nemo2"
        options = (f"--input_path={nemo.path}", f"--output_path={folder}", f"--model_id={hub_id}")
        yield ToolStep(
            "turn the .nemo archive into a NeMo 2 checkpoint",
            (PYTHON, script, *options),
            script,
            _NEMO_IMAGE,
            nemo.path.stat().st_size,
            needs_gpu=False,
        )
    yield ToolStep(
        "export the NeMo checkpoint to HuggingFace's format",
        ("nemo", "llm", "export", "-y", f"path={folder}", f"output_path={target}", "target=hf"),
        "nemo",
        _NEMO_IMAGE,
        _total_bytes(nemo.path),
        needs_gpu=False,
    )


def _read_archive(path: Path) -> NemoCheckpoint:
    try:
        with tarfile.open(path) as archive:
            member = next((each for each in archive if Path(each.name).name == _NEMO_CONFIG), None)
            file = archive.extractfile(member) if member is not None else None
            fields = _parse_yaml(file.read()) if file is not None else None
    except (tarfile.TarError, OSError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if fields is None:
        raise UsageError(f"{path} has no {_NEMO_CONFIG}, so it is no NeMo checkpoint")
    tokenizer = _mapping(fields, "tokenizer")
    hub_id = str(tokenizer.get("type") or "") if tokenizer.get("library") == "huggingface" else ""
    return NemoCheckpoint(
        path,
        generation=1,
        model_class=_class_name(fields.get("target")),
        num_layers=_count(fields.get("num_layers")),
        hub_id=hub_id if "/" in hub_id else None,
    )


def _read_nemo2(path: Path) -> NemoCheckpoint:
    file = path / _NEMO_CONTEXT / "model.yaml"
    try:
        fields = _parse_yaml(file.read_bytes()) if file.is_file() else {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    num_layers = _count(_mapping(fields, "config").get("num_layers"))
    return NemoCheckpoint(path, 2, _class_name(fields.get("_target_")), num_layers)


class _PlainLoader(yaml.SafeLoader):
    """Loads the plain values of NeMo's files. A value with a tag, such as a Python object, becomes None."""


_PlainLoader.add_multi_constructor("", lambda loader, suffix, node: None)


def _parse_yaml(text: bytes) -> dict[str, Any]:
    document = load_yaml(text, _PlainLoader)
    return document if isinstance(document, dict) else {}


def _mapping(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _class_name(target: object) -> str:
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _total_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)

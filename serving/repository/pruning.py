"""Old versions that nobody asks for: which they are, and how they go while a server may be looking.

Everything here reads and changes the file system.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import Backend
from serving.backends.registry import BackendRegistry
from serving.config.pbtxt import CONFIG_FILENAME, read_pbtxt
from serving.repository.folders import list_versions
from serving.repository.routing import PARAMETER, configured_weights
from serving.request import LATEST
from sluice.errors import ErrorCode, SluiceError

_HIDDEN = ".sluice-pruned-"
_LEFTOVER = re.compile(rf"{re.escape(_HIDDEN)}(?P<model>.+)-(?P<version>[0-9]+)-(?P<process>[0-9]+)")
_NOT_WHOLE = "its model's file is not there, so it counts for nothing"
_LEFT_BEHIND = "left by a prune that was interrupted"


@dataclass(frozen=True, slots=True)
class Removal:
    """One version's folder that is to go. `note`: what whoever confirms should know of it."""

    model: str
    version: int
    folder: Path
    size_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that stays, and why."""

    model: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """`leftovers`: hidden folders of an earlier prune, which nobody serves."""

    removals: tuple[Removal, ...]
    kept: tuple[KeptVersion, ...]
    leftovers: tuple[Removal, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in (*self.removals, *self.leftovers))


@dataclass(frozen=True, slots=True)
class _ModelFolder:
    name: str
    path: Path
    config: ModelConfig
    versions: tuple[int, ...]


def plan_prune(roots: Sequence[Path], keep: int, backends: BackendRegistry) -> PrunePlan:
    """What goes if the newest `keep` versions of each model stay, and those that are asked for by number.

    A version without its model's file does not count, and stays: it may be on its way here.

    Raises SluiceError INVALID where a configuration cannot be read: which versions it asks for is then unknown.
    """
    installed = backends.in_detection_order()
    models = [model for root in roots for model in _models(root)]
    asked = _asked_for(models)
    removals: list[Removal] = []
    kept: list[KeptVersion] = []
    for model in models:
        whole = [version for version in model.versions if _is_whole(model, version, installed)]
        kept += [KeptVersion(model.name, each, _NOT_WHOLE) for each in model.versions if each not in whole]
        for version in whole[: max(len(whole) - keep, 0)]:
            reason = asked.get((model.name, version))
            if reason is not None:
                kept.append(KeptVersion(model.name, version, reason))
                continue
            folder = model.path / str(version)
            removals.append(Removal(model.name, version, folder, folder_bytes(folder), _served_by(model, version)))
    return PrunePlan(tuple(removals), tuple(kept), tuple(each for root in roots for each in _leftovers(root)))


def remove_version(removal: Removal) -> None:
    """Delete the folder. Raises OSError.

    It first leaves the model's folder in one step, so that a server that looks sees all of the version or nothing.
    """
    folder = removal.folder
    if not folder.name.startswith(_HIDDEN):
        folder = _hide(removal)
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below; of a link, its own."""
    if folder.is_symlink():
        return folder.lstat().st_size
    return sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)


def _hide(removal: Removal) -> Path:
    """Beside the models, where files that come and go change no model's state; inside where that is another device."""
    name = f"{_HIDDEN}{removal.model}-{removal.version}-{os.getpid()}"
    inside = removal.folder.parent / name
    try:
        return removal.folder.rename(removal.folder.parent.parent / name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return removal.folder.rename(inside)


def _models(root: Path) -> Iterator[_ModelFolder]:
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield _ModelFolder(path.name, path, _config(path), tuple(list_versions(path)))


def _config(path: Path) -> ModelConfig:
    file = path / CONFIG_FILENAME
    return read_pbtxt(file).config if file.exists() else ModelConfig()


def _is_whole(model: _ModelFolder, version: int, backends: Sequence[Backend]) -> bool:
    """Whether there is what would be served, as far as names of files tell."""
    config, folder = model.config, model.path / str(version)
    if config.HasField("ensemble_scheduling"):
        return True
    names = [
        file.name
        for backend in backends
        for file in backend.model_files
        if backend.name == config.backend or (file.platform and file.platform == config.platform)
    ]
    if config.default_model_filename:
        names = [config.default_model_filename]
    files = [each.name for each in folder.iterdir()]
    return any(name in files for name in names) if names else bool(files)


def _asked_for(models: Sequence[_ModelFolder]) -> dict[tuple[str, int], str]:
    """The versions that a policy, weights or an ensemble's step name, and who does."""
    asked: dict[tuple[str, int], str] = {}
    for model in models:
        for version in model.config.version_policy.specific.versions:
            asked[model.name, version] = "its version_policy names it"
        weights = configured_weights(model.config)
        for version, weight in weights.by_version.items() if weights is not None else ():
            if weight:
                asked[model.name, version] = f"its {PARAMETER} name it"
        for step in model.config.ensemble_scheduling.step:
            if step.model_version != LATEST:
                asked[step.model_name, step.model_version] = f"ensemble '{model.name}' calls it"
    return asked


def _served_by(model: _ModelFolder, version: int) -> str:
    """The policy that serves it now, though it does not name it."""
    policy = model.config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return "served until now: version_policy all"
    if kind == "latest" and version in model.versions[-policy.latest.num_versions :]:
        return f"served until now: version_policy latest {policy.latest.num_versions}"
    return ""


def _leftovers(root: Path) -> Iterator[Removal]:
    for path in sorted([*root.glob(f"{_HIDDEN}*"), *root.glob(f"*/{_HIDDEN}*")]):
        found = _LEFTOVER.fullmatch(path.name)
        if found is not None:
            yield Removal(found["model"], int(found["version"]), path, folder_bytes(path), _LEFT_BEHIND)


def check_roots(roots: Sequence[Path]) -> None:
    """Raises SluiceError INVALID for what is no repository of folders."""
    for root in roots:
        if not root.is_dir():
            raise SluiceError(ErrorCode.INVALID, f"{root} is no folder")
        if (root / CONFIG_FILENAME).exists():
            raise SluiceError(
                ErrorCode.INVALID, f"{root} is a model, not a repository of models; its repository is {root.parent}"
            )

"""Pruning: which old versions to remove, and their removal while a server may scan. Works on files."""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid_argument
from sluice.serving.backend import Backend
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.pbtxt import CONFIG_FILENAME, read_pbtxt
from sluice.serving.repository.folders import is_plain_name, list_versions
from sluice.serving.repository.routing import PARAMETER, configured_weights
from sluice.serving.request import LATEST

_HIDDEN = ".sluice-pruned-"
_LEFTOVER = re.compile(rf"{re.escape(_HIDDEN)}(?P<model>.+)-(?P<version>[0-9]+)-(?P<process>[0-9]+)")
_INCOMPLETE = "its model's file is not there, so it counts for nothing"
_LEFT_BEHIND = "left by a prune that was interrupted"


@dataclass(frozen=True, slots=True)
class Removal:
    """A version's folder to remove. `note` is for the operator who confirms the removal."""

    model: str
    version: int
    folder: Path
    size_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that stays, with the reason."""

    model: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The plan of a prune. `leftovers` are hidden folders of an interrupted prune, which nobody serves."""

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
    """Plan to keep the newest `keep` versions of each model, and those that a configuration names by number.

    A version without its model file does not count, and stays: it may be being uploaded. Raises INVALID
    where a configuration cannot be read, since the versions that it names are unknown then.
    """
    installed = backends.in_detection_order()
    models = [model for root in roots for model in _read_models(root)]
    named = _find_named(models)
    removals: list[Removal] = []
    kept: list[KeptVersion] = []
    for model in models:
        complete = [version for version in model.versions if _is_complete(model, version, installed)]
        kept += [KeptVersion(model.name, each, _INCOMPLETE) for each in model.versions if each not in complete]
        for version in complete[: max(len(complete) - keep, 0)]:
            reason = named.get((model.name, version))
            if reason is not None:
                kept.append(KeptVersion(model.name, version, reason))
                continue
            folder = model.path / str(version)
            removals.append(Removal(model.name, version, folder, folder_bytes(folder), _served_by(model, version)))
    return PrunePlan(tuple(removals), tuple(kept), tuple(each for root in roots for each in _leftovers(root)))


def remove_version(removal: Removal) -> None:
    """Delete the version's folder, moved away first: a scanning server sees all or nothing. Raises OSError."""
    folder = removal.folder
    if not folder.name.startswith(_HIDDEN):
        folder = _hide(removal)
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files below `folder`; of a link, its own."""
    if folder.is_symlink():
        return folder.lstat().st_size
    return sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)


def _hide(removal: Removal) -> Path:
    """Move the folder beside the models, where no scan sees it; on another device, within the model's folder."""
    name = f"{_HIDDEN}{removal.model}-{removal.version}-{os.getpid()}"
    inside = removal.folder.parent / name
    try:
        return removal.folder.rename(removal.folder.parent.parent / name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return removal.folder.rename(inside)


def _read_models(root: Path) -> Iterator[_ModelFolder]:
    for path in sorted(root.iterdir()):
        if path.is_dir() and is_plain_name(path.name):
            file = path / CONFIG_FILENAME
            config = read_pbtxt(file).config if file.exists() else ModelConfig()
            yield _ModelFolder(path.name, path, config, tuple(list_versions(path)))


def _is_complete(model: _ModelFolder, version: int, backends: Sequence[Backend]) -> bool:
    """Return whether the version has its model file, as far as file names tell."""
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


def _find_named(models: Sequence[_ModelFolder]) -> dict[tuple[str, int], str]:
    """Return the versions that a version policy, weights or an ensemble's step name, with the reason for each."""
    named: dict[tuple[str, int], str] = {}
    for model in models:
        for version in model.config.version_policy.specific.versions:
            named[model.name, version] = "its version_policy names it"
        weights = configured_weights(model.config)
        for version, weight in weights.by_version.items() if weights is not None else ():
            if weight:
                named[model.name, version] = f"its {PARAMETER} name it"
        for step in model.config.ensemble_scheduling.step:
            if step.model_version != LATEST:
                named[step.model_name, step.model_version] = f"ensemble '{model.name}' calls it"
    return named


def _served_by(model: _ModelFolder, version: int) -> str:
    """Return a note where the version policy serves it now without naming it."""
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
    """Raise INVALID for a path that is not a repository of model folders."""
    for root in roots:
        if not root.is_dir():
            raise invalid_argument(f"{root} is no folder")
        if (root / CONFIG_FILENAME).exists():
            raise invalid_argument(f"{root} is a model, not a repository of models; its repository is {root.parent}")

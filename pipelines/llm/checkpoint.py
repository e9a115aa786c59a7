"""Finds the checkpoint to serve, a folder or a name on a Hugging Face hub, and the name to serve it under.

huggingface_hub reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
"""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.bundled import BUNDLED_MODEL, models_folder
from sluice.engine import model_folder
from sluice.engine.model_folder import model_format
from sluice.engine.runtimes import is_loadable, runtimes_for
from sluice.errors import invalid

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "openvino_model.*"]
_NOT_FILES = ["*/*", "consolidated*", "adapter_*"]
"""Patterns of folders beside the model, which hold other formats of it, and of weights in their maker's own layout."""
_SNAPSHOTS = "snapshots"


_WEIGHTS = ("*.safetensors", "openvino_model.*")


def find_checkpoint(
    path: str | None, option: str = "MODEL", engine_python: str | None = None, *, has_engine: bool = True
) -> Path:
    """Return the folder of a loadable checkpoint at `path`, the value of `option`; None is the bundled model, and so is
    its name where no folder has it.

    A model folder in Triton's layout (one numbered folder for each version) stands for its highest version. A `path`
    that is no folder and looks like a name on the Hugging Face hub is downloaded, unless the cache has it.
    `engine_python` is the engine's Python, where that is another one. Without an engine here (`has_engine` false) no
    weights are downloaded, and any model will do that a runtime elsewhere can serve. Raises INVALID where there is no
    checkpoint, and for one that no installed runtime takes.
    """
    folder = models_folder() / BUNDLED_MODEL if path is None else Path(path)
    if path is not None and not folder.exists():
        if path == BUNDLED_MODEL:
            folder = models_folder() / BUNDLED_MODEL
        elif is_hub_id(path):
            folder = download_from_hub(path, option, with_weights=has_engine)
    checkpoint = model_folder.find_checkpoint(folder)
    if checkpoint is not None and not has_engine:
        return checkpoint
    if checkpoint is not None:
        return _check_loadable(checkpoint, option, engine_python)
    raise invalid(
        option,
        f"{option} must be the folder of a HuggingFace checkpoint or OpenVINO IR, or ORG/NAME on the Hugging Face hub, "
        f"got {str(folder)!r}, which {_describe_missing(folder)}",
    )


def _check_loadable(folder: Path, option: str, engine_python: str | None) -> Path:
    found = model_format(folder)
    if found is not None and not is_loadable(found, engine_python):
        raise invalid(
            option,
            f"{option} must be a model for a runtime that is installed here, got {str(folder)!r}, {found.phrase}: "
            f"{runtimes_for(found)[0].remedy}, or give the HuggingFace checkpoint that it was made of",
        )
    return folder


def _describe_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder"
    if any(folder.glob("*.engine")):
        return "has compiled engines, but not the config.json that they were built with"
    return "has no config.json, so it is no HuggingFace checkpoint"


def model_name(checkpoint: Path) -> str:
    """Return a checkpoint's name: its folder's, or its model's where the folder is a version or a download."""
    folder = checkpoint.resolve()
    downloaded = snapshot_model_name(folder)
    if downloaded is not None:
        return downloaded
    return folder.parent.name if folder.name.isdecimal() else folder.name


def is_hub_id(text: str) -> bool:
    """Whether `text` looks like ORG/NAME or ORG/NAME@REVISION."""
    return _HUB_ID.fullmatch(text) is not None


def download_from_hub(hub_id: str, option: str = "MODEL", *, with_weights: bool = True) -> Path:
    """Return the folder of the model's files in the local cache, downloaded where absent; progress goes to stderr.

    Raises INVALID for a model, the value of `option`, that neither the hub nor the cache has.
    """
    from huggingface_hub import snapshot_download  # takes half a second, and few need it

    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None, hub_id
    repo, revision = match["repo"], match["revision"]
    files = [each for each in _FILES if with_weights or each not in _WEIGHTS]
    try:
        with _interrupt_ends_process():
            folder = snapshot_download(repo, revision=revision, allow_patterns=files, ignore_patterns=_NOT_FILES)
    except Exception as error:  # the library raises its own, those of HTTP and those of the disk
        problem = f"{option} {hub_id!r} is no folder here, and cannot be had from the hub: {_explain(error)}"
        raise invalid(option, problem) from error
    return Path(folder)


def find_cached(hub_id: str) -> Path | None:
    """Return the folder of the files of an earlier download; None without one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError

    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None, hub_id
    try:
        return Path(snapshot_download(match["repo"], revision=match["revision"], local_files_only=True))
    except (HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError):
        return None


def snapshot_model_name(folder: Path) -> str | None:
    """Return NAME of the ORG/NAME whose files the library keeps in `folder`; None for a folder outside the cache."""
    if folder.parent.name != _SNAPSHOTS or not folder.parent.parent.name.startswith("models--"):
        return None
    return folder.parent.parent.name.split("--")[-1]


def _explain(error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "it is gated: accept its licence on its page, and set HF_TOKEN to a token of that account"
        case errors.RevisionNotFoundError():
            return "it has no such revision; the part after @ must be a branch, a tag or a commit"
        case errors.RepositoryNotFoundError():
            return "there is no such model, or it is private and HF_TOKEN is not set to a token that may read it"
        case errors.LocalEntryNotFoundError() | errors.IncompleteSnapshotError():
            return (
                "the hub cannot be reached, and the local cache does not hold all of it; go online, or download it "
                "elsewhere and give its folder"
            )
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


@contextmanager
def _interrupt_ends_process() -> Iterator[None]:
    """Let Ctrl-C end the process at once: Python would first wait for every download. Fetched files are kept.

    Only the main thread receives signals, and may change what becomes of them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

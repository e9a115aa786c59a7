"""Models by their name on a Hugging Face hub. The library reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.options.option import ConfigError

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "openvino_model.*"]
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]
"""Folders beside the model (other formats of it), and the weights in their maker's own layout."""
_SNAPSHOTS = "snapshots"


def is_hub_id(text: str) -> bool:
    """Whether it reads like ORG/NAME or ORG/NAME@REVISION."""
    return _ID.fullmatch(text) is not None


def download(hub_id: str) -> Path:
    """The folder of the model's files in the local cache, fetched unless they are there; progress goes to stderr.

    To be called from the main thread, which gets the signals.
    Raises ConfigError where the hub has no such model or cannot be asked and the cache lacks it.
    """
    from huggingface_hub import snapshot_download  # takes half a second, and is wanted by few

    match = _ID.fullmatch(hub_id)
    assert match is not None, hub_id
    repo, revision = match["repo"], match["revision"]
    try:
        with _ended_by_interrupt():
            folder = snapshot_download(repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except Exception as error:  # the library raises its own, those of HTTP and those of the disk
        raise ConfigError(
            f"MODEL {hub_id!r} is no folder here, and cannot be had from the hub: {_reason(error)}"
        ) from error
    return Path(folder)


def cached(hub_id: str) -> Path | None:
    """The folder of the model's files where an earlier `download` kept them; None where it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError

    match = _ID.fullmatch(hub_id)
    assert match is not None, hub_id
    try:
        return Path(snapshot_download(match["repo"], revision=match["revision"], local_files_only=True))
    except (HfHubHTTPError, IncompleteSnapshotError, LocalEntryNotFoundError):
        return None


def name_of_snapshot(folder: Path) -> str | None:
    """NAME of the ORG/NAME whose files the library keeps in `folder`; None for a folder that is not the cache's."""
    if folder.parent.name != _SNAPSHOTS or not folder.parent.parent.name.startswith("models--"):
        return None
    return folder.parent.parent.name.split("--")[-1]


def _reason(error: Exception) -> str:
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
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once: Python would first wait for every file under way. What was fetched is kept."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

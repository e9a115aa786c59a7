"""`pb_utils.load_model`, `unload_model` and `is_model_ready`: the server's repository, as models change it."""

from typing import Any

from serving.backends.python.frames import AskReady, LoadModel, UnloadModel
from serving.backends.python.worker.arguments import text
from serving.backends.python.worker.asking import Server
from serving.backends.python.worker.errors import TritonModelException

_FILE_PREFIX = "file:"


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load it, or again what has changed of it, and wait for that.

    `config` is JSON, in place of what its folder says; `files` are contents by `file:PATH`, in place of its folder.
    """
    name = text(model_name, "model_name")
    Server.ask(LoadModel(name, text(config, "config"), _contents(name, files)), "Failed to load model")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Take it out of service. Requests under way go on to their end."""
    Server.ask(UnloadModel(text(model_name, "model_name"), bool(unload_dependents)), "Failed to unload model")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether that version serves, or any where none is named."""
    question = AskReady(text(model_name, "model_name"), _version(str(model_version)))
    return bool(Server.ask(question, "Failed to check model readiness"))


def _contents(model_name: str, files: Any) -> dict[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    for path, content in files.items():
        if not isinstance(path, str) or not path.startswith(_FILE_PREFIX) or not isinstance(content, bytes):
            raise TritonModelException(
                f"failed to load model '{model_name}', files should be contents as bytes by '{_FILE_PREFIX}PATH': "
                f"{path!r} is not"
            )
    return {path.removeprefix(_FILE_PREFIX): content for path, content in files.items()}


def _version(text: str) -> int:
    if not text:
        return -1
    if not text.isdecimal():
        raise TritonModelException(
            f"Failed to check model readiness: failed to get model version from specified version string '{text}', "
            "version should be an integral value > 0"
        )
    return int(text)

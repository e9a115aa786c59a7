"""Takes the server's paths out of what clients are told: where files lie is the operator's business."""

import logging
import os
import re

from sluice.errors import SluiceError

log = logging.getLogger(__name__)

_TOP_FOLDERS = frozenset(name for name in os.listdir("/") if not name.startswith("."))
"""Names in the file system's root. A path begins with one of them; a route, a JSON pointer or a regex rarely does."""
_QUOTED = re.compile(r"""(?P<quote>["'`])(?P<path>/[^"'`\n]+)(?P=quote)""")
_BARE = re.compile(r"""(?<![<\w/:.~#$%&=?-])(?P<path>/[^\s/"'`,;:()\[\]<>{}|]+(?:/[^\s/"'`,;:()\[\]<>{}|]+)*/?)""")
_VERSION_FOLDER = re.compile(r".*/(?=[^/]+/\d+/)", re.DOTALL)
"""Matches what stands before a model's folder in the path of something in one of its versions."""
_CONFIG_FILE = re.compile(r".*/(?=[^/]+/config\.pbtxt$)", re.DOTALL)


def hide_paths(text: str) -> str:
    """Return `text` with absolute paths cut: to what stands in the repository (`model/1/model.onnx`), else to their
    last part. Paths with white space are found only between quotes."""
    if "/" not in text:
        return text
    text = _QUOTED.sub(lambda match: f"{match['quote']}{_shorten(match['path'])}{match['quote']}", text)
    return _BARE.sub(lambda match: _shorten(match["path"]), text)


def client_message(error: SluiceError) -> str:
    """Return the message of `error` without paths. Where it had some, the log has it with them."""
    message = hide_paths(error.message)
    if message != error.message and not error.is_logged:
        log.info("a client was told without paths: %s", error.message)
    return message


def _shorten(path: str) -> str:
    if path.split("/", 2)[1] not in _TOP_FOLDERS:
        return path
    for before in (_VERSION_FOLDER, _CONFIG_FILE):
        if before.match(path):
            return before.sub("", path)
    return path.rstrip("/").rpartition("/")[2]

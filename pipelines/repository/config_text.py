"""config.pbtxt: the protobuf text format, read into a `ModelConfig` or refused with file, line and reason."""

import difflib
import re
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError

CONFIG_FILENAME = "config.pbtxt"

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*) | (?P<string>"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*') | (?P<bytes>\bTYPE_BYTES\b)""",
    re.VERBOSE,
)
_NO_FIELD = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


def parse_config(text: str, path: Path | str) -> tuple[ModelConfig, list[str]]:
    """The configuration and notes on what was read other than it is written. `path` is named in errors.

    Raises SluiceError INVALID with the line and what is wrong there.
    """
    text, num_bytes_types = _with_string_types(text)
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise SluiceError(ErrorCode.INVALID, f"failed to read text proto from {path}: {_reason(error)}") from None
    notes = ["TYPE_BYTES is read as TYPE_STRING, its name in config.pbtxt"] if num_bytes_types else []
    return config, notes


def read_config(path: Path) -> tuple[ModelConfig, list[str]]:
    """As `parse_config`, from a file. Raises SluiceError INVALID also where it cannot be read."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        reason = f"failed to open text file for read {path}: {error.strerror}"
        raise SluiceError(ErrorCode.INVALID, reason) from None
    except UnicodeDecodeError as error:
        reason = f"failed to read text proto from {path}: byte {error.start} is not UTF-8"
        raise SluiceError(ErrorCode.INVALID, reason) from None
    return parse_config(text, path)


def _with_string_types(text: str) -> tuple[str, int]:
    """The text with the enum word TYPE_BYTES replaced; strings and comments stay. Lines keep their numbers."""
    num_replaced = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal num_replaced
        if match["bytes"] is None:
            return match[0]
        num_replaced += 1
        return "TYPE_STRING"

    return _TOKEN.sub(replace, text), num_replaced


def _reason(error: text_format.ParseError) -> str:
    """`line 3, column 5: …` with the near name where a field does not exist."""
    message = re.sub(r"^\d+:\d+ : ", "", str(error))
    message = with_near_name(message)
    line, column = error.GetLine(), error.GetColumn()
    return message if line is None else f"line {line}, column {column}: {message}"


def with_near_name(message: str) -> str:
    """Protobuf's complaint about an unknown field in fewer words and with the field that was perhaps meant."""
    unknown = _NO_FIELD.search(message)
    if unknown is None:
        return message
    descriptor: Descriptor = ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(unknown["message"])
    near = difflib.get_close_matches(unknown["field"], [each.name for each in descriptor.fields], n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{descriptor.name} has no field '{unknown['field']}'{hint}"

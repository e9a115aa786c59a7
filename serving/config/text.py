"""config.pbtxt: the protobuf text format, read into a `ModelConfig` or refused with file, line and reason."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.config.fields import unknown_field
from serving.config.locations import Locations, locations_of
from serving.config.slips import mended, text_slips
from serving.config.values import mend_values
from serving.findings import ConfigFinding, InvalidConfig
from sluice.errors import ErrorCode, SluiceError

CONFIG_FILENAME = "config.pbtxt"
_MOST_BYTES = 4 << 20

_NO_FIELD = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """A configuration, where its fields stand, and what of it is read other than it is written."""

    config: ModelConfig
    locations: Locations
    notes: tuple[ConfigFinding, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The notes for a log that names the model."""
        return lines_of(self.notes, CONFIG_FILENAME)


def parse_written(text: str, path: Path | str) -> WrittenConfig:
    """Raises InvalidConfig with all that is wrong with its fields, or with where it stops being a configuration."""
    locations = locations_of(text)
    slips = text_slips(locations, text)
    refused = [slip.finding for slip in slips if slip.is_refused]
    if refused:
        raise _unreadable(path, refused)
    config = ModelConfig()
    try:
        text_format.Parse(mended(text, slips), config)
    except text_format.ParseError as error:
        raise _unreadable(path, [_syntax(error)]) from None
    values = locations.locate_all(mend_values(config))
    notes = sorted((*(slip.finding for slip in slips), *values), key=lambda each: each.line or 0)
    return WrittenConfig(config, locations, tuple(notes))


def parse_config(text: str, path: Path | str) -> tuple[ModelConfig, list[str]]:
    """The configuration, and notes with their lines on what was read other than it is written.

    `path` is named in errors. Raises InvalidConfig.
    """
    written = parse_written(text, path)
    return written.config, lines_of(written.notes, Path(path).name)


def read_written(path: Path) -> WrittenConfig:
    """As `parse_written`, from a file. Raises SluiceError INVALID also where it cannot be read."""
    return parse_written(read_text(path), path)


def read_config(path: Path) -> tuple[ModelConfig, list[str]]:
    """The configuration that a model's folder has, and notes with their lines. Raises as `read_written`."""
    written = read_written(path)
    return written.config, lines_of(written.notes, path.name)


def located(error: InvalidConfig, locations: Locations, path: Path) -> InvalidConfig:
    """The same with lines. The message still begins with the sentence that it was."""
    findings = locations.locate_all(error.findings)
    first, *others = findings
    place = f"{path}:{first.line}" if first.line else str(path)
    said = [f"{error.message} ({place})" + (f"; write: {first.remedy}" if first.remedy else "")]
    return InvalidConfig(findings, "; ".join([*said, *lines_of(others, path.name)]))


def read_text(path: Path) -> str:
    """Raises SluiceError INVALID where it cannot be read or is no text of a configuration."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):  # a pipe would be waited for, for ever
            raise _unread(path, "it is no file")
        if status.st_size > _MOST_BYTES:
            raise _unread(path, f"it has {status.st_size >> 20} MB, and no configuration has more than 4")
        return path.read_text("utf-8-sig")
    except OSError as error:
        reason = f"failed to open text file for read {path}: {error.strerror}"
        raise SluiceError(ErrorCode.INVALID, reason) from None
    except UnicodeDecodeError as error:
        raise _unread(path, f"byte {error.start} is not UTF-8") from None


def _unread(path: Path, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, f"failed to read text proto from {path}: {reason}")


def lines_of(findings: Iterable[ConfigFinding], file: str) -> list[str]:
    """One for each thing that is said: said of several places, it names the first and the other lines."""
    lines: dict[tuple[str, str], list[ConfigFinding]] = {}
    for each in findings:
        lines.setdefault((each.message, each.remedy), []).append(each)
    return [_line(same, file) for same in lines.values()]


def _line(same: list[ConfigFinding], file: str) -> str:
    more = [str(each.line) for each in same[1:] if each.line != same[0].line]
    first = ConfigFinding(same[0].message, same[0].path, same[0].remedy, same[0].line)
    also = f" (also in line {', '.join(dict.fromkeys(more))})" if more else ""
    return first.text(file) + also


def with_near_name(message: str) -> str:
    """Protobuf's complaint about an unknown field in fewer words and with the field that was perhaps meant."""
    unknown = _NO_FIELD.search(message)
    if unknown is None:
        return message
    descriptor: Descriptor = ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(unknown["message"])
    return unknown_field(descriptor, unknown["field"])


def _unreadable(path: Path | str, findings: list[ConfigFinding]) -> InvalidConfig:
    first, *others = findings
    said = [first.text(str(path)), *(each.text(Path(path).name) for each in others)]
    return InvalidConfig(findings, f"failed to read text proto from {'; '.join(said)}")


def _syntax(error: text_format.ParseError) -> ConfigFinding:
    message = with_near_name(re.sub(r"^\d+:\d+ : ", "", str(error)))
    return ConfigFinding(message, line=error.GetLine(), column=error.GetColumn())

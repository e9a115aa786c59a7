"""config.pbtxt: the protobuf text format, read into a `ModelConfig` or refused with file, line and reason."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.config.lint import apply_fixes, lint_text, unknown_field
from serving.config.locations import FieldLocations, locate_fields
from serving.findings import Finding, InvalidConfig
from sluice.errors import ErrorCode, SluiceError

CONFIG_FILENAME = "config.pbtxt"
_MOST_BYTES = 4 << 20

_NO_FIELD = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """A configuration, where its fields stand, and what of it is read other than it is written."""

    config: ModelConfig
    locations: FieldLocations
    notes: tuple[Finding, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The notes for a log that names the model."""
        return finding_lines(self.notes, CONFIG_FILENAME)


def parse_written(text: str, path: Path | str) -> WrittenConfig:
    """Raises InvalidConfig with all that is wrong with its fields, or with where it stops being a configuration."""
    locations = locate_fields(text)
    slips = lint_text(locations, text)
    refused = [slip.finding for slip in slips if slip.is_refused]
    if refused:
        raise _unreadable(path, refused)
    config = ModelConfig()
    try:
        text_format.Parse(apply_fixes(text, slips), config)
    except text_format.ParseError as error:
        raise _unreadable(path, [_syntax(error)]) from None
    values = locations.locate_all(fix_values(config))
    notes = sorted((*(slip.finding for slip in slips), *values), key=lambda each: each.line or 0)
    return WrittenConfig(config, locations, tuple(notes))


def parse_config(text: str, path: Path | str) -> tuple[ModelConfig, list[str]]:
    """The configuration, and notes with their lines on what was read other than it is written.

    `path` is named in errors. Raises InvalidConfig.
    """
    written = parse_written(text, path)
    return written.config, finding_lines(written.notes, Path(path).name)


def read_written(path: Path) -> WrittenConfig:
    """As `parse_written`, from a file. Raises SluiceError INVALID also where it cannot be read."""
    return parse_written(read_text(path), path)


def read_config(path: Path) -> tuple[ModelConfig, list[str]]:
    """The configuration that a model's folder has, and notes with their lines. Raises as `read_written`."""
    written = read_written(path)
    return written.config, finding_lines(written.notes, path.name)


def with_locations(error: InvalidConfig, locations: FieldLocations, path: Path) -> InvalidConfig:
    """The same with lines. The message still begins with the sentence that it was."""
    findings = locations.locate_all(error.findings)
    first, *others = findings
    place = f"{path}:{first.line}" if first.line else str(path)
    said = [f"{error.message} ({place})" + (f"; write: {first.fix}" if first.fix else "")]
    return InvalidConfig(findings, "; ".join([*said, *finding_lines(others, path.name)]))


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


def finding_lines(findings: Iterable[Finding], file: str) -> list[str]:
    """One for each thing that is said: said of several places, it names the first and the other lines."""
    lines: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        lines.setdefault((each.message, each.fix), []).append(each)
    return [_line(same, file) for same in lines.values()]


def _line(same: list[Finding], file: str) -> str:
    more = [str(each.line) for each in same[1:] if each.line != same[0].line]
    first = Finding(same[0].message, same[0].path, same[0].fix, same[0].line)
    also = f" (also in line {', '.join(dict.fromkeys(more))})" if more else ""
    return first.text(file) + also


def with_near_name(message: str) -> str:
    """Protobuf's complaint about an unknown field in fewer words and with the field that was perhaps meant."""
    unknown = _NO_FIELD.search(message)
    if unknown is None:
        return message
    descriptor: Descriptor = ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(unknown["message"])
    return unknown_field(descriptor, unknown["field"])


def _unreadable(path: Path | str, findings: list[Finding]) -> InvalidConfig:
    first, *others = findings
    said = [first.text(str(path)), *(each.text(Path(path).name) for each in others)]
    return InvalidConfig(findings, f"failed to read text proto from {'; '.join(said)}")


def _syntax(error: text_format.ParseError) -> Finding:
    message = with_near_name(re.sub(r"^\d+:\d+ : ", "", str(error)))
    return Finding(message, line=error.GetLine(), column=error.GetColumn())


_CAPABILITY = re.compile(r"[0-9]{2,3}")
_SCHEDULER_POLICY, _BATCH_SCHEDULER_POLICY = "scheduler_policy", "batch_scheduler_policy"


def fix_values(config: ModelConfig) -> list[Finding]:
    """Correct them in place, and tell what was corrected."""
    return [*_capabilities(config), *_accelerators(config), *_scheduler_policy(config)]


def _capabilities(config: ModelConfig) -> Iterator[Finding]:
    """`cc_model_filenames` has compute capabilities as NVIDIA writes them, with a point."""
    files = config.cc_model_filenames
    for key in sorted(files):
        capability = f"{key[:-1]}.{key[-1]}"
        if _CAPABILITY.fullmatch(key) and capability not in files:
            files[capability] = files.pop(key)
            message = f'"{key}" is read as the compute capability {capability}'
            yield Finding(message, f'cc_model_filenames["{key}"].key', f'key: "{capability}"')


def _accelerators(config: ModelConfig) -> Iterator[Finding]:
    """One without a name is none: what its parameters are for, nobody can say."""
    for kind, example in (("gpu_execution_accelerator", "tensorrt"), ("cpu_execution_accelerator", "openvino")):
        accelerators = getattr(config.optimization.execution_accelerators, kind)
        for index in reversed(range(len(accelerators))):
            if not accelerators[index].name:
                del accelerators[index]
                path = f"optimization.execution_accelerators.{kind}[{index}]"
                message = f"this {kind} has no name, and is left out"
                yield Finding(message, path, f'{kind} [ {{ name: "{example}" }} ]')


def _scheduler_policy(config: ModelConfig) -> Iterator[Finding]:
    """Sluice's backends take either word; TensorRT-LLM's own would not find this one."""
    if config.backend == "tensorrtllm" and _SCHEDULER_POLICY in config.parameters:
        value = config.parameters[_SCHEDULER_POLICY].string_value
        yield Finding(
            f'parameter "{_SCHEDULER_POLICY}" is read as "{_BATCH_SCHEDULER_POLICY}", its name with TensorRT-LLM',
            f'parameters["{_SCHEDULER_POLICY}"].key',
            f'parameters {{ key: "{_BATCH_SCHEDULER_POLICY}" value {{ string_value: "{value}" }} }}',
        )

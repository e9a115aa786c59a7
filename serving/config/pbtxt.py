"""The reader of config.pbtxt: protobuf text becomes a `ModelConfig`, or an error with file, line and reason."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid_argument
from sluice.serving.config.lint import apply_fixes, describe_unknown_field, lint_text
from sluice.serving.config.locations import FieldLocations, locate_fields
from sluice.serving.findings import Finding, InvalidConfig

CONFIG_FILENAME = "config.pbtxt"
CONFIGS_FOLDER = "configs"
"""The folder of a model's other configurations, among which `--model-config-name` chooses."""
_MAX_BYTES = 4 << 20
_MAX_SYNTAX_ERRORS = 50
_SEPARATOR = re.compile(r"\s*[,;]")
_ESCAPED = re.compile(r"\\.")
_CAPABILITY = re.compile(r"[0-9]{2,3}")
_SCHEDULER_POLICY, _BATCH_SCHEDULER_POLICY = "scheduler_policy", "batch_scheduler_policy"
_NO_FIELD = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


@dataclass(frozen=True, slots=True)
class WrittenConfig:
    """A configuration with the locations of its fields, and notes on what is read other than written."""

    config: ModelConfig
    locations: FieldLocations
    notes: tuple[Finding, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The notes, one line each."""
        return finding_lines(self.notes, CONFIG_FILENAME)


def parse_pbtxt(text: str, path: Path | str) -> WrittenConfig:
    """Parse a configuration; `path` is named in errors. Raises InvalidConfig with all findings."""
    written, errors = scan_pbtxt(text)
    if errors:
        raise _invalid_text(path, errors)
    return written


def scan_pbtxt(text: str) -> tuple[WrittenConfig, list[Finding]]:
    """Parse what can be parsed. Returns the configuration without its invalid statements, and their errors.

    Where the syntax is broken, the configuration is empty.
    """
    locations = locate_fields(text)
    found = lint_text(locations, text)
    invalid = [each for each in found if each.is_error]
    errors = [each.finding for each in invalid]
    spans = [_statement_at(locations, each.begin) or (each.begin, each.end) for each in invalid]
    fixes = [each for each in found if not any(begin <= each.begin < end for begin, end in spans)]
    readable = _ESCAPED.sub(_unescape_question, apply_fixes(_blank(text, spans), fixes))
    config, syntax_errors = _parse_leniently(readable)
    errors += syntax_errors
    values = locations.locate_all(fix_values(config))
    notes = sorted((*(each.finding for each in found if not each.is_error), *values), key=lambda each: each.line or 0)
    return WrittenConfig(config, locations, tuple(notes)), errors


def _parse_leniently(text: str) -> tuple[ModelConfig, list[Finding]]:
    """Parse a text without the values that protobuf refuses. Returns an empty configuration for broken syntax."""
    errors: list[Finding] = []
    while True:
        config = ModelConfig()
        try:
            text_format.Parse(text, config)
        except text_format.ParseError as error:
            errors.append(_syntax_finding(error))
            statement = _statement_at(locate_fields(text), _offset(text, error))
            if statement is None or len(errors) == _MAX_SYNTAX_ERRORS:
                return ModelConfig(), errors
            text = _blank(text, [statement])
        except ValueError as error:  # without a place: the number of an enum's value, out of range
            return ModelConfig(), [*errors, Finding(f"a value cannot be read: {error}")]
        else:
            return config, errors


def _unescape_question(escaped: re.Match[str]) -> str:
    """Return `?` for the escape sequence of protobuf that its Python library does not know, others as they are."""
    return "?" if escaped[0] == "\\?" else escaped[0]


def _offset(text: str, error: text_format.ParseError) -> int:
    lines = text.split("\n")[: (error.GetLine() or 1) - 1]
    return sum(len(line) + 1 for line in lines) + (error.GetColumn() or 1) - 1


def _statement_at(locations: FieldLocations, offset: int) -> tuple[int, int] | None:
    """Return the span of the innermost complete statement at `offset`."""
    around = [each.statement for each in locations.fields if each.statement[0] <= offset < each.statement[1]]
    return max(around, default=None)


def _blank(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Replace statements, each with the separator behind it, by spaces. Everything else keeps its place."""
    for begin, end in spans:
        separator = _SEPARATOR.match(text, end)
        end = separator.end() if separator is not None else end
        text = text[:begin] + re.sub(r"[^\n]", " ", text[begin:end]) + text[end:]
    return text


def read_pbtxt(path: Path) -> WrittenConfig:
    """Parse the configuration in a file. Raises as `parse_pbtxt`, and INVALID where the file cannot be read."""
    return parse_pbtxt(read_text(path), path)


def fix_values(config: ModelConfig) -> list[Finding]:
    """Fix values that mean something else than they say, in place. Returns notes on what was fixed."""
    return [*_fix_capabilities(config), *_fix_accelerators(config), *_note_scheduler_policy(config)]


def _fix_capabilities(config: ModelConfig) -> Iterator[Finding]:
    """Write compute capabilities in `cc_model_filenames` as NVIDIA does, with a point."""
    files = config.cc_model_filenames
    for key in sorted(files):
        capability = f"{key[:-1]}.{key[-1:]}"
        if _CAPABILITY.fullmatch(key) and capability not in files:
            files[capability] = files.pop(key)
            message = f'"{key}" is read as the compute capability {capability}'
            yield Finding(message, f'cc_model_filenames["{key}"].key', f'key: "{capability}"')


def _fix_accelerators(config: ModelConfig) -> Iterator[Finding]:
    """Drop accelerators without a name: their parameters apply to nothing."""
    for kind, example in (("gpu_execution_accelerator", "tensorrt"), ("cpu_execution_accelerator", "openvino")):
        accelerators = getattr(config.optimization.execution_accelerators, kind)
        for index in reversed(range(len(accelerators))):
            if not accelerators[index].name:
                del accelerators[index]
                path = f"optimization.execution_accelerators.{kind}[{index}]"
                yield Finding(f"this {kind} has no name, and is left out", path, f'{kind} [ {{ name: "{example}" }} ]')


def _note_scheduler_policy(config: ModelConfig) -> Iterator[Finding]:
    """Note a name that Sluice's backends accept beside TensorRT-LLM's own."""
    if config.backend == "tensorrtllm" and _SCHEDULER_POLICY in config.parameters:
        value = config.parameters[_SCHEDULER_POLICY].string_value
        yield Finding(
            f'parameter "{_SCHEDULER_POLICY}" is read as "{_BATCH_SCHEDULER_POLICY}", its name with TensorRT-LLM',
            f'parameters["{_SCHEDULER_POLICY}"].key',
            f'parameters {{ key: "{_BATCH_SCHEDULER_POLICY}" value {{ string_value: "{value}" }} }}',
        )


def locate_error(error: InvalidConfig, locations: FieldLocations, path: Path) -> InvalidConfig:
    """Return the error with lines. Its message still begins with the same sentence."""
    findings = locations.locate_all(error.findings)
    first, *others = findings
    position = f"{path}:{first.line}" if first.line else str(path)
    texts = [f"{error.message} ({position})" + (f"; write: {first.fix}" if first.fix else "")]
    return InvalidConfig(findings, "; ".join([*texts, *finding_lines(others, path.name)]))


def read_text(path: Path) -> str:
    """Read a file. Raises INVALID where it cannot be read, is too large or is no UTF-8."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):  # a read of a pipe would wait for ever
            raise _unreadable(path, "it is no file")
        if status.st_size > _MAX_BYTES:
            raise _unreadable(path, f"it has {status.st_size >> 20} MB, and no configuration has more than 4")
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise invalid_argument(f"failed to open text file for read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"byte {error.start} is not UTF-8") from None


def _unreadable(path: Path, reason: str) -> SluiceError:
    return invalid_argument(f"failed to read text proto from {path}: {reason}")


def finding_lines(findings: Iterable[Finding], file: str) -> list[str]:
    """Return one line for each message. One that several lines share names the first, then the others."""
    lines: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        lines.setdefault((each.message, each.fix), []).append(each)
    return [_line(same, file) for same in lines.values()]


def _line(same: list[Finding], file: str) -> str:
    more = [str(each.line) for each in same[1:] if each.line != same[0].line]
    first = Finding(same[0].message, same[0].path, same[0].fix, same[0].line)
    also = f" (also in line {', '.join(dict.fromkeys(more))})" if more else ""
    return first.text(file) + also


def explain_unknown_field(message: str) -> str:
    """Return protobuf's message on an unknown field in fewer words, with the likely field; others unchanged."""
    unknown = _NO_FIELD.search(message)
    if unknown is None:
        return message
    descriptor: Descriptor = ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(unknown["message"])
    return describe_unknown_field(descriptor, unknown["field"])


def _invalid_text(path: Path | str, findings: list[Finding]) -> InvalidConfig:
    first, *others = findings
    texts = [first.text(str(path)), *(each.text(Path(path).name) for each in others)]
    return InvalidConfig(findings, f"failed to read text proto from {'; '.join(texts)}")


def _syntax_finding(error: text_format.ParseError) -> Finding:
    message = explain_unknown_field(re.sub(r"^\d+:\d+ : ", "", str(error)))
    return Finding(message, line=error.GetLine(), column=error.GetColumn())

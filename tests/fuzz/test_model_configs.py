"""Configurations of models, damaged in every way: they are read, or refused with the line and the reason."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.config_json import config_json, parse_config_json
from sluice.serving.config.pbtxt import parse_pbtxt
from sluice.serving.findings import InvalidConfig
from sluice.serving.repository.folders import LocalRoot
from sluice.serving.repository.inspection import Verdict, inspect_repositories
from tests.fuzz.damage import damaged
from tests.fuzz.running import fuzzed
from tests.paths import DATA, MODELS

SEEDS = [
    path.read_bytes() for path in sorted((*(DATA / "seed_configs").glob("*.pbtxt"), *MODELS.glob("*/config.pbtxt")))
]


def names_below(descriptor: Descriptor, seen: set[str]) -> Iterator[str]:
    """Yield the names of all fields and of the values of all enumerations of a message."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield field.name
        if field.message_type is not None:
            yield from names_below(field.message_type, seen)
        if field.enum_type is not None:
            yield from (value.name for value in field.enum_type.values)


SNIPPETS = (
    *(name.encode() for name in dict.fromkeys(names_below(ModelConfig.DESCRIPTOR, set()))),
    *(b"{", b"}", b"[", b"]", b":", b",", b";", b"#", b"'", b'"', b"\n", b"<", b">", b"/", b"\\x41"),
    *(b"\\377", b"\\u0000"),
    *(b'key: "a" value { string_value: "b" }', b"TYPE_BYTES", b"true", b"inf", b"nan", b"-0", b"0x1F"),
    *(b"1f", b"[-1, -1]"),
    *(b'"../../x"', b'"${env}"', b"{" * 300, b"[" * 300, b"input { " * 120, b"x.y.z { }", b"[type.x/y] { }"),
)
REGISTRY = BackendRegistry()
configs = (
    st.sampled_from(SEEDS)
    .flatmap(lambda seed: damaged(seed, SNIPPETS))
    .map(lambda each: each.decode("utf-8", "replace"))
)


@fuzzed(50)
@given(configs)
def test_a_config_is_read_or_refused_with_its_lines(text: str) -> None:
    num_lines = text.count("\n") + 1
    try:
        written = parse_pbtxt(text, "m/config.pbtxt")
    except InvalidConfig as error:
        assert error.code is ErrorCode.INVALID
        findings = error.findings
        assert findings
    else:
        findings = written.notes
        again = parse_config_json(config_json(written.config))
        assert again.SerializeToString(deterministic=True) == written.config.SerializeToString(deterministic=True)
    for each in findings:
        assert each.message
        assert each.line is None or 1 <= each.line <= num_lines


@fuzzed(15)
@given(configs)
def test_a_repository_with_it_is_inspected(text: str) -> None:
    with TemporaryDirectory() as folder:
        model = Path(folder) / "m"
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").touch()
        (model / "config.pbtxt").write_text(text, "utf-8", newline="")
        [report] = inspect_repositories([LocalRoot(Path(folder))], REGISTRY)
    assert report.name == "m"
    assert report.verdict in Verdict
    for each in (*report.errors, *report.notes):
        assert each.text("config.pbtxt")


@fuzzed(25)
@given(st.data())
def test_a_config_in_json_is_read_or_refused(data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(SEEDS))
    try:
        content = config_json(parse_pbtxt(seed.decode(), "m").config)
    except InvalidConfig:
        content = b"{}"
    text = data.draw(damaged(content, SNIPPETS))
    try:
        parse_config_json(text)
    except SluiceError as error:
        assert error.code is ErrorCode.INVALID
        error.message.encode()

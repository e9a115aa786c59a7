from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.backend import Backend
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.config.completion import ENSEMBLE, fill_defaults
from sluice.serving.config.pbtxt import parse_pbtxt
from sluice.serving.config.supported_fields import (
    IGNORED_FIELDS,
    SUPPORTED_FIELDS,
    ignored_field_findings,
    ignored_fields,
    ignored_fields_note,
)
from sluice.serving.config.validation import check_structure, check_tensors
from sluice.serving.instance import place_instances
from tests.serving.config.parts import parse_config


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that hold a value; a map is one."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry or not inner.fields:
            yield prefix + field.name
        else:
            yield from leaves(inner, f"{prefix}{field.name}.")


def paths(leaf: str) -> set[str]:
    parts = leaf.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


EVERY_LEAF = list(leaves(ModelConfig.DESCRIPTOR))


@pytest.mark.parametrize("leaf", EVERY_LEAF)
def test_every_field_is_obeyed_or_named(leaf: str) -> None:
    assert len(paths(leaf) & (SUPPORTED_FIELDS | IGNORED_FIELDS.keys())) == 1


REGISTRY = BackendRegistry()
NO_GPU = "there is no GPU, instances "
"""Begins a note that depends on the machine."""
BACKENDS = [*REGISTRY.names, ""]


def backend_of(config: ModelConfig) -> Backend:
    return REGISTRY.get(config.backend or ENSEMBLE)


@pytest.mark.parametrize("name", REGISTRY.names)
def test_a_backend_declares_fields_that_there_are(name: str) -> None:
    backend = REGISTRY.get(name)
    known = {path for leaf in EVERY_LEAF for path in paths(leaf)}
    assert backend.supported_fields <= IGNORED_FIELDS.keys()
    assert backend.ignored_fields.keys() <= known - IGNORED_FIELDS.keys()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_field_that_is_set_is_obeyed_or_named(backend: str) -> None:
    for leaf in EVERY_LEAF:
        config = ModelConfig()
        set_leaf(config, leaf)
        config.backend = backend
        rules = ignored_fields(backend_of(config))
        named = [(path, rules[path]) for path in sorted(paths(leaf)) if path in rules][:1]
        notes = [each for each in ignored_fields_note(config, backend_of(config)) if NO_GPU not in each]
        assert notes == [f"not obeyed: {path} ({reason})" for path, reason in named]
        found = [
            each.message for each in ignored_field_findings(config, backend_of(config)) if NO_GPU not in each.message
        ]
        assert found == [f"{path} is not obeyed: {reason}" for path, reason in named]


def set_leaf(message: Message, leaf: str) -> None:
    """Give the field a value that is not its default."""
    name, _, rest = leaf.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if rest:
        set_leaf(value.add() if field.is_repeated else value, rest)
    elif field.message_type is None:
        given = some_value(field)
        if field.is_repeated:
            value.append(given)
        else:
            setattr(message, name, given)
    elif field.message_type.GetOptions().map_entry:
        set_entry(value, field.message_type)
    else:
        value.SetInParent()


def set_entry(value: object, entry: Descriptor) -> None:
    key, inner = some_value(entry.fields_by_name["key"]), entry.fields_by_name["value"]
    if inner.message_type is None:
        value[key] = some_value(inner)  # type: ignore[index]
    else:
        value[key].SetInParent()  # type: ignore[index]


def some_value(field: FieldDescriptor) -> str | bool | float | int:
    if field.enum_type is not None:
        # The second value: of an instance's kinds not that of a GPU, about which there is a note of its own.
        return int(field.enum_type.values[2 if field.enum_type.full_name.endswith("Group.Kind") else -1].number)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return "1"
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return True
    return 1


def test_notes_have_their_lines() -> None:
    text = """
    backend: "python"
    instance_group [ { count: 1 }, {
      secondary_devices { device_id: 1 } } ]
    optimization { eager_batching: true }
    """
    written = parse_pbtxt(text, "config.pbtxt")
    lines = {"instance_group.secondary_devices": 4, "optimization.eager_batching": 5}
    found = [
        written.locations.locate(each).text("c")
        for each in ignored_field_findings(written.config, backend_of(written.config))
    ]
    assert sorted(found) == [f"c:{line}: {path} is not obeyed: {IGNORED_FIELDS[path]}" for path, line in lines.items()]
    listed = [f"{path} (config.pbtxt:{line}: {IGNORED_FIELDS[path]})" for path, line in lines.items()]
    (note,) = ignored_fields_note(written.config, backend_of(written.config), written.locations)
    assert sorted(note.removeprefix("not obeyed: ").split("; ")) == sorted(listed)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there() -> None:
    written = parse_pbtxt("instance_group { }\ninstance_group {\n kind: KIND_GPU }", "config.pbtxt")
    said = "there is no GPU, instances of KIND_GPU run on the CPU"
    assert ignored_fields_note(written.config, backend_of(written.config)) == [said]
    (finding,) = ignored_field_findings(written.config, backend_of(written.config))
    assert written.locations.locate(finding).text("c") == f"c:3: {said}"


@pytest.mark.usefixtures("no_gpu")
def test_gpus_that_are_not_there_are_as_those_of_a_kind() -> None:
    written = parse_pbtxt("backend: 'python'\ninstance_group { }\ninstance_group {\n gpus: [ 0 ] }", "config.pbtxt")
    said = "there is no GPU, instances with gpus run on the CPU"
    assert ignored_fields_note(written.config, backend_of(written.config)) == [said]
    (finding,) = ignored_field_findings(written.config, backend_of(written.config))
    assert written.locations.locate(finding).text("c") == f"c:4: {said}"
    fill_defaults(written.config)
    check_structure(written.config)
    check_tensors(written.config)
    assert [(each.kind, each.gpu) for each in place_instances(written.config, 0)] == [("CPU", None), ("GPU", None)]


def test_no_rule_is_for_nothing() -> None:
    known = {path for leaf in EVERY_LEAF for path in paths(leaf)}
    assert SUPPORTED_FIELDS | IGNORED_FIELDS.keys() <= known


@pytest.mark.parametrize(
    ("backend", "text", "expected"),
    [
        ("python", "dynamic_batching { priority_levels: 2 } response_cache { enable: true }", []),
        ("python", "model_metrics { }", []),
        ("python", "optimization { graph { level: 1 } cuda { graphs: true } }",
         ["optimization.graph", "optimization.cuda"]),
        ("onnxruntime", "optimization { graph { level: 1 } }", []),
        ("python", "instance_group { rate_limiter { priority: 1 } } instance_group { passive: true }", []),
        ("vllm", "instance_group { rate_limiter { priority: 1 } } instance_group { passive: true }",
         ["instance_group.rate_limiter", "instance_group.passive"]),
        ("python", "sequence_batching { oldest { max_candidate_sequences: 4 } }", []),
        ("python", "sequence_batching { state { input_name: 'i' } iterative_sequence: true }", []),
        ("tensorrtllm", "sequence_batching { max_sequence_idle_microseconds: 4 }", ["sequence_batching"]),
        ("tensorrtllm", "response_cache { enable: true }", ["response_cache"]),
        ("python", "model_warmup { name: 'w' } model_warmup { name: 'v' }", []),
        ("tensorrt", "cc_model_filenames { key: '7.5' value: 'a' } instance_group { gpus: 0 profile: '1' }", []),
        ("pytorch", "cc_model_filenames { key: '7.5' value: 'a' } instance_group { gpus: 0 profile: '1' }",
         ["instance_group.profile", "cc_model_filenames"]),
    ],
)  # fmt: skip
def test_what_is_given_and_not_obeyed_is_named_once(backend: str, text: str, expected: list[str]) -> None:
    config, _ = parse_config(f"backend: '{backend}' {text}", "config.pbtxt")
    notes, rules = ignored_fields_note(config, backend_of(config)), ignored_fields(backend_of(config))
    reasons = "; ".join(f"{path} ({rules[path]})" for path in expected)
    assert [each for each in notes if NO_GPU not in each] == ([f"not obeyed: {reasons}"] if expected else [])
